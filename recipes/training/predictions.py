"""The answers of a trained network to the test images: two pictures and two tables."""

from __future__ import annotations

import csv
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpgluon_tools.extras import extra

from recipes.data.augment import read_crop
from recipes.training.config import TrainingConfig
from recipes.training.dataset import Dataset

__all__ = ["Prediction", "confusions", "save_predictions"]

_COLUMNS = 4
_MOST_IMAGES = 8
_MOST_LETTERS = 22


class Prediction(NamedTuple):
    """The answer to one image.

    Attributes
    ----------
    image : int
        Its position in the folder.
    answer : int
        The most probable class.
    probability : float
        The probability of the answer.
    of_right : float
        The probability of the right class.
    """

    image: int
    answer: int
    probability: float
    of_right: float


def save_predictions(
    run: Path, config: TrainingConfig, dataset: Dataset, predictions: Sequence[Prediction]
) -> None:
    """Write the pictures and tables of a run's predictions into its folder.

    ``predictions.jpg`` has up to eight test images. Nobody chose them by the answers: the classes
    are evenly spaced in their order, and the image is the first of each. ``mistakes.jpg`` has up to
    eight wrong answers, the most probable first; a run without mistakes does not leave it. At the
    lower end of an image is the answer with its probability and, where it is wrong, the right
    class.

    ``predictions.csv`` has a line for each image, ``confusion.csv`` how many images of each class
    had each answer. Names are in UTF-8.

    Parameters
    ----------
    run : Path
        The folder.
    config : TrainingConfig
    dataset : Dataset
        With images on the disk.
    predictions : sequence of Prediction
        At least one; in the order of ``dataset.test_indices``, without unreadable images.

    Raises
    ------
    DataError
        If an image cannot be decoded.
    """
    classes, labels = dataset.folder.classes, dataset.folder.labels
    _draw(run / "predictions.jpg", config, dataset, _one_of_some_classes(dataset, predictions))
    wrong = _mistakes(dataset, predictions)
    wrong.sort(key=lambda one: -one.probability)
    if wrong:
        _draw(run / "mistakes.jpg", config, dataset, wrong[:_MOST_IMAGES])
    else:
        (run / "mistakes.jpg").unlink(missing_ok=True)
    names = ("path", "right category", "answer", "probability", "probability of the right category")
    rows = (
        (
            *(dataset.folder.paths[one.image], classes[labels[one.image]], classes[one.answer]),
            *(f"{one.probability:.4f}", f"{one.of_right:.4f}"),
        )
        for one in predictions
    )
    _write(run / "predictions.csv", [names, *rows])
    counts = Counter((labels[one.image], one.answer) for one in predictions)
    numbers = range(len(classes))
    table = ([classes[right], *(counts[right, answer] for answer in numbers)] for right in numbers)
    _write(run / "confusion.csv", [("right category", *classes), *table])


def confusions(dataset: Dataset, predictions: Sequence[Prediction]) -> list[list[Any]]:
    """Return the right class, the answer and the number of images of the five commonest mistakes.

    Equally common ones are in the order of their names.
    """
    classes, labels = tuple(map(_readable, dataset.folder.classes)), dataset.folder.labels
    counts = Counter(
        (classes[labels[one.image]], classes[one.answer]) for one in _mistakes(dataset, predictions)
    )
    common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:5]
    return [[*names, count] for names, count in common]


def _mistakes(dataset: Dataset, predictions: Sequence[Prediction]) -> list[Prediction]:
    return [one for one in predictions if one.answer != dataset.folder.labels[one.image]]


def _one_of_some_classes(dataset: Dataset, predictions: Sequence[Prediction]) -> list[Prediction]:
    first: dict[int, Prediction] = {}
    for one in predictions:
        first.setdefault(int(dataset.folder.labels[one.image]), one)
    count = min(len(first), _MOST_IMAGES)
    return [list(first.values())[(2 * one + 1) * len(first) // (2 * count)] for one in range(count)]


def _write(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write a table; a file's name that is not UTF-8 keeps its bytes."""
    with open(path, "w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def _draw(
    path: Path, config: TrainingConfig, dataset: Dataset, shown: Sequence[Prediction]
) -> None:
    """Write a JPEG file of images side by side, each with its answer over its lower end."""
    with extra("plots"):
        from matplotlib.figure import Figure  # no pyplot: nothing global, no display needed

    folder, size = dataset.folder, config.size_in_use
    rows = math.ceil(len(shown) / _COLUMNS)
    figure = Figure(figsize=(8, 2 * rows))
    panels = figure.subplots(
        rows, _COLUMNS, squeeze=False,
        gridspec_kw={"left": 0, "right": 1, "bottom": 0, "top": 1, "wspace": 0, "hspace": 0},
    ).ravel()  # fmt: skip
    for axes in panels:
        axes.set_axis_off()
    for axes, one in zip(panels, shown):
        image = folder.paths[one.image]
        axes.imshow(
            read_crop(image, size, None, epoch=0, index=one.image, whole=config.shifts),
            extent=(0, 1, 0, 1),
        )
        answer, right = (
            _short(folder.classes[number]) for number in (one.answer, folder.labels[one.image])
        )
        mark = "\N{CHECK MARK}" if answer == right else "\N{BALLOT X}"
        words = f"{mark} {answer}, {one.probability:.2f}"
        label = words if answer == right else f"{words}\n({right})"
        _caption(axes, label)
    figure.savefig(path, dpi=120, pil_kwargs={"quality": 90})


def _caption(axes: Any, text: str) -> None:
    """Write lines over the lower end of an image, on a dark band, as large as its width allows."""
    lines = text.splitlines()
    axes.axhspan(0, 0.04 + 0.13 * len(lines), color="black", alpha=0.66, linewidth=0)
    size = min(14.0, 14.0 * 17 / max(map(len, lines)))
    axes.text(0.5, 0.03, text, color="white", fontsize=size, parse_math=False, ha="center")


def _readable(name: str) -> str:
    return os.fsencode(name).decode("utf-8", "replace")


def _short(name: str) -> str:
    words = _readable(name).replace("_", " ")
    return words if len(words) <= _MOST_LETTERS else f"{words[: _MOST_LETTERS - 1]}…"
