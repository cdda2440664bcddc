"""Batches: the same from any number of workers, resumable, rounded once, and never silent."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

from mpgluon.errors import DataError

import mxnet as mx
import numpy as np
import pytest
from PIL import Image

from recipes.data import loaders, reader
from recipes.data.augment import IMAGENET_MEAN, IMAGENET_STD, Augmentation, read_crop
from recipes.data.images import list_images
from recipes.data.loaders import eval_loader, train_loader
from recipes.data.reader import BatchReader
from recipes.data.sampler import EpochBatchSampler

COUNT = 23


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return 23 noisy images of two classes, of many sizes, some grayscale."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for index in range(COUNT):
        height, width = rng.integers(40, 120, size=2)
        shape = (height, width) if index % 5 == 0 else (height, width, 3)
        # Smooth noise, so that a shifted crop shows in every pixel and JPEG keeps it.
        small = Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).resize((9, 9))
        path = root / f"class_{index % 2}" / f"image_{index:04d}.jpg"
        path.parent.mkdir(exist_ok=True)
        small.resize((int(width), int(height)), Image.Resampling.BICUBIC).save(path, quality=95)
    return list_images(root)


def numpy_batches(loader):
    return [(images.asnumpy(), labels.asnumpy()) for images, labels in loader]


def same(left, right):
    assert len(left) == len(right)
    return all(np.array_equal(a, c) and np.array_equal(b, d) for (a, b), (c, d) in zip(left, right))


def make_train(folder, **options):
    return train_loader(
        folder, range(len(folder)), **{"batch_size": 4, "image_size": 32, "seed": 5, **options}
    )


def make_eval(folder, **options):
    return eval_loader(folder, range(len(folder)), **{"batch_size": 4, "image_size": 32, **options})


@pytest.mark.multiprocess
@pytest.mark.parametrize("make", [make_train, make_eval])
def test_batches_are_those_of_two_workers_and_in_float16_rounded(folder, make):
    alone, helped, narrow = (
        make(folder),
        make(folder, num_workers=2),
        make(folder, dtype="float16", num_workers=2),
    )
    for images, labels in make(folder):
        assert isinstance(images, mx.nd.NDArray)
        assert images.context == labels.context == mx.cpu()
        assert (images.shape[1:], images.dtype) == ((3, 32, 32), np.float32)
        assert (labels.shape, labels.dtype) == (images.shape[:1], np.int32)
    for _ in range(2):
        batches = numpy_batches(alone)
        assert same(batches, numpy_batches(helped))
        rounded = numpy_batches(narrow)
        assert {images.dtype for images, _ in rounded} == {np.dtype(np.float16)}
        assert same([(images.astype(np.float16), labels) for images, labels in batches], rounded)
    helped.close()
    narrow.close()


def test_pixels_are_normalized_with_imagenets_mean_and_standard_deviation(tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "a.png")
    # 56 of the central 64 * 224 / 256 = 56 pixels: neither resized nor shifted.
    [(images, _)] = numpy_batches(
        eval_loader(list_images(tmp_path), [0], batch_size=1, image_size=56)
    )
    exact = (pixels[4:60, 4:60] / 255.0 - IMAGENET_MEAN) / IMAGENET_STD
    # Level, mean, difference and quotient each round by at most 2^-24 of at most 2.7 / std, in all
    # less than 2^-20.
    np.testing.assert_allclose(images[0].transpose(1, 2, 0), exact, rtol=0, atol=2.0**-20)


def test_the_test_crop_is_the_centre_after_resizing_the_shorter_side(caltech101_mini):
    for path in list_images(caltech101_mini / "101_ObjectCategories").paths[::100]:
        crop = read_crop(path, 112, None, epoch=0, index=0).astype(float)
        with Image.open(path) as image:
            image = image.convert("RGB")
            scale = 128 / min(image.size)
            size = round(image.width * scale), round(image.height * scale)
            image = image.resize(size, Image.Resampling.BILINEAR)
        left, top = (image.width - 112) / 2, (image.height - 112) / 2
        expected = image.resize((112, 112), box=(left, top, left + 112, top + 112))
        difference = np.abs(crop - np.asarray(expected, dtype=float))
        assert difference.mean() < 5  # two resizings against one, of 255


def test_whole_images_are_shifted_by_up_to_an_eighth_for_training_and_as_they_are_for_testing(
    tmp_path,
):
    pixels = np.random.RandomState(0).randint(1, 256, (32, 32, 3)).astype(np.uint8)
    path = tmp_path / "a.png"
    Image.fromarray(pixels).save(path)
    np.testing.assert_array_equal(read_crop(path, 32, None, epoch=0, index=0, whole=True), pixels)

    colour = np.round(255 * np.array(IMAGENET_MEAN))
    padded = np.broadcast_to(colour, (40, 40, 3)).astype(np.uint8).copy()
    padded[4:36, 4:36] = pixels
    possible = {
        one.tobytes(): (top, left, mirrored)
        for top in range(9)
        for left in range(9)
        for mirrored, one in enumerate(
            (
                padded[top : top + 32, left : left + 32],
                padded[top : top + 32, left : left + 32][:, ::-1],
            )
        )
    }
    shifts = Augmentation(seed=0, shifts=True)
    drawn = [
        possible[read_crop(path, 32, shifts, epoch=epoch, index=0).tobytes()]
        for epoch in range(400)
    ]
    assert {top for top, _, _ in drawn} == {left for _, left, _ in drawn} == set(range(9))
    assert 150 < sum(mirrored for _, _, mirrored in drawn) < 250  # five standard deviations


@pytest.mark.multiprocess
@pytest.mark.parametrize("workers", [0, 2])
def test_the_time_that_a_batch_is_waited_for_is_without_its_copy(folder, workers, monkeypatch):
    now = 0.0

    def taking(seconds, function):
        def slow(*arguments):
            nonlocal now
            now += seconds
            return function(*arguments)

        return slow

    monkeypatch.setattr(loaders, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(loaders, "from_numpy", taking(100.0, loaders.from_numpy))
    monkeypatch.setattr(BatchReader, "__call__", taking(3.0, BatchReader.__call__))
    monkeypatch.setattr(Future, "result", taking(5.0, Future.result))
    loader = make_train(folder, num_workers=workers)
    waits = []
    for _ in loader:
        waits.append(loader.seconds_waited)
        now += 1000.0  # a step
    assert waits == [3.0 if workers == 0 else 5.0] * len(loader)


def test_a_test_pass_keeps_the_order_and_the_incomplete_last_batch(folder):
    order = [5, 3, 8, 1, 0, 22]
    loader = eval_loader(folder, order, batch_size=4, image_size=32)
    batches = numpy_batches(loader)
    assert [len(labels) for _, labels in batches] == [4, 2]
    assert np.concatenate([labels for _, labels in batches]).tolist() == [
        folder.labels[index] for index in order
    ]
    assert len(loader) == 2


def test_epochs_differ_in_order_and_in_crops_and_can_be_repeated(folder):
    loader = make_train(folder)
    first, second = numpy_batches(loader), numpy_batches(loader)
    assert not same(first, second)
    loader.set_epoch(1)
    assert same(numpy_batches(loader), second)
    loader.set_epoch(0)
    assert same(numpy_batches(loader), first)
    path = folder.paths[0]
    crops = {
        read_crop(path, 32, Augmentation(seed=0), epoch=epoch, index=0).tobytes()
        for epoch in range(10)
    }
    assert len(crops) == 10


@pytest.mark.multiprocess
@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_begun_in_the_middle_equals_the_tail(folder, workers):
    whole = make_train(folder)
    whole.set_epoch(3)
    resumed = make_train(folder, num_workers=workers)
    resumed.set_epoch(3, first_batch=2)
    assert same(numpy_batches(resumed), numpy_batches(whole)[2:])
    # The pass after it is a whole one of the next epoch.
    assert same(numpy_batches(resumed), numpy_batches(whole))
    resumed.close()


def test_the_order_is_the_one_that_every_machine_makes():
    sampler = EpochBatchSampler(10, 10, seed=0)
    sampler.set_epoch(7)
    generator = np.random.PCG64(np.random.SeedSequence([3, 0, 7]))
    keys = [int(generator.random_raw()) for _ in range(10)]
    expected = sorted(range(10), key=keys.__getitem__)
    assert [position for _, position in next(iter(sampler))] == expected


def test_the_batches_of_all_ranks_are_those_of_one_process():
    one = list(EpochBatchSampler(50, 6, seed=1))
    ranks = [list(EpochBatchSampler(50, 3, seed=1, rank=r, world_size=2)) for r in range(2)]
    assert len(one) == len(ranks[0]) == len(ranks[1]) == 8
    for whole, left, right in zip(one, *ranks):
        assert sorted(whole) == sorted(left + right)


def test_the_ranks_of_a_test_pass_cover_every_image_once():
    ranks = [EpochBatchSampler(23, 4, seed=None, rank=r, world_size=3) for r in range(3)]
    keys = [key for rank in ranks for batch in rank for key in batch]
    assert sorted(keys) == [(0, position) for position in range(23)]
    assert [len(rank) for rank in ranks] == [len(list(rank)) for rank in ranks] == [2, 2, 2]


def test_a_crop_covers_the_share_asked_for_and_has_a_ratio_in_range():
    from recipes.data.augment import _random_box

    rng = np.random.default_rng(0)
    for width, height in [(300, 200), (200, 300), (64, 64)]:
        for _ in range(300):
            left, top, right, bottom = _random_box(width, height, (0.25, 1.0), rng)
            assert 0 <= left < right <= width + 1e-9
            assert 0 <= top < bottom <= height + 1e-9
            assert 0.25 - 1e-9 <= (right - left) * (bottom - top) / (width * height) <= 1 + 1e-9
            assert 3 / 4 - 1e-9 <= (right - left) / (bottom - top) <= 4 / 3 + 1e-9


@pytest.fixture
def damaged(folder, tmp_path):
    """Return the images again, with one truncated and one that is none."""
    for path in folder.paths:
        copy = tmp_path / path.parent.name / path.name
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    copies = list_images(tmp_path)
    copies.paths[1].write_bytes(copies.paths[1].read_bytes()[:-300])
    copies.paths[6].write_bytes(b"no image")
    return copies


@pytest.mark.multiprocess
@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_an_error_that_names_it(damaged, workers):
    loader = make_eval(damaged, num_workers=workers)
    for _ in range(2):  # the loader can be used again, with the same result
        with pytest.raises(DataError, match=f"{damaged.paths[1].name}.*skip_unreadable"):
            list(loader)
    loader.close()


@pytest.mark.multiprocess
@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_images_are_left_out_counted_and_named(damaged, workers, caplog):
    loader = make_eval(damaged, num_workers=workers, on_unreadable="skip")
    with caplog.at_level(logging.WARNING):
        batches = numpy_batches(loader)
        numpy_batches(loader)
    assert [len(labels) for _, labels in batches] == [3, 3, 4, 4, 4, 3]
    assert loader.unreadable == (damaged.paths[1], damaged.paths[6])
    assert loader.left_out == [damaged.paths[1], damaged.paths[6]]  # of the second pass
    kept = [index for index in range(COUNT) if index not in (1, 6)]
    labels = np.concatenate([labels for _, labels in batches])
    assert labels.tolist() == damaged.labels[kept].tolist()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2, "each is logged once"
    assert damaged.paths[6].name in messages[1]
    assert "left out, 2 images so far" in messages[1]
    loader.close()


def test_a_process_of_several_that_would_lose_a_whole_training_batch_says_so(damaged):
    options = {"batch_size": 2, "image_size": 32, "on_unreadable": "skip"}
    loader = train_loader(damaged, [1, 6, 1, 6], **options, rank=1, world_size=2)
    with pytest.raises(DataError, match="none of this process's 2 images of a batch can be"):
        list(loader)


@pytest.mark.multiprocess
def test_a_pass_left_early_ends_its_workers_and_the_next_one_is_right(folder):
    loader = make_train(folder, num_workers=2)
    expected = numpy_batches(make_train(folder))
    for _ in range(2):
        first = list(islice(loader, 2))
        assert same(expected[:2], [(x.asnumpy(), y.asnumpy()) for x, y in first])
    assert same(numpy_batches(loader), expected)
    loader.close()
    loader.close()


@pytest.mark.multiprocess
def test_a_killed_worker_is_an_error_and_not_a_hang(folder, monkeypatch):
    parent = os.getpid()

    def killed(*_arguments, **_options):
        assert os.getpid() != parent
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(reader, "read_crop", killed)
    loader = make_train(folder, num_workers=1)
    with pytest.raises(DataError, match="a worker process that decodes images was killed"):
        list(loader)


PROGRAM = """
import sys
import mpgluon
from recipes.data.images import list_images
from recipes.data.loaders import train_loader
folder = list_images(sys.argv[1])
loader = train_loader(folder, range(len(folder)), batch_size=4, image_size=32, num_workers=2)
while True:
    for images, labels in loader:
        print("batch", flush=True)
"""


@pytest.mark.multiprocess
def test_workers_end_when_their_program_is_killed(folder):
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder.root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(reader.__file__).parents[2])},
        start_new_session=True,
        text=True,
    )
    assert process.stdout.readline() == "batch\n"
    process.kill()
    process.communicate(timeout=30)  # ends when the last worker has closed the streams
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("a worker is running")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype must be one of float32, float16, received 'bfloat16'"),
        ({"on_unreadable": "ignore"}, "on_unreadable must be 'error' or 'skip', received 'ignore'"),
        ({"image_size": 0}, "image_size must be at least 1"),
        ({"num_workers": -1}, "num_workers must be at least 0, received -1"),
        ({"batch_size": 0}, "batch_size must be at least 1, received 0"),
        ({"batch_size": 24}, "23 images give no batch of 24"),
        ({"batch_size": 12, "world_size": 2}, "for each of 2 processes"),
        ({"rank": 1}, "rank must be from 0 to world_size - 1, received 1 of 1"),
        ({"seed": -1}, "seed must be at least 0, received -1"),
        ({"scale": (0.0, 1.0)}, "scale must be two shares"),
        ({"scale": (0.5, 0.4)}, "scale must be two shares"),
    ],
)
def test_bad_values_are_refused(folder, options, message):
    with pytest.raises(ValueError, match=message):
        make_train(folder, **options)
