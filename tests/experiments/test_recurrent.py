"""The LSTM that reads reviews: same beginnings, learning in each format, and the page on it."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments.experiment import Outcome
from experiments.reader import FORMATS, ReaderSettings, make_network, train
from experiments.recurrent import GROUP
from experiments.sentences import LENGTH, VOCABULARY

TINY = ReaderSettings(
    training_reviews=60, test_reviews=50, batch_size=20, epochs=4, embedding=4, hidden=4
)
SHORT = ReaderSettings(training_reviews=2000, test_reviews=1000, label_noise=0, epochs=8)


def values_of(net):
    """Return the parameters' values, by the part of their name that all networks share."""
    parameters = net._collect_params_with_prefix().items()
    return {name.replace("._unfused.0", ""): one.data().asnumpy() for name, one in parameters}


def test_first_weights_are_the_same_in_each_format_and_in_cells():
    base = values_of(make_network(TINY))
    for dtype in FORMATS:
        for layer in ("lstm", "cells"):
            found = values_of(make_network(replace(TINY, dtype=dtype, layer=layer)))
            assert found.keys() == base.keys()
            for name, value in found.items():
                assert value.dtype == (np.float16 if dtype == "float16" else np.float32)
                assert (value == base[name].astype(value.dtype)).all()
    other = values_of(make_network(replace(TINY, seed=1)))
    assert any((other[name] != base[name]).any() for name in base)


def test_cells_compute_what_the_layer_computes():
    tokens = mx.nd.array(np.random.randint(len(VOCABULARY), size=(5, LENGTH)), dtype="int32")
    layer, cells = (make_network(replace(TINY, layer=one))(tokens) for one in ("lstm", "cells"))
    # Gates have slopes of at most 1 and weights here are below 1, so that errors grow no faster
    # than by addition: sums of 8 products, a few more operations, for each of the words.
    assert np.abs((layer - cells).asnumpy()).max() <= 20 * LENGTH * 2.0**-24


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(one, marks=() if one in ("float32", "float16") else pytest.mark.slow)
        for one in FORMATS
    ],
)
def test_the_lstm_learns_in_each_format(dtype):
    figures = train(replace(SHORT, dtype=dtype)).figures
    # Guessing has a standard deviation of 0.5 / sqrt(1000) = 0.016 around 0.5.
    assert figures["test_accuracy"] > 0.8
    assert figures["final_loss"] < 0.5 < np.log(2)
    assert figures["steps"] == 640


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("layer", ["lstm", "cells", "bag"])
def test_a_run_comes_out_the_same_twice_and_fits_into_json(dtype, layer):
    settings = replace(TINY, dtype=dtype, layer=layer)
    outcome, again = train(settings), train(settings)
    assert (outcome.figures, outcome.curves) == (again.figures, again.curves)
    assert json.loads(json.dumps(outcome.curves, allow_nan=False))["loss"]
    assert len(outcome.curves["loss"]) == 2  # 12 steps in windows of 10
    assert len(outcome.curves["test_accuracy"]) == 5  # before, and after each epoch


@pytest.mark.parametrize("dtype", ["float16", "mixed_float16"])
def test_a_scale_that_is_too_large_costs_steps_and_one_that_fits_does_not(dtype):
    # A loss scale of 2**24 makes infinities of any gradient from 2**-8 on.
    high = train(replace(TINY, dtype=dtype, init_scale=2.0**24, growth_interval=1000)).figures
    assert high["skipped_steps"] > 0
    assert high["final_scale"] == 2.0 ** (24 - high["skipped_steps"])
    low = train(replace(TINY, dtype=dtype, init_scale=8.0, growth_interval=1000)).figures
    assert (low["skipped_steps"], low["final_scale"]) == (0, 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_formats_with_wide_exponents_have_no_scale(dtype):
    outcome = train(replace(TINY, dtype=dtype))
    assert outcome.figures["skipped_steps"] == 0
    assert outcome.figures["final_scale"] == 1
    assert "loss_scale" not in outcome.curves


def test_gradients_are_clipped_to_the_norm_that_is_asked_for():
    assert train(replace(TINY, max_norm=1e6)).figures["clipped_steps"] == 0
    assert train(replace(TINY, max_norm=1e-6)).figures["clipped_steps"] == 12


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match=r"dtype must be one of float32, .*received 'int8'"):
        ReaderSettings(dtype="int8")
    with pytest.raises(ValueError, match="multiple of batch_size, received 3000 and 7"):
        ReaderSettings(batch_size=7)


# --- the section -----------------------------------------------------------------------------


def made_up(record_of, accuracy_of):
    """Return records of all experiments, with accuracies from a function of row and seed."""
    records = {}
    for experiment in GROUP.experiments:
        _, row, seed = experiment.name.split("/")
        accuracy = accuracy_of(row, int(seed[-1]))
        figures = {"test_accuracy": accuracy, "final_loss": 0.25, "steps": 100,
                   "skipped_steps": 3, "clipped_steps": 20, "final_scale": 512.0}  # fmt: skip
        curves = {"loss": [0.7, None] * 5, "test_accuracy": [0.5, accuracy]}
        if "float16" in row.split("_") + row.split("-"):
            curves["loss_scale"] = [1024.0] * 5 + [512.0] * 5
        records[experiment.name] = record_of(experiment, Outcome(figures, curves))
    return records


def alike(row, seed):
    """Return accuracies around 0.95 whose differences to FP32's cancel over the seeds 1 to 4."""
    shift = 0 if row == "float32" else (0, 1, -1, 2, -2)[seed] / 1000
    return 0.5 if row == "float32-bag" else 0.95 + seed / 200 + shift


def test_each_row_is_compared_with_fp32_of_the_same_seeds(record_of, page_of):
    text = page_of(made_up(record_of, alike), "Recurrent networks")
    # Differences of 0, 0.1, -0.1, 0.2 and -0.2 points: their standard deviation is
    # sqrt(0.1 / 4), and Student's t for four degrees of freedom 2.776.
    reach = 2.776 * np.sqrt(0.1 / 4 / 5)
    interval = f"+0.00 (-{reach:.2f} to +{reach:.2f})"
    assert text.count(f"| {interval} ") == 6
    assert f"in another order, differs by {interval.replace(' (', ' points (')}" in text
    assert "No row in 16 bits differs from FP32 by more than chance" in text
    assert "reaches 50.0 points after the same training" in text
    assert "the worst LSTM in FP32 95.0." in text
    assert "Not run yet" not in text


def test_the_conclusion_is_withdrawn_if_a_row_differs(record_of, page_of):
    def worse(row, seed):
        return alike(row, seed) - (0.1 if row == "float16" else 0)

    text = page_of(made_up(record_of, worse), "Recurrent networks")
    assert "| -10.00 (-10.20 to -9.80) " in text
    assert "more than chance" not in text
    assert "no longer support the conclusion" in text


def test_each_row_of_the_table_has_the_command_that_makes_it(record_of, page_of):
    text = page_of(made_up(record_of, alike), "Recurrent networks")
    for experiment in GROUP.experiments:
        row = experiment.name.rsplit("/", 1)[0]
        assert f"`python scripts/evidence.py run {row}`" in text


def test_runs_that_are_missing_are_named_and_the_rest_is_shown(record_of, page_of):
    records = made_up(record_of, alike)
    lost = ["recurrent/float32/seed-0", "recurrent/float16/seed-1", "recurrent/float32-bag"]
    for name in lost:
        records.pop(name if "bag" not in name else f"{name}/seed-0")
    text = page_of(records, "Recurrent networks")
    assert f"Not run yet: {', '.join(lost)}." in text
    assert text.count("`python scripts/evidence.py run recurrent/") == 7
    assert "more than chance" not in text


def test_a_loss_that_is_not_finite_is_told(record_of, page_of):
    records = made_up(record_of, alike)
    for seed in (1, 3):
        records[f"recurrent/float16/seed-{seed}"].outcome.figures["final_loss"] = None
    assert "not finite in 2 of 5" in page_of(records)


def test_the_picture_has_a_column_for_each_seed_and_a_line_for_each_format(record_of):
    figure = Figure(layout="constrained")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GROUP.pictures["recurrent"](figure, made_up(record_of, alike))
        figure.draw_without_rendering()
    grid = np.reshape(figure.axes, (3, 5))
    assert [axes.get_title() for axes in grid[0]] == [f"seed {seed}" for seed in range(5)]
    assert all(len(axes.lines) == 4 for axes in grid[0])
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["float32", "float16", "mixed_float16", "bfloat16"]
