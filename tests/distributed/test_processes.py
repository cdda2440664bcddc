"""A job of one process, the devices of processes, and errors where MPI is missing."""

from __future__ import annotations

import sys

from mpgluon import PrecisionError
from mpgluon.distributed import DistributedError, MpiProcesses, OneProcess, devices_of_process

import mxnet as mx
import numpy as np
import pytest


class OneOfFour(OneProcess):
    rank, world_size, local_rank, local_size = 3, 4, 1, 2


def test_one_process_gathers_its_own_value():
    with OneProcess() as alone:
        assert (alone.rank, alone.world_size, alone.local_rank, alone.local_size) == (0, 1, 0, 1)
        assert alone.is_first
        assert alone.gather("value", "test") == ["value"]
        assert alone.broadcast([1], "test") == [1]
        assert alone.sum([1, 2.5], "test") == [1.0, 2.5]
        assert alone.total(7) == 7
        values = np.arange(3.0)
        alone.sum_in_place(values, "test")
        assert values.tolist() == [0, 1, 2]
        with alone.one_per_machine_first("test"):
            pass


def test_one_process_raises_its_exceptions_unchanged():
    with pytest.raises(RuntimeError, match="own"), OneProcess():
        raise RuntimeError("own")


def test_sums_are_in_float64():
    class Two(OneProcess):
        def gather(self, value, purpose):
            return [value, value]

    assert Two().sum([2**53 - 1, 1e-300], "test") == [2.0**54 - 2, 2e-300]


def test_processes_outside_a_with_statement_raise():
    with pytest.raises(DistributedError, match="use the processes in a with statement"):
        MpiProcesses().gather(None, "test")


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_timeout_that_is_not_positive_is_refused(timeout):
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
        MpiProcesses(timeout)


def test_without_mpi4py_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ValueError, match=r"pip install 'mpgluon\[mpi\]'"):
        MpiProcesses().__enter__()


def test_every_process_may_have_the_cpu():
    assert devices_of_process("cpu", OneOfFour()) == [mx.cpu()]
    assert devices_of_process("cpu:0,1", OneOfFour()) == [mx.cpu(0), mx.cpu(1)]


def test_each_process_of_a_machine_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 2)
    assert devices_of_process("gpu", OneOfFour()) == [mx.gpu(1)]
    assert devices_of_process("gpu", OneProcess()) == [mx.gpu(0)]
    assert devices_of_process("gpu:0,1", OneProcess()) == [mx.gpu(0), mx.gpu(1)]
    with pytest.raises(ValueError, match="'gpu:0,1' would give the same GPUs to 2 processes"):
        devices_of_process("gpu:0,1", OneOfFour())
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 1)
    with pytest.raises(PrecisionError, match=r"names gpu\(1\)"):
        devices_of_process("gpu", OneOfFour())
