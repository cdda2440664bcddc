"""A run's folder, opened again."""

import shutil

from mpgluon import CheckpointError
from mpgluon.checkpoint import read_parameters

import mxnet as mx
import numpy as np
import pytest

from recipes.training.runs import open_run


@pytest.fixture
def copied(float16_run, tmp_path):
    """Return a copy of a float16 run's folder that a test may damage."""
    return shutil.copytree(float16_run.folder, tmp_path / "run")


def test_the_newest_checkpoint_is_opened_with_its_fp32_masters(float16_run):
    run = open_run(float16_run.folder, mx.cpu())
    newest = float16_run.folder / "checkpoints" / float16_run.checkpoints[-1]
    assert run.checkpoint == newest
    assert run.step == float16_run.results["steps"]
    assert run.config == float16_run.config
    assert list(run.classes) == float16_run.results["dataset"]["classes"]
    expected = read_parameters(newest)
    masters = 0
    for name, parameter in run.net._collect_params_with_prefix().items():
        values = parameter.data().asnumpy()
        assert values.dtype == np.float32
        assert (values == expected[name]).all()
        masters += int((values != values.astype(np.float16)).any())
    assert masters > 20


@pytest.mark.parametrize("line", [None, "", "{}", "no json"])
def test_a_run_without_the_names_of_its_categories_is_refused(copied, line):
    history = copied / "history.jsonl"
    history.unlink()
    if line is not None:
        history.write_text(line + "\n")
    with pytest.raises(CheckpointError, match="does not name the categories"):
        open_run(copied, mx.cpu())
