"""Numbers and overflows of a run, recorded: with the bits of the run without, and replayed."""

import logging

from mpgluon.diagnostics import compare_numerics, read_numerics
from mpgluon.distributed import OneProcess
from mpgluon_tools import commands

import pytest
from helpers import assert_same_bits
from training_helpers import STEPS, run, run_interrupted

from recipes import console

OPTIONS = {"dtype": "float16", "record_numerics": 2}
ALL_OVERFLOW = {"dtype": "float16", "loss_scale": str(2**24), "epochs": 1, "warmup_epochs": 0}


def test_recording_changes_no_bit_and_is_that_of_each_step(shapes, tmp_path, float16_run):
    recorded = run(shapes, tmp_path, **OPTIONS)
    assert_same_bits(float16_run.parameters, recorded.parameters)
    recording = read_numerics(tmp_path / "numerics")
    events = recorded.events("step")
    assert [line["step"] for line in recording.lines] == list(range(1, STEPS + 1))
    for line, event in zip(recording.lines, events):
        assert line["loss"] == pytest.approx(event["loss"], rel=1e-6)
        assert (line["skipped"], line["loss_scale"]) == (event["skipped"], event["loss_scale"])
    shapes_of = [tensor.shape[1:] for tensor in recording.step(2).of("input")]
    assert len(shapes_of) == 1
    assert shapes_of[0][0] == 3


@pytest.mark.slow
def test_a_run_that_loses_its_updates_is_warned_of_while_it_runs(shapes, tmp_path, caplog):
    options = {"dtype": "params=bfloat16,compute=bfloat16", "learning_rate": 1e-5, "epochs": 1}
    for rounding in ("kahan", "nearest"):
        run(shapes, tmp_path / rounding, **options, update_rounding=rounding, record_numerics=1)
        found = [one for one in caplog.messages if "of its bfloat16 weights" in one]
        assert len(found) == (rounding == "nearest")
    assert found[0].startswith("step 1: ")


@pytest.mark.slow
def test_a_continued_run_has_the_recording_of_one_that_was_not_ended(shapes, tmp_path):
    run(shapes, tmp_path / "whole", **OPTIONS)
    run_interrupted(shapes, tmp_path / "parts", after_step=3, **OPTIONS)
    found = compare_numerics(tmp_path / "whole" / "numerics", tmp_path / "parts" / "numerics")
    assert found.step is None
    assert found.compared == 1 + STEPS // 2


@pytest.mark.usefixtures("native_operators")
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


@pytest.mark.parametrize("skipped", [STEPS - 1, STEPS])
def test_a_run_that_skipped_every_step_is_warned_of(float16_run, monkeypatch, capsys, skipped):
    results = {**float16_run.results, "skipped_steps": skipped}
    monkeypatch.setattr(console, "train", lambda *_, **__: results)
    assert console.run(float16_run.config, OneProcess(), resume=False) == 0
    warned = "warning: every step was skipped, so that the network is as it began; try more --ep"
    assert (warned in capsys.readouterr().err) == (skipped == STEPS)
