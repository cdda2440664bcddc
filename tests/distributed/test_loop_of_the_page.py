"""The loop of docs/distributed.md: right with batches of any sizes, and refused where it is not.

It has a time limit of 300 s, and a job of these tests one of 120 s: no rank may wait for another.
"""

from __future__ import annotations

import numpy as np
import pytest
from distributed_helpers import HERE, Job, mpirun, succeeded
from helpers import assert_same_bits
from ranks_loop import EVEN, TOTAL, random_batches
from references import train_on_parts

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

SEEDS = range(2)  # of 8 batches and of 9


def run(tmp_path, ranks: int, seed: int, without: str = "") -> Job:
    return mpirun(ranks, HERE / "ranks_loop.py", seed, without, tmp_path)


def steps_of(seed: int, ranks: int) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Return the batches of each step, by rank; the last ones are of too few ranks."""
    batches = random_batches(seed)
    return [batches[begin : begin + ranks] for begin in range(0, len(batches), ranks)]


def assert_right(tmp_path, ranks: int, seed: int) -> None:
    """Compare all ranks with one process that adds the gradients of their batches."""
    whole = [step for step in steps_of(seed, ranks) if len(step) == ranks]
    expected = train_on_parts("float16", whole)
    for rank in range(ranks):
        with np.load(tmp_path / f"{rank}.npz") as results:
            assert_same_bits(dict(results), expected)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_batches_of_any_sizes_and_numbers_train_as_one_batch_of_all(tmp_path, ranks, seed):
    succeeded(run(tmp_path, ranks, seed))
    assert_right(tmp_path, ranks, seed)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("without", [EVEN, TOTAL])
def test_a_loop_without_what_makes_it_right_is_right_or_refused_on_all_ranks(
    tmp_path, ranks, seed, without
):
    steps = steps_of(seed, ranks)
    if without == EVEN:
        words, right = "the end of the block of MpiProcesses", len(steps[-1]) == ranks
    else:
        sizes = [{len(labels) for _, labels in step} for step in steps if len(step) == ranks]
        words, right = "rescale_grad is ", all(len(of_step) == 1 for of_step in sizes)
    job = run(tmp_path, ranks, seed, without)
    if right:
        succeeded(job)
        assert_right(tmp_path, ranks, seed)
    else:
        assert job.status != 0
        assert job.left_behind == []
        assert words in job.output
        assert not list(tmp_path.iterdir())
