"""Steps that overflow in a run are recorded, which changes nothing, and replayed from the file."""

import logging

from mpgluon_tools import commands

import pytest
from helpers import assert_same_bits
from training_helpers import run

ALL_OVERFLOW = {"dtype": "float16", "loss_scale": str(2**24), "epochs": 1, "warmup_epochs": 0}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("accumulate", "smoothing"), [(1, 0.0), (2, 0.1)])
def test_overflows_of_a_run_are_replayed(accumulate, smoothing, shapes, tmp_path, capsys, caplog):
    caplog.set_level(logging.INFO, "recipes")
    options = {**ALL_OVERFLOW, "accumulate": accumulate, "batch_size": 10 // accumulate,
               "label_smoothing": smoothing}  # fmt: skip
    plain = run(shapes, tmp_path / "plain", **options)
    recorded = run(shapes, tmp_path / "recorded", **options, record_overflows=2)
    assert not (plain.folder / "overflows").exists()
    assert_same_bits(plain.parameters, recorded.parameters)
    assert recorded.results["skipped_steps"] == 4
    assert "; 4 steps skipped: 4 in backward " in caplog.text
    files = sorted((recorded.folder / "overflows").iterdir())
    assert [file.name for file in files] == ["overflow-00000003.npz", "overflow-00000004.npz"]
    assert commands.main(["replay", str(recorded.folder), "--no-cures"]) == 0  # the newest one
    printed = capsys.readouterr().out
    assert printed.startswith("step 4, skipped at a loss scale of 1.67772e+07\n")
    assert "replayed: the same bits in all" in printed
    assert "\nbackward: the first array that is not finite is the gradient of what the" in printed
    assert "\nlayer: net.output\n" in printed  # of its logits, which the loss computes
    assert "flags that the recorded step raised:\n  cifarresnet" in printed
