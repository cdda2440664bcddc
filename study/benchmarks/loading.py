"""The contestants of the input pipeline: one pass over JPEG files, to batches.

Each factory returns a function that does it once and returns the number of images; and facts about
it, for :mod:`study.benchmarks.child`. ``images`` is a folder with one folder of images per class,
or ``None`` for 600 rendered images in ``data``; ``workers`` processes decode, with 0 the process
itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Optional

from mxnet.gluon.data import DataLoader
from mxnet.gluon.data.vision import ImageFolderDataset, transforms

from recipes.data.augment import IMAGENET_MEAN, IMAGENET_STD
from recipes.data.images import list_images
from recipes.data.loaders import ImageLoader, train_loader
from recipes.data.shapes import render_shapes

__all__ = ["file_loader", "gluon_data_loader", "image_loader"]

Prepared = tuple[Callable[[], int], dict[str, Any]]


def image_loader(
    *, images: Optional[str], batch_size: int, image_size: int, workers: int
) -> Prepared:
    """Prepare a pass of mpgluon's loader for training."""
    batches = file_loader(images, batch_size=batch_size, image_size=image_size, workers=workers)
    return _one_pass(batches, batch_size)


def file_loader(
    images: Optional[str],
    *,
    batch_size: int,
    image_size: int,
    workers: int,
    batches: Optional[int] = None,
) -> ImageLoader:
    """Return mpgluon's loader for training, of all images or of the first ``batches`` batches.

    Raises
    ------
    ValueError
        If there are fewer images.
    """
    folder = list_images(_folder(images))
    count = len(folder) if batches is None else batches * batch_size
    if count > len(folder):
        raise ValueError(
            f"{batches} batches of {batch_size} need {count} images, and there are {len(folder)}; "
            "choose smaller batches or another folder"
        )
    return train_loader(
        folder,
        range(count),
        batch_size=batch_size,
        image_size=image_size,
        num_workers=workers,
    )


def gluon_data_loader(
    *, images: Optional[str], batch_size: int, image_size: int, workers: int
) -> Prepared:
    """Prepare a pass of Gluon's own ``DataLoader`` with the same crops."""
    steps = [
        transforms.RandomResizedCrop(image_size, scale=(0.25, 1.0)),
        transforms.RandomFlipLeftRight(),
        transforms.ToTensor(),
        transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ]
    dataset = ImageFolderDataset(str(_folder(images)))
    batches = DataLoader(
        dataset.transform_first(transforms.Compose(steps)),
        batch_size,
        shuffle=True,
        last_batch="discard",
        num_workers=workers,
    )
    return _one_pass(batches, batch_size)


def _folder(images: Optional[str]) -> Path:
    return Path(images) if images is not None else render_shapes("data")


def _one_pass(batches: Any, batch_size: int) -> Prepared:
    def run() -> int:
        images = 0
        for pixels, labels in batches:
            pixels.wait_to_read()
            images += len(labels)
        return images

    return run, {"images": len(batches) * batch_size}
