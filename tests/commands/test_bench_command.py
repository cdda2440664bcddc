"""``mpgluon bench``: a table of a training step in three formats, and its conditions."""

from __future__ import annotations

import os
import re
import sys

from mpgluon_tools.timing import interleave

import pytest

FORMATS = ["float32", "float16, cast", "bfloat16, autocast"]


def rows_of(output: str) -> dict[str, list[str]]:
    _, _, heading, *lines = output.splitlines()
    assert heading.split()[-2:] == ["peak", "MiB"]
    return {name: line[len(name) :].split() for name in FORMATS for line in lines if name in line}


@pytest.mark.parametrize(
    ("network", "shapes", "batch"),
    [
        ("mine:small", ["--image-size=8", "--batch-size=2"], 2),
        ("mine:two", ["--input-shape=4,6", "--input-shape=4,7"], 4),
        ("mine:with_batch", [], 6),
    ],
)
def test_each_format_has_a_row_of_numbers_that_agree(printed, network, shapes, batch):
    output = printed("bench", network, *shapes, "--rounds=3", "--no-memory")
    assert f"a training step with a batch of {batch}, 3 rounds in turn" in output
    rows = rows_of(output)
    assert list(rows) == FORMATS
    for median, lower, _, upper, speedup, samples, peak in rows.values():
        assert 0 < float(lower) <= float(median) <= float(upper)
        assert float(speedup) > 0
        # A tenth of a millisecond is printed.
        assert batch / float(samples) == pytest.approx(float(median) / 1e3, abs=0.6e-4)
        assert peak == "-"
    assert rows["float32"][4] == "1.00"
    assert max(map(len, output.splitlines()[:-1])) <= 80


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(sys.platform != "linux", reason="memory is measured on Linux only")
def test_memory_is_that_of_a_process_for_each_format(started):
    done = started("bench", "mine:small", "--image-size=8", "--rounds=1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 round in turn" in done.stdout
    assert all(50 < int(row[-1]) < 2000 for row in rows_of(done.stdout).values())


@pytest.mark.parametrize(
    ("load", "said"),
    [(0.0, "compare them only if nothing else ran"), (99.0, "was busy: a load of")],
)
def test_the_load_of_the_machine_is_said(printed, monkeypatch, load, said):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    output = printed("bench", "mine:dense", "--input-shape=2,5", "--rounds=1", "--no-memory")
    assert said in output
    assert re.search(r"\d+ cores? of .*bfloat16 is computed (natively|emulated) here", output)


def test_no_round_begins_after_the_limit_and_one_is_done():
    calls = []
    cases = {name: (lambda name=name: calls.append(name)) for name in "ab"}
    found = interleave(cases, rounds=9, warm_up=1, limit_s=0.0)
    assert {name: len(times) for name, times in found.items()} == {"a": 1, "b": 1}
    assert calls == ["a", "b", "a", "b"]
