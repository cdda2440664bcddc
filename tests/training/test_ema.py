"""A run with ``--ema``: the average is tested, kept and opened; training is the same."""

from mpgluon.checkpoint import read_parameters

import mxnet as mx
import pytest
from helpers import assert_same_bits
from training_helpers import Run, run

from recipes.training.runs import open_run

EMA = {"dtype": "float16", "ema": 0.75}


@pytest.fixture(scope="module")
def averaged(shapes, tmp_path_factory) -> Run:
    return run(shapes, tmp_path_factory.mktemp("ema"), **EMA)


def test_training_is_that_of_a_run_without_an_average(averaged, float16_run):
    for kind in ("loss", "loss_scale", "skipped", "learning_rate", "gradient_norm"):
        mine, others = ([e[kind] for e in r.events("step")] for r in (averaged, float16_run))
        assert mine == others
    mine, others = averaged.arrays, float16_run.arrays
    averages = {name for name in mine if name.endswith("/average")}
    assert_same_bits({n: a for n, a in mine.items() if n not in averages}, others)
    assert len(averages) == len([name for name in others if name.startswith("parameter/")])


def test_the_average_is_tested_and_both_figures_are_in_history_and_results(averaged, float16_run):
    for epoch, other in zip(averaged.events("epoch"), float16_run.events("epoch")):
        assert (epoch["tested"], other["tested"]) == ("average", "weights")
        assert epoch["test_accuracy_of_weights"] == other["test_accuracy"]
        assert "test_accuracy_of_weights" not in other
    last = averaged.events("epoch")[-1]
    for name in ("tested", "test_accuracy", "test_accuracy_per_class", "test_accuracy_of_weights"):
        assert averaged.results[name] == last[name]
    assert float16_run.results["tested"] == "weights"


def test_final_parameters_and_opened_runs_are_the_average(averaged):
    newest = averaged.folder / "checkpoints" / averaged.checkpoints[-1]
    arrays = averaged.arrays
    expected = read_parameters(newest)
    names = [name.removeprefix("parameter/") for name in arrays if name.startswith("parameter/")]
    assert_same_bits(expected, {name: arrays[f"trainer/{name}/average"] for name in names})
    final = averaged.parameters
    assert_same_bits(final, {n: value.astype(final[n].dtype) for n, value in expected.items()})
    assert (final["output.weight"] != arrays["parameter/output.weight"]).any()
    opened = open_run(averaged.folder, mx.cpu()).net
    parameters = opened._collect_params_with_prefix()
    assert_same_bits({n: p.data().asnumpy() for n, p in parameters.items()}, expected)
