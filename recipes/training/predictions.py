"""A picture of some test images with a trained network's predictions."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from pathlib import Path

from mpgluon.base.devices import from_numpy
from mpgluon_tools.extras import extra

import mxnet as mx
from mxnet import gluon

from recipes.data.augment import normalized_levels, read_crop
from recipes.data.reader import normalized
from recipes.training.config import TrainingConfig
from recipes.training.dataset import Dataset

__all__ = ["save_predictions"]

_COLUMNS = 4
_MOST_IMAGES = 8
_MOST_LETTERS = 22


def save_predictions(
    path: Path,
    net: gluon.Block,
    config: TrainingConfig,
    dataset: Dataset,
    device: mx.Context,
    *,
    unreadable: Collection[Path] = (),
) -> None:
    """Write a JPEG file with up to eight test images and the network's predictions.

    Nobody chose them by the answers: the classes are evenly spaced in their order, and the image is
    the first test image of each. Below it is the most probable class with its probability, and,
    where that is wrong, the right one. Without a readable image, there is no file.

    Parameters
    ----------
    path : Path
    net : gluon.Block
        Takes normalized images in the compute format, as in training; gives logits.
    config : TrainingConfig
    dataset : Dataset
        With images on the disk.
    device : Context
        Where the network is.
    unreadable : collection of Path, optional
        Images to leave out.

    Raises
    ------
    DataError
        If an image cannot be decoded.
    """
    with extra("plots"):
        from matplotlib.figure import Figure  # no pyplot: nothing global, no display needed

    shown = _choose(dataset, unreadable)
    if not shown:
        return
    folder, size = dataset.folder, config.size_in_use
    pixels = [
        read_crop(folder.paths[index], size, None, epoch=0, index=index, whole=config.shifts)
        for index in shown
    ]
    images = from_numpy(normalized(pixels, normalized_levels().astype(config.image_dtype)))
    logits = net(images.as_in_context(device)).as_nd_ndarray().astype("float32")
    probabilities = logits.softmax().asnumpy()

    rows = math.ceil(len(shown) / _COLUMNS)
    figure = Figure(figsize=(8, 2.3 * rows), layout="constrained")
    panels = figure.subplots(rows, _COLUMNS, squeeze=False).ravel()
    for axes in panels:
        axes.set(xticks=(), yticks=())
        axes.spines[:].set_visible(False)
    for axes, image, label, answers in zip(panels, pixels, folder.labels[shown], probabilities):
        axes.imshow(image)
        answer, right = (_short(folder.classes[one]) for one in (answers.argmax(), label))
        mark = "\N{CHECK MARK}" if answer == right else "\N{BALLOT X}"
        words = f"{mark} {answer}, {answers.max():.2f}"
        label = words if answer == right else f"{words}\n({right})"
        axes.set_xlabel(label, fontsize=10, parse_math=False)
    figure.savefig(path, dpi=120, pil_kwargs={"quality": 90})


def _choose(dataset: Dataset, unreadable: Collection[Path]) -> list[int]:
    """Return the position of the first test image of each of some classes."""
    first: dict[int, int] = {}
    for index in dataset.test_indices:
        if dataset.folder.paths[index] not in unreadable:
            first.setdefault(int(dataset.folder.labels[index]), index)
    count = min(len(first), _MOST_IMAGES)
    return [list(first.values())[(2 * one + 1) * len(first) // (2 * count)] for one in range(count)]


def _short(name: str) -> str:
    words = os.fsencode(name).decode("utf-8", "replace").replace("_", " ")
    return words if len(words) <= _MOST_LETTERS else f"{words[: _MOST_LETTERS - 1]}…"
