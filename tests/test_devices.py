"""Devices by name."""

import os
import sys
import textwrap

from mpgluon.base.devices import from_numpy, parse_devices, to_numpy
from mpgluon.errors import PrecisionError

import mxnet as mx
import numpy as np
import pytest
from helpers import run_python


@pytest.mark.parametrize(
    ("text", "indices"),
    [("cpu", [0]), ("cpu:0", [0]), ("cpu:1", [1]), ("cpu:0,1", [0, 1]), ("cpu:2,0,1", [2, 0, 1])],
)
def test_a_text_names_contexts_in_its_order(text, indices):
    assert parse_devices(text) == [mx.cpu(index) for index in indices]


def test_gpus_that_mxnet_sees_are_named_as_cpus_are(monkeypatch):
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 2)
    assert (parse_devices("gpu"), parse_devices("gpu:1")) == ([mx.gpu(0)], [mx.gpu(1)])
    assert parse_devices("gpu:1,0") == [mx.gpu(1), mx.gpu(0)]


def test_the_first_gpu_beyond_those_that_mxnet_sees_is_refused_with_advice(monkeypatch):
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 2)
    with pytest.raises(PrecisionError, match=r"'gpu:0,2' names gpu\(2\), .* sees 2 GPUs; use"):
        parse_devices("gpu:0,2")
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 0)
    with pytest.raises(PrecisionError, match=r"names gpu\(0\), .* 0 GPUs; use --devices cpu"):
        parse_devices("gpu")
    with pytest.raises(PrecisionError, match=r"names gpu\(0\), .* 0 GPUs; use --device cpu"):
        parse_devices("gpu", "--device")


@pytest.mark.parametrize(
    "text",
    ["", "tpu", "CPU", "cpu0", "cpu:x", "cpu:0,", "cpu:,0", "cpu:-1", "gpu:1.0", "gpu:0:1", ":0"],
)
def test_a_text_of_another_form_is_refused(text):
    with pytest.raises(ValueError, match=r'^devices are "cpu", "gpu" or like "gpu:0,1"') as error:
        parse_devices(text)
    assert str(error.value).endswith(f"received {text!r}")


@pytest.mark.parametrize("text", ["cpu:0,0", "cpu:1,0,1", "gpu:0,0"])
def test_a_device_named_twice_is_refused(text):
    with pytest.raises(ValueError, match=f"each device can be used once; received {text!r}"):
        parse_devices(text)


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8", "int32"])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (7, 100_003), (2, 0)])
def test_copies_in_parts_are_those_of_mxnet(shape, dtype):
    values = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
    array = from_numpy(values)
    assert (array.context, array.dtype, array.shape) == (mx.cpu(), np.dtype(dtype), shape)
    copy = to_numpy(array)
    assert copy.dtype == values.dtype
    assert np.array_equal(copy, values)
    assert np.array_equal(copy, array.asnumpy())


COPIES = """
    import os, sys
    import mxnet as mx, numpy as np
    import mpgluon
    from mpgluon.base.devices import from_numpy, to_numpy

    def threads():
        mx.nd.waitall()
        return len(os.listdir("/proc/self/task"))

    values = np.ones(1_000_000, np.float32)
    net = mx.gluon.nn.Dense(1000, in_units=1000)
    net.initialize()
    (net(mx.nd.ones((8, 1000))) * 1).wait_to_read()
    mx.nd.ones((1000, 1000)).copyto(mx.cpu()).wait_to_read()
    before = threads()
    mpgluon.cast_block(net)
    to_numpy(from_numpy(values))
    without = threads()
    mx.nd.array(values)
    print(without - before, threads() - without)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads by Linux's /proc")
def test_a_cast_and_copies_in_parts_start_no_threads_for_the_caller_and_mxnets_copy_does():
    finished = run_python(textwrap.dedent(COPIES), env={**os.environ, "OMP_NUM_THREADS": "3"})
    assert finished.stdout.split() == ["0", "2"], finished.stderr
