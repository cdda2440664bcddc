"""Horovod's Trainer with a loss scale: ``amp.init_trainer(hvd.DistributedTrainer(...))``.

Horovod takes minutes to build and is in no environment by default; `make test WITH=horovod` makes
one.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from distributed_helpers import HERE, run_job, succeeded
from helpers import assert_same_bits
from references import numbers_of, part_of, train_part_after_part
from small_training import BAD_STEP, FIRST_SCALE, STEPS, train

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(
        importlib.util.find_spec("horovod") is None,
        reason="horovod is not installed (make test WITH=horovod)",
    ),
]

PROCESSES = 2
DTYPES = ["float32", "float16", "bfloat16"]


@pytest.fixture(scope="module")
def workers(tmp_path_factory) -> list[dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("horovod")
    command = [str(Path(sys.executable).with_name("horovodrun")), "-np", str(PROCESSES), "--gloo"]
    command += [sys.executable, "-W", "ignore", str(HERE / "worker_horovod.py"), str(folder)]
    succeeded(run_job(command, {"OMP_NUM_THREADS": "1"}))
    workers = []
    for rank in range(PROCESSES):
        with np.load(folder / f"worker-{rank}.npz") as file:
            workers.append({name: file[name] for name in file.files})
    return workers


def test_all_processes_end_with_the_same_results(workers):
    for other in workers[1:]:
        assert_same_bits(workers[0], other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_bit_for_bit_those_of_one_process_that_adds_the_parts(workers, dtype):
    # Horovod adds float16 in float16: of two numbers, that is the same one rounding.
    values = numbers_of(part_of(workers[0], f"{dtype}-plain"))
    assert_same_bits(values, train_part_after_part(dtype, PROCESSES))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_overflow_on_one_process_skips_the_step_on_all_and_lowers_the_scale_once(workers, dtype):
    poisoned = part_of(workers[0], f"{dtype}-poisoned")
    assert poisoned["skipped"].tolist() == [step == BAD_STEP for step in range(STEPS)]
    expected = [FIRST_SCALE if step <= BAD_STEP else FIRST_SCALE / 2 for step in range(STEPS)]
    assert poisoned["scales"].tolist() == expected


def test_float32_weights_are_those_of_one_process_with_the_whole_batch(workers):
    one = numbers_of(train("float32"))
    for name, value in part_of(workers[0], "float32-plain").items():
        if name in one:  # the tolerance is as in `test_equality`
            np.testing.assert_allclose(value, one[name], rtol=0, atol=1e-6, err_msg=name)
