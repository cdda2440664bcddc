"""``mpgluon replay``: a step that a user's loop recorded, and files that are none."""

from __future__ import annotations

from mpgluon.diagnostics import FlightRecorder

import mxnet as mx
import pytest
from helpers import backward_from, cast_net, with_loss_scale
from mxnet import gluon


@pytest.fixture
def recorded(folder, monkeypatch):
    """Record a step that overflows, and return its file."""
    monkeypatch.syspath_prepend(folder)
    import mine

    net = cast_net(mine.dense())
    options = {"learning_rate": 0.1, "multi_precision": True}
    trainer = with_loss_scale(gluon.Trainer(net.collect_params(), "sgd", options), 2.0**24)
    recorder = FlightRecorder(net, trainer, "overflows", network="mine:dense", loss="L2Loss()")
    x, labels = mx.nd.ones((4, 5)), 1000 * mx.nd.ones((4, 3))
    with recorder.step(x, labels):
        backward_from(lambda: gluon.loss.L2Loss()(net(x), labels), trainer)
        trainer.step(4)
    (path,) = (folder / "overflows").iterdir()
    return path


def test_a_step_is_run_again_and_cures_fit_80_columns_with_python_to_copy(printed, recorded):
    output = printed("replay", recorded)
    assert "replayed: the same bits in all 2 gradients" in output
    assert "the largest loss scale that fits" in output
    lines = output[output.index("\ncure ") :].splitlines()
    assert any(line.startswith("    amp.init_trainer(trainer, mpgluon.Dyn") for line in lines)
    assert all(len(line) <= 80 for line in lines if not line.startswith("    "))
    assert "cure" not in printed("replay", recorded, "--no-cures")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--network=mine:number"], "mine:number returned int, not a gluon.Block"),
        (["--network=mine:broken"], "was called and failed: ZeroDivisionError: division by zero"),
        (["--loss=NoSuchLoss"], "mxnet.gluon.loss has no 'NoSuchLoss'"),
        (["--network=mine:small"], "does not fit"),
    ],
)
def test_what_cannot_be_replayed_is_said_in_a_line(refused, recorded, arguments, message):
    assert message in refused("replay", recorded, *arguments)


def test_a_file_that_is_none_of_a_recorder_is_refused(refused, folder):
    assert "mine.py" in refused("replay", folder / "mine.py")
    assert f"{folder} is a folder, not a recorded step" in refused("replay", folder)
    (folder / "checkpoints").mkdir()
    assert f"the run {folder} has no recorded step: no step was" in refused("replay", folder)
