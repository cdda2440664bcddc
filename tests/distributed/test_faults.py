"""One process fails, in any way: the job ends soon, says which one it was, and leaves nothing."""

from __future__ import annotations

import re

import pytest
from distributed_helpers import HERE, Job, mpirun
from faults import seconds_after

pytestmark = pytest.mark.multiprocess

AT_ONCE_S = 10  # the promised limit; it takes a second or two
TIMEOUT_S = 3.0
NEVER_S = 1000.0  # a time limit that a test does not reach


def fail(tmp_path, kind: str, *, culprit: int = 1, timeout: float = NEVER_S, ranks: int = 2) -> Job:
    job = mpirun(ranks, HERE / "ranks_fail.py", kind, culprit, timeout, tmp_path / "moment")
    assert job.status != 0
    assert job.left_behind == []
    assert "is done" not in job.output
    return job


def in_one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.mark.slow
def test_without_a_fault_every_rank_comes_to_the_end(tmp_path):
    job = mpirun(2, HERE / "ranks_fail.py", "nothing", -1, NEVER_S, tmp_path / "moment")
    assert job.status == 0, job.output
    assert sorted(job.output.splitlines()) == ["rank 0 is done", "rank 1 is done"]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param(
            "kill",
            "process rank 1 with PID [0-9]+ on node .* exited on signal 9",
            marks=pytest.mark.slow,
        ),
        ("raise", "rank 1 of 2 failed and ends the job .*RuntimeError: the roof is on fire"),
        pytest.param("exit", "MPI_ABORT was invoked on rank 1", marks=pytest.mark.slow),
        pytest.param("exit with words", "rank 1: there are no images", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_ends_takes_the_others_with_it_at_once(tmp_path, kind, words):
    job = fail(tmp_path, kind)
    assert seconds_after(tmp_path / "moment", job.ended) < AT_ONCE_S
    assert re.search(words, in_one_line(job.output)), job.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "culprit", "words"),
    [
        ("hang", 2, 0, "Rank 0 did not arrive within 3 s at: sum of 2 gradients, 10 numbers"),
        (
            "stop",
            3,
            1,
            "Rank 1 did not arrive within 3 s at: sum of 2 gradients, 10 numbers in all",
        ),
        (
            "standstill",
            3,
            2,
            "Rank 2 did not arrive within 2 s at: a roll call, after 3 s of stands",
        ),
    ],
)
def test_a_rank_that_hangs_ends_the_job_after_the_set_time_and_is_named(
    tmp_path, kind, ranks, culprit, words
):
    job = fail(tmp_path, kind, culprit=culprit, timeout=TIMEOUT_S, ranks=ranks)
    assert TIMEOUT_S <= seconds_after(tmp_path / "moment", job.ended) < TIMEOUT_S + AT_ONCE_S
    assert words in in_one_line(job.output)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "culprit"), [(2, 1), (3, 0)])
def test_a_rank_that_leaves_normally_ends_the_others_at_once_and_is_named(tmp_path, ranks, culprit):
    job = fail(tmp_path, "leave", ranks=ranks, culprit=culprit)
    assert seconds_after(tmp_path / "moment", job.ended) < AT_ONCE_S
    assert re.search(f"[Rr]ank {culprit}: the end of the block", in_one_line(job.output)), (
        job.output
    )


@pytest.mark.slow
def test_a_layer_frozen_on_one_rank_ends_the_job_instead_of_a_sum_of_other_gradients(tmp_path):
    job = fail(tmp_path, "freeze")
    words = "Rank 0: sum of 2 gradients, 10 numbers .*; rank 1: sum of 1 gradients, 8 numbers"
    assert re.search("are not at the same place. " + words, in_one_line(job.output)), job.output
