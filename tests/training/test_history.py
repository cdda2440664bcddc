"""The history file: strict JSON whatever the numbers, and the same events when it is read again."""

import json
import math

from mpgluon import DataError

import numpy as np
import pytest
from training_helpers import STEPS, run

from recipes.training.history import History, to_json

NUMBERS = {"a": math.inf, "b": -math.inf, "c": math.nan, "d": None, "e": 1.5, "f": True, "g": "x"}


def strict(text: str):
    def refuse(name: str):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_history_without_a_file_is_in_memory_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    history, heard = History(None), []
    history.listeners.append(heard.append)
    history.add("step", step=1)
    assert history.events == heard == [{"event": "step", "step": 1}]
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_json_lacks_are_strings_that_float_reads():
    read = strict(to_json(NUMBERS))
    assert read == {**NUMBERS, "a": "Infinity", "b": "-Infinity", "c": "NaN"}
    for name in "abc":
        np.testing.assert_equal(float(read[name]), NUMBERS[name])


def test_a_history_that_is_continued_holds_numbers_again_and_writes_the_same_file(tmp_path):
    path = tmp_path / "history.jsonl"
    first = History(path)
    for step in (1, 2, 3):
        first.add("step", step=step, **NUMBERS)
    lines = path.read_text().splitlines()
    second = History(path, steps_done=2)
    assert path.read_text().splitlines() == lines[:2]
    assert len(second.events) == 2
    np.testing.assert_equal(second.events[0], first.events[0])
    second.add("step", step=3, **NUMBERS)
    assert path.read_text().splitlines() == lines


def test_a_run_that_diverges_leaves_strict_json_and_curves(shapes, tmp_path):
    done = run(shapes, tmp_path, learning_rate=1e30)
    events = [strict(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert "NaN" in [event["loss"] for event in events if event["event"] == "step"]
    assert math.isnan(done.results["train_loss"])
    assert strict((tmp_path / "results.json").read_text())["train_loss"] == "NaN"
    assert (tmp_path / "curves.png").exists()


def test_gradient_norms_are_those_of_the_steps_and_not_finite_where_they_were_skipped(float16_run):
    steps = float16_run.events("step")
    assert len(steps) == STEPS
    for event in steps:
        norm = float(event["gradient_norm"])
        assert math.isfinite(norm) is not event["skipped"]
        assert event["skipped"] or norm > 0


@pytest.mark.usefixtures("native_operators")
def test_steps_that_were_skipped_name_the_layer_where_their_overflow_began(float16_run):
    steps = float16_run.events("step")
    assert any(event["skipped"] for event in steps)
    for event in steps:
        assert (event["overflow_began_in"] is not None) is event["skipped"]
        if event["skipped"]:  # by the first loss scales, of which gradients are too large
            direction, _, layer = event["overflow_began_in"].partition(" ")
            assert direction == "backward"
            assert any(line.startswith(f"{layer} (") for line in event["flags"])


@pytest.mark.parametrize("steps", [(), (1, 2), (2, 3)])
def test_a_run_does_not_continue_with_a_part_of_its_history(tmp_path, steps):
    path = tmp_path / "history.jsonl"
    history = History(path)
    for step in steps:
        history.add("step", step=step)
    history.sync()
    before = path.read_bytes()
    if not steps:
        path.unlink()
    with pytest.raises(DataError, match=rf"history.jsonl lacks {3 - len(steps)} of the 3 steps"):
        History(path, 3)
    assert not steps or path.read_bytes() == before
