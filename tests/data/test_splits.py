"""The stratified split: counts, independence, and the same on every machine."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from recipes.data.splits import stratified_split

# Recorded with NumPy 1.23.5 on x86-64.
GOLDEN_SHA256 = "ff38386831ec0fd4b36bed9adcafa6035ca5e4be3fb65f5ffda04d156199b735"

LABELS = np.repeat(np.arange(4), [31, 60, 45, 800])


def test_every_class_gives_the_same_number_of_training_images_and_the_rest_is_for_testing():
    train, test = stratified_split(LABELS, 30, seed=0)
    assert np.bincount(LABELS[train]).tolist() == [30, 30, 30, 30]
    assert np.bincount(LABELS[test]).tolist() == [1, 30, 15, 770]
    assert sorted([*train, *test]) == list(range(len(LABELS)))
    assert (np.diff(train) > 0).all()
    assert (np.diff(test) > 0).all()


def test_the_split_is_the_one_that_every_machine_makes():
    train, _ = stratified_split(np.repeat(np.arange(3), 8), 3, seed=0)
    assert train.tolist() == [2, 4, 7, 9, 11, 15, 16, 18, 23]
    train, test = stratified_split(LABELS, 30, seed=2022)
    assert hashlib.sha256(",".join(map(str, [*train, *test])).encode()).hexdigest() == GOLDEN_SHA256


def test_a_class_with_too_few_images_is_named_with_its_count():
    with pytest.raises(ValueError, match=r"1 of 4 classes: inline_skate \(31\) .* at most 30"):
        stratified_split(LABELS, 31, seed=0, class_names=["inline_skate", "b", "c", "d"])
    with pytest.raises(ValueError, match=r"2 of 4 classes: 0 \(31\), 2 \(45\) images"):
        stratified_split(LABELS, 45, seed=0)
    with pytest.raises(
        ValueError, match=r"each class needs two images or more, .* too few: 1 \(1\)"
    ):
        stratified_split(np.array([0, 0, 1]), 1, seed=0)


def test_a_share_of_each_class_and_one_image_at_least_is_for_testing():
    labels = np.repeat(np.arange(5), [2, 4, 10, 13, 800])
    train, test = stratified_split(labels, 100, seed=0, test_share=0.2)
    assert np.bincount(labels[train]).tolist() == [1, 3, 8, 10, 100]
    assert np.bincount(labels[test]).tolist() == [1, 1, 2, 3, 700]
    _, fewer = stratified_split(labels, 100, seed=0, test_share=0.2, test_per_class=2)
    assert np.bincount(labels[fewer]).tolist() == [1, 1, 2, 2, 2]
    train, _ = stratified_split(labels, 100, seed=0, test_share=0.99)
    assert np.bincount(labels[train]).tolist() == [1, 1, 1, 1, 8]
    with pytest.raises(ValueError, match=r"needs two images or more, .* too few: 1 \(1\)"):
        stratified_split(np.array([0, 0, 1]), 100, seed=0, test_share=0.2)


@pytest.mark.parametrize("most", [1, 3, 7, 100])
def test_at_most_so_many_images_of_a_class_are_for_testing(most):
    labels = np.repeat([0, 1], [5, 12])
    train, everything = stratified_split(labels, 4, seed=3)
    same, test = stratified_split(labels, 4, seed=3, test_per_class=most)
    assert np.array_equal(train, same)
    assert set(test) <= set(everything)
    assert np.array_equal(np.bincount(labels[test]), np.minimum([1, 8], most))


@pytest.mark.parametrize(
    ("labels", "train_per_class", "seed", "message"),
    [
        ([0, 0], 0, 0, "train_per_class must be at least 1, received 0"),
        ([0, 0], 1, -1, "seed must be at least 0, received -1"),
        ([], 1, 0, "labels must be a one-dimensional array of integers"),
        ([0.0, 0.0], 1, 0, "dtype float64"),
        ([[0, 0]], 1, 0, r"shape \(1, 2\)"),
        ([0, -1], 1, 0, "labels must be a one-dimensional array of integers from 0"),
    ],
)
def test_bad_values_are_refused(labels, train_per_class, seed, message):
    with pytest.raises(ValueError, match=message):
        stratified_split(labels, train_per_class, seed=seed)
