"""Split a labelled data set into training and test images, class by class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Optional

import numpy as np
from numpy.typing import NDArray

from recipes.data.draws import Purpose, permutation
from recipes.options import at_least

__all__ = ["some_of_each_class", "stratified_split"]


def stratified_split(
    labels: Any,
    train_per_class: int,
    *,
    seed: int,
    test_per_class: Optional[int] = None,
    test_share: Optional[float] = None,
    class_names: Optional[Sequence[str]] = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose ``train_per_class`` images of every class for training, and others for testing.

    The choice within a class depends only on the seed, the label and the number of images of that
    class; it is the same on every machine and with every version of NumPy.

    Parameters
    ----------
    labels : array of int, shape (N,)
        The class of each image, from 0.
    train_per_class : int
        Training images per class; the usual protocol for Caltech 101 has 30.
    seed : int
        At least 0.
    test_per_class : int, optional
        At most so many test images per class; the usual protocol for Caltech 101 has 50. By
        default all that are not for training.
    test_share : float, optional
        In (0, 1). Of each class this share, rounded, and at least one image, is not for training;
        then ``train_per_class`` is how many train at most.
    class_names : sequence of str, optional
        For messages; by default a class is named by its label.

    Returns
    -------
    train_indices, test_indices : ndarray of int64
        Positions in ``labels``, ascending; no position is in both. Without ``test_per_class``,
        each is in one of them.

    Raises
    ------
    ValueError
        If ``train_per_class`` or ``test_per_class`` is below 1, ``seed`` below 0, ``labels`` empty,
        negative or not a one-dimensional array of integers, or a class has no image left for
        testing.
    """
    labels = np.asarray(labels)
    at_least(1, train_per_class=train_per_class)
    if test_per_class is not None:
        at_least(1, test_per_class=test_per_class)
    at_least(0, seed=seed)
    if labels.ndim != 1 or labels.size == 0 or labels.dtype.kind not in "iu" or labels.min() < 0:
        raise ValueError(
            "labels must be a one-dimensional array of integers from 0, received shape "
            f"{labels.shape} and dtype {labels.dtype}"
        )
    classes, counts = np.unique(labels, return_counts=True)
    train_counts = np.full(len(classes), train_per_class)
    if test_share is not None:
        for_testing = np.maximum(1, np.rint(test_share * counts).astype(int))
        train_counts = np.minimum(train_per_class, np.maximum(1, counts - for_testing))
    too_small = [
        f"{class_names[label] if class_names is not None else label} ({count})"
        for label, count, train_count in zip(classes.tolist(), counts.tolist(), train_counts)
        if count <= train_count
    ]
    if too_small:
        if counts.min() == 1:
            raise ValueError(
                f"each class needs two images or more, one to test on; too few: "
                f"{', '.join(too_small)}"
            )
        raise ValueError(
            f"train_per_class={train_per_class} leaves nothing to test on in {len(too_small)} of "
            f"{len(classes)} classes: {', '.join(too_small)} images; give at most "
            f"{counts.min() - 1}"
        )
    is_train, is_test = np.zeros((2, len(labels)), dtype=bool)
    for members, train_count in zip(_shuffled_classes(labels, seed), train_counts):
        is_train[members[:train_count]] = True
        is_test[members[train_count:][:test_per_class]] = True
    return np.flatnonzero(is_train), np.flatnonzero(is_test)


def some_of_each_class(labels: Any, per_class: int, *, seed: int) -> NDArray[np.int64]:
    """Return the positions, ascending, of at most ``per_class`` images of every class."""
    classes = _shuffled_classes(np.asarray(labels), seed)
    return np.sort(np.concatenate([members[:per_class] for members in classes]))


def _shuffled_classes(labels: NDArray[Any], seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield the positions of each class in an order that the seed and the class decide."""
    for label in np.unique(labels).tolist():
        members = np.flatnonzero(labels == label)
        yield members[permutation(len(members), Purpose.SPLIT, seed, label)]
