"""Threads that MXNet has started in the calling thread do not slow down those that compute."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

from mpgluon.base import threads

import pytest
from helpers import run_python

CODE = """
import os
import sys
import time
import mxnet as mx
import numpy as np
import mpgluon
from mxnet.gluon import nn

net = nn.HybridSequential()
net.add(nn.Conv2D(8, 3, in_channels=3), nn.Dense(3))
net.initialize()
few = mx.nd.ones((2, 3, 16, 16))
net(few).wait_to_read()
mpgluon.prepare(net, sys.argv[1], "sgd")
net.hybridize()
net(few).wait_to_read()

def threads():
    return len(os.listdir("/proc/self/task"))

def settled(number):
    for _ in range(100):
        if threads() == number:
            break
        time.sleep(0.05)
    return threads()

before = threads()
for _ in range(3):
    mx.nd.array(np.ones((1000, 1000), "float32")).wait_to_read()
    copied = threads()
    net(few).wait_to_read()
    print(copied - before, settled(before) - before)
"""


@pytest.mark.sampled(3)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux lists a process's threads")
@pytest.mark.parametrize("dtype", ["float32", "float16", "mixed_bfloat16"])
def test_threads_that_copied_images_end_when_a_network_is_called(dtype):
    done = run_python(CODE, dtype, env={**os.environ, "OMP_NUM_THREADS": "2"})
    assert done.stdout.splitlines() == ["1 0"] * 3, done.stderr


def test_another_runtime_than_gccs_is_left_alone(monkeypatch):
    def pause(_):
        raise AssertionError

    library = SimpleNamespace(omp_pause_resource_all=pause, **{"__kmpc_fork_call": None})
    monkeypatch.setattr(threads, "_LIB", library)
    threads._pause.cache_clear()
    try:
        threads.release_threads()
    finally:
        threads._pause.cache_clear()
