"""The experiments on CIFAR-10, and the exponents of one of its runs."""

from mpgluon.diagnostics import exponent_histogram
from mpgluon.errors import DataError

import numpy as np
import pytest

from study.experiments import cifar10, exponents
from study.experiments.experiment import Outcome, Place

RUNS = cifar10.GROUP.experiments
KINDS = ("weights", "activations", "activation_gradients", "gradients")


def outcome(accuracy):
    figures = {"test_accuracy": accuracy, "train_loss": 0.25, "skipped_steps": 2, "steps": 7820}
    return Outcome(figures)


def test_without_the_images_a_run_says_how_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "_FOLDER", "cifar10-of-this-test")
    (tmp_path / "cifar10-of-this-test" / "train" / "cat").mkdir(parents=True)  # and no images
    with pytest.raises(DataError, match=r"has all images of CIFAR-10; data/README.md"):
        RUNS[0].run(Place(tmp_path, tmp_path / "work"))
    assert not (tmp_path / "work").exists()


def test_rows_differ_in_their_arithmetic_alone_and_all_have_a_name():
    arithmetic = {"dtype", "loss_scale", "update_rounding", "seed"}
    common = [
        {key: value for key, value in one.config.items() if key not in arithmetic} for one in RUNS
    ]
    assert all(config == common[0] for config in common)
    assert len({str(one.config) for one in RUNS}) == len(RUNS)
    assert cifar10.BASE.name == "cifar10/float32/seed-0"


def test_a_row_with_one_seed_shows_the_difference_of_that_seed(record_of):
    records = {}
    for one in RUNS:
        row, seed = one.name.split("/")[1], one.config["seed"]
        below = {"float32": 0.0, "float16": 0.001, "e5m2-none": 0.3}.get(row, 0.002)
        records[one.name] = record_of(one, outcome(0.91 + 0.01 * seed - below))
    view = cifar10.GROUP.view(records)
    cells = {row[0]: row[1:3] for row in view.table()}
    assert len(cells) == len(cifar10.ROWS)
    assert cells["FP32"] == ["92.00 ± 1.00", "-"]
    assert cells["FP16, dynamic loss scale"] == ["91.90 ± 1.00", "-0.10 (-0.10 to -0.10)"]
    assert cells["products of E5M2 without scales"] == ["61.00 (one seed)", "-30.00"]
    here = {row[0]: row[2] for row in view.published_table()}
    assert here["He et al. 2016, table 6"] == "FP32: 92.00 ± 1.00"
    assert (
        "without scales: 61.00 (one seed), FP32 -30.00; products of E5M2, dynamic loss scale"
        in (here["Cambier et al. 2020, introduction"])
    )
    assert cifar10.GROUP.view({}).table() == cifar10.GROUP.view({}).published_table() == []


@pytest.fixture
def numbers(record_of):
    """Return a record of two layers, and the view of it."""
    (one,) = exponents.GROUP.experiments
    values = {
        "weights": [0.5, 0.25, 0.0],
        "activations": [1.0, 2.0, 3.0, 4.0],
        "activation_gradients": [2.0**-26, 2.0**-26, 2.0**-20, np.inf],
        "gradients": [2.0**-10, 0.0],
    }
    curves = {
        f"epoch-{epoch}/{kind}/{layer}": exponents.as_list(exponent_histogram([np.float32(array)]))
        for epoch in exponents.EPOCHS
        for kind, array in values.items()
        for layer in ("conv 1", "dense 2")
    }
    return values, exponents.GROUP.view({one.name: record_of(one, Outcome({}, curves))})


@pytest.mark.parametrize("kind", KINDS)
def test_histograms_of_a_record_are_those_that_were_counted(numbers, kind):
    values, view = numbers
    found = view.histograms(exponents.EPOCHS[0], kind)
    assert list(found) == ["conv 1", "dense 2"]
    expected = exponent_histogram([np.float32(values[kind])])
    for one in found.values():
        assert (one.zeros, one.not_finite) == (expected.zeros, expected.not_finite)
        np.testing.assert_array_equal(one.counts, expected.counts)


def test_an_empty_histogram_stays_empty():
    empty = exponent_histogram([np.zeros(3, np.float32)])
    assert exponents.as_list(empty) == [3, 0, -149]
    again = exponents.from_list(exponents.as_list(empty))
    assert (again.zeros, again.counts.sum()) == (3, 0)


def test_shares_that_formats_lose_are_those_below_their_smallest_number(numbers):
    _, view = numbers
    rows = {row[0]: row[1:] for row in view.lost(exponents.EPOCHS[-1])}
    # One of four numbers is infinite, two are below 2^-24, and one more below 2^-16.
    assert rows["gradients of activations"] == ["50.0 %", "0 %", "75.0 %", "75.0 %"]
    assert rows["weights"] == ["0 %"] * 4
    # The mean of 32 losses turns 2^-20 into 2^-25.
    assert view.of_activation_gradients(1 / 32) == ["75.0 %"] * 3
    assert view.ranges(exponents.EPOCHS[-1])["activations"] == "$2^{0}$ to $2^{3}$"
