"""A photograph's bytes to categories: right ones, any way up, and nothing from bad bytes."""

from __future__ import annotations

import io
import math
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

from mpgluon import DataError, PrecisionError
from mpgluon.kernels.bfloat16 import has_native_bfloat16
from mpgluon_tools.onnx import ServingMetadata
from mpgluon_tools.serving import classifier as classifying
from mpgluon_tools.serving.classifier import Classifier, PhotographClassifier
from mpgluon_tools.serving.photographs import NotAPhotographError, read_photograph

import mxnet as mx
import numpy as np
import pytest
from deployment_helpers import with_random_values
from helpers import in_sequence
from mxnet.gluon import nn
from PIL import Image

from recipes.data import list_images, render_shapes
from recipes.data.loaders import eval_loader

SIZE = 16
INPUTS = 3 * SIZE**2
NAMES = tuple("abcdefg")


def linear_network(categories: int = len(NAMES)) -> nn.HybridSequential:
    """Return a network whose logits NumPy computes in one line."""
    net = in_sequence(nn.Dense(categories, in_units=INPUTS))
    return with_random_values(net)


def classifier_of(net, names=NAMES, dtype="bfloat16") -> Classifier:
    return Classifier(net, names, image_size=SIZE, dtype=dtype)


def file_of(image: Image.Image, form: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def some_image(width: int = 40, height: int = 30) -> Image.Image:
    pixels = np.random.RandomState(0).randint(0, 256, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def assert_right(prediction, logits: np.ndarray, error: float) -> None:
    """Compare with exact logits; the network's may be off by ``error`` each.

    Then numerator and denominator of a probability are off by factors of up to exp(error).
    """
    weights = np.exp(logits - logits.max())
    probabilities = dict(zip(NAMES, weights / weights.sum()))
    likeliest = sorted(probabilities, key=probabilities.__getitem__, reverse=True)[:5]
    assert [guess.category for guess in prediction.guesses] == likeliest
    for guess in prediction.guesses:
        exact = probabilities[guess.category]
        assert abs(guess.probability - exact) <= math.expm1(2 * error) * exact
    assert prediction.latency_ms > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("source", ["rendered", "photographs"])
def test_the_guesses_are_what_the_weights_say_of_the_crop_that_tests_see(
    dtype, source, request, tmp_path
):
    if source == "photographs":
        tree = request.getfixturevalue("caltech101_mini") / "101_ObjectCategories"
    else:
        render_shapes(tmp_path, classes=10, images_per_class=1, seed=0)
        (tree,) = (path for path in tmp_path.iterdir() if path.is_dir())
    folder = list_images(tree)
    chosen = range(0, len(folder), max(1, len(folder) // 6))
    net = linear_network()
    weight, bias = (parameter.data() for parameter in net.collect_params().values())
    # Small weights, so that several categories have a part of the probability.
    weight[:] = weight / INPUTS
    weight, bias = weight.asnumpy().astype(np.float64), bias.asnumpy().astype(np.float64)
    classifier = classifier_of(net, dtype=dtype)
    for index in chosen:
        ((images, _),) = eval_loader(folder, [index], batch_size=1, image_size=SIZE)
        pixels = images.asnumpy().astype(np.float64).ravel()
        logits, magnitude = weight @ pixels + bias, (abs(weight) @ abs(pixels) + abs(bias)).max()
        one, other = classifier(folder.paths[index].read_bytes())
        assert (one.dtype, other.dtype) == ("float32", dtype)
        # Sums of n terms in FP32 in any order: n * 2**-24 of the sum of magnitudes, to first
        # order; twice that for the terms left out.
        in_fp32 = 2 * INPUTS * 2.0**-24 * magnitude
        assert_right(one, logits, in_fp32)
        # Operands and result are rounded too: by half a unit in the last place, each. Weights
        # below float16's normal range by up to 2**-25.
        half_a_unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
        lost = 2.0**-25 * abs(pixels).sum()
        assert_right(other, logits, in_fp32 + 3.1 * half_a_unit * magnitude + lost)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"a text", b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        file_of(Image.new("RGB", (9, 9)), "GIF"), file_of(Image.new("RGB", (9, 9)), "TIFF"),
        bytes(range(256)) * 9,
    ],
    ids=["nothing", "text", "SVG", "EPS", "GIF", "TIFF", "noise"],
)  # fmt: skip
def test_another_kind_of_file_is_refused(data):
    with pytest.raises(NotAPhotographError, match="formats are JPEG, PNG, WEBP"):
        read_photograph(data, SIZE)


def test_a_damaged_photograph_is_refused():
    data = bytearray(file_of(some_image()))
    data[len(data) // 2] ^= 1
    with pytest.raises(DataError, match="damaged or cut short"):
        read_photograph(bytes(data), SIZE)


# Over our limit alone, over where Pillow warns (89 million), and over where Pillow refuses.
@pytest.mark.parametrize("side", [5700, 10_000, 20_000])
def test_a_decompression_bomb_is_refused_by_its_header(side, monkeypatch):
    def decoded(*_):
        pytest.fail("its pixels were decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decoded)
    bomb = bytearray(file_of(Image.new("1", (8, 8))))
    bomb[16:24] = struct.pack(">II", side, side)  # the sizes in its header
    bomb[29:33] = struct.pack(">I", zlib.crc32(bomb[12:29]))
    with pytest.raises(DataError, match="more than 32 million pixels; give a smaller copy"):
        read_photograph(bytes(bomb), SIZE)


def test_a_network_that_overflows_in_float16_gives_no_guesses_there():
    net = linear_network()
    weight, _ = net.collect_params().values()
    # Each weight fits into float16; 768 of them, times a white image, do not.
    weight.set_data(mx.nd.full(weight.shape, 1000))
    white = file_of(Image.new("RGB", (20, 20), "white"))
    one, other = classifier_of(net, dtype="float16")(white)
    assert len(one.guesses) == 5
    assert other.guesses == other.others == ()


def test_one_format_gives_every_category_of_a_file_or_of_bytes(tmp_path):
    metadata = ServingMetadata("", SIZE, NAMES)
    classify = PhotographClassifier(linear_network(), metadata, "float16")
    assert classify.classes == NAMES
    photograph = file_of(some_image())
    found = classify(photograph)
    assert sorted(category for category, _ in found) == list(NAMES)
    assert sum(share for _, share in found) == pytest.approx(1, abs=1e-12)
    _, expected = classifier_of(linear_network(), dtype="float16")(photograph)
    assert found[:5] == [(guess.category, guess.probability) for guess in expected.guesses]
    (tmp_path / "photograph.gif").write_bytes(file_of(some_image(), "GIF"))
    assert len(classify(str(tmp_path / "photograph.gif"))) == len(NAMES)
    with pytest.raises(NotAPhotographError):  # bytes may come from anywhere
        classify(file_of(some_image(), "GIF"))


def test_one_format_that_overflows_is_named():
    net = linear_network()
    weight, _ = net.collect_params().values()
    weight.set_data(mx.nd.full(weight.shape, 1000))
    classify = PhotographClassifier(net, ServingMetadata("", SIZE, NAMES), "float16")
    with pytest.raises(PrecisionError, match='not finite in float16; try dtype="float32"'):
        classify(file_of(Image.new("RGB", (20, 20), "white")))


def test_calls_from_several_threads_wait_for_each_other_and_answer_alike(monkeypatch):
    classifier = classifier_of(linear_network())
    photographs = [file_of(some_image(width)) for width in range(20, 36)]
    alone = [[prediction.guesses for prediction in classifier(data)] for data in photographs]
    inside = threading.Semaphore(1)

    def read_slowly(*arguments):
        assert inside.acquire(blocking=False), "two photographs are looked at at once"
        pixels = read_photograph(*arguments)
        time.sleep(0.01)
        inside.release()
        return pixels

    monkeypatch.setattr(classifying, "read_photograph", read_slowly)
    with ThreadPoolExecutor(8) as pool:
        together = [[p.guesses for p in pair] for pair in pool.map(classifier, photographs)]
    assert together == alone


@pytest.mark.parametrize("dtypes", [("float16", "bfloat16"), ["bfloat16", "float16"]])
def test_each_format_says_what_it_says_alone_and_how_it_is_computed(dtypes):
    photograph = file_of(some_image())
    found = classifier_of(linear_network(), dtype=dtypes)(photograph)
    assert [one.dtype for one in found] == ["float32", *dtypes]
    kinds = {one.dtype: one.arithmetic for one in found}
    assert (kinds["float32"], kinds["float16"]) == ("native", "emulated")
    assert kinds["bfloat16"] == ("native" if has_native_bfloat16() else "emulated")
    for one in found[1:]:
        _, alone = classifier_of(linear_network(), dtype=one.dtype)(photograph)
        assert alone.guesses == one.guesses


@pytest.mark.parametrize(
    ("names", "dtype", "message"),
    [
        (("a", "b"), "bfloat16", "has 7 logits, but classes names 2"),
        (NAMES, "float32", "must be bfloat16 or float16, or both; received 'float32'"),
        (NAMES, ("float16", "float32"), r"received \('float16', 'float32'\)"),
        (NAMES, (), r"received \(\)"),
    ],
)
def test_what_does_not_fit_the_network_is_refused(names, dtype, message):
    with pytest.raises(ValueError, match=message):
        classifier_of(linear_network(), names, dtype)
