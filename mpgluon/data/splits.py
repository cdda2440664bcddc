"""Split a labelled data set into training and test images, class by class.

It looks at labels only, and draws its numbers from NumPy's bit generator itself, whose stream
NumPy promises never to change, while it makes no such promise for ``Generator.permutation``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
from numpy.typing import NDArray

# Keeps these draws apart from the loaders' and the renderer's under the same seed.
_PURPOSE = 1


def stratified_split(
    labels: Any,
    train_per_class: int,
    *,
    seed: int,
    class_names: Optional[Sequence[str]] = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose ``train_per_class`` images of every class for training; the rest is for testing.

    The choice within a class depends on the seed, the label and the number of images of that
    class only, and is the same on every machine and with every NumPy version.

    Parameters
    ----------
    labels : array of int, shape (N,)
        The class of each image, from 0.
    train_per_class : int
        How many images of each class to train on; the field's protocol for Caltech 101 is 30.
    seed : int
        At least 0; another seed gives another split.
    class_names : sequence of str, optional
        For messages; without it a class is named by its label.

    Returns
    -------
    train_indices, test_indices : ndarray of int64
        Positions in ``labels``, ascending; together each position exactly once.

    Raises
    ------
    ValueError
        If ``train_per_class`` is below 1, ``seed`` below 0, ``labels`` empty, not a row of
        integers or negative, or a class has no image left for testing.
    """
    labels = np.asarray(labels)
    if train_per_class < 1:
        raise ValueError(f"train_per_class must be at least 1, got {train_per_class}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    if labels.ndim != 1 or labels.size == 0 or labels.dtype.kind not in "iu" or labels.min() < 0:
        raise ValueError(
            f"labels must be a row of integers from 0, got shape {labels.shape} and dtype "
            f"{labels.dtype}"
        )
    classes, counts = np.unique(labels, return_counts=True)
    too_small = [
        f"{class_names[label] if class_names is not None else label} ({count})"
        for label, count in zip(classes.tolist(), counts.tolist())
        if count <= train_per_class
    ]
    if too_small:
        raise ValueError(
            f"train_per_class={train_per_class} leaves nothing to test on in {len(too_small)} of "
            f"{len(classes)} classes: {', '.join(too_small)} images; give at most "
            f"{counts.min() - 1}"
        )
    is_train = np.zeros(len(labels), dtype=bool)
    for label in classes.tolist():
        members = np.flatnonzero(labels == label)
        is_train[members[_shuffled(len(members), seed, label)[:train_per_class]]] = True
    return np.flatnonzero(is_train), np.flatnonzero(~is_train)


def _shuffled(count: int, seed: int, label: int) -> NDArray[np.int64]:
    """Return a permutation of ``range(count)``: the order of ``count`` random 64-bit numbers."""
    keys = np.random.PCG64(np.random.SeedSequence([_PURPOSE, seed, label])).random_raw(count)
    return np.argsort(keys, kind="stable")
