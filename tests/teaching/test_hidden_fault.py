"""The fault that lesson 06 hides in exercise 06.4 is in one layer's masters, and nowhere else."""

import pytest

from teaching import check, lesson_06
from teaching.lesson_06 import record_with_a_fault

STEP = 13


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    good = lesson_06._record(lesson_06._Energy, folder / "good")
    return good, record_with_a_fault(lesson_06._Energy, folder / "faulty")


def differing(recordings, step):
    first, second = (recording.step(step).tensors for recording in recordings)
    assert list(first) == list(second)
    return [str(name) for name in first if first[name].checksum != second[name].checksum]


def test_before_the_fault_both_runs_have_the_same_bits(recordings):
    assert all(not differing(recordings, step) for step in range(1, STEP))


def test_in_the_step_of_the_fault_the_masters_of_hidden_and_their_updates_differ(recordings):
    assert differing(recordings, STEP) == [
        *("master of 2.weight", "master of 2.bias"),
        *("update of 2.weight", "update of 2.bias"),
    ]


def test_the_losses_differ_after_the_step_of_the_fault_only(recordings):
    losses = [[line["loss"] for line in recording.lines] for recording in recordings]
    assert losses[0][:STEP] == losses[1][:STEP]
    assert losses[0][STEP] != losses[1][STEP]


def test_the_layer_of_the_fault_is_the_right_answer(capsys):
    assert check("06.4", "hidden")
    assert "became FP16 numbers" in capsys.readouterr().out
