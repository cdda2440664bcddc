"""Records: written and read back, refused when damaged, compared exactly."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from mpgluon.errors import DataError

import numpy as np
import pytest

from experiments.experiment import Experiment, Outcome
from experiments.records import (
    Repetition,
    add_repetition,
    current_records,
    first_difference,
    read_records,
    read_repetitions,
    write_record,
)

OUTCOME = Outcome(
    {"accuracy": 0.1 + 0.2, "lost": None, "right": True, "name": "x"},
    {"loss": [1, None, 2.5], "scale": [[1, 2.0**16], [3, 2.0**15]]},
    {"seconds": 1.5},
)
EXPERIMENT = Experiment("group/one/seed-0", {"rate": 1e-3, "sizes": (1, 2)}, lambda _: OUTCOME)


def test_what_is_read_is_what_was_written(record_of, tmp_path):
    record = record_of(EXPERIMENT, OUTCOME, config={"rate": 1e-3})
    assert write_record(record, tmp_path) == tmp_path / "group" / "one" / "seed-0.json"
    assert read_records(tmp_path) == {EXPERIMENT.name: record}
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["seed-0.json"]


def test_a_curve_is_one_line_of_the_file(record_of, tmp_path):
    lines = write_record(record_of(EXPERIMENT, OUTCOME), tmp_path).read_text().splitlines()
    assert '  "loss": [1, null, 2.5],' in lines
    assert '  "accuracy": 0.30000000000000004,' in lines


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float32(1), {1, 2}])
def test_what_json_does_not_have_is_refused_and_nothing_is_written(value, record_of, tmp_path):
    for outcome in (Outcome({"a": value}), Outcome({}, {"a": [value]})):
        with pytest.raises(ValueError, match="the outcome of group/one/seed-0 does not fit"):
            write_record(record_of(EXPERIMENT, outcome), tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_folder_has_no_records(tmp_path):
    assert read_records(tmp_path / "nowhere") == {}
    assert read_repetitions(tmp_path / "nowhere") == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "group/one"}'])
def test_a_damaged_record_is_named_with_what_to_do(text, tmp_path):
    path = tmp_path / f"{EXPERIMENT.name}.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(DataError, match=r"seed-0\.json is not a record.*run the experiment again"):
        read_records(tmp_path)


def test_a_record_that_cannot_be_written_says_so(record_of, tmp_path):
    (tmp_path / "group").touch()
    with pytest.raises(DataError, match="cannot write"):
        write_record(record_of(EXPERIMENT, OUTCOME), tmp_path)


def test_a_record_is_current_if_its_config_is_the_experiments_as_json_has_it(record_of, tmp_path):
    write_record(record_of(EXPERIMENT, OUTCOME), tmp_path)
    missing = replace(EXPERIMENT, name="group/two")
    other = replace(EXPERIMENT, config={"rate": 1e-3, "sizes": (1, 3)})
    assert list(current_records(tmp_path, [missing, EXPERIMENT])) == [EXPERIMENT.name]
    assert current_records(tmp_path, [other]) == {}


def test_outcomes_are_compared_to_the_last_bit_and_times_are_not():
    assert first_difference(OUTCOME, replace(OUTCOME, times={"seconds": 9.0})) is None
    read = json.loads(json.dumps({"figures": OUTCOME.figures, "curves": OUTCOME.curves}))
    assert first_difference(OUTCOME, Outcome(**read)) is None


@pytest.mark.parametrize(
    ("figures", "curves", "words"),
    [
        ({"accuracy": 0.3}, {}, "accuracy was 0.30000000000000004, is 0.3"),
        ({"lost": 0}, {}, "lost was None, is 0"),
        ({"more": 1}, {}, "more is in one of the two only"),
        ({}, {"loss": [1, None, 2.5000000000000004]}, "loss[2] was 2.5, is 2.5000000000000004"),
        ({}, {"loss": [1, 0, 2.5]}, "loss[1] was None, is 0"),
        ({}, {"loss": [1, None]}, "loss was 3 values, is 2 values"),
        ({}, {"scale": [[1, 2.0**16], [4, 2.0**15]]}, "scale[1] was [3, 32768.0], is [4, 32768.0]"),
    ],
)
def test_the_first_difference_is_named(figures, curves, words):
    other = Outcome({**OUTCOME.figures, **figures}, {**OUTCOME.curves, **curves})
    assert first_difference(OUTCOME, other) == words


def test_repetitions_are_added_to_a_list_that_is_no_record(tmp_path):
    made = [Repetition("a/b", "2026", 7, None), Repetition("a/c", "2027", None, "x was 1, is 2")]
    for one in made:
        add_repetition(one, tmp_path)
    assert read_repetitions(tmp_path) == made
    assert read_records(tmp_path) == {}
    (tmp_path / "repeated.json").write_text("[1]")
    with pytest.raises(DataError, match=r"repeated\.json is not a list of repetitions"):
        read_repetitions(tmp_path)
