"""Whether Tensor Cores compute float16 products.

MXNet's profiler names operators, not the kernels in them, so two other witnesses are heard. What
cuDNN is asked for stands in its own log. And a product that is faster than the GPU's other units
could be at their highest clock was computed by Tensor Cores; a slower one proves nothing.
"""

import ctypes
import os
import subprocess
import sys
import time

import mpgluon

import mxnet as mx
import pytest
from mxnet.gluon import nn

pytestmark = pytest.mark.gpu

# Multiply-adds of float16 per clock and multiprocessor without Tensor Cores, by architecture: CUDA
# C++ Programming Guide 11.8, 8.4.1, table of throughputs, and the figures in NVIDIA's white papers
# on V100 (31.4 TFLOP/s), TU102 (28.5), A100 (78), GA102 (35.6) and AD102 (82.6).
WITHOUT_TENSOR_CORES = {(7, 0): 128, (7, 5): 128, (8, 0): 256, (8, 6): 128, (8, 9): 128}
# cudaDeviceAttr
CLOCK_KHZ, MULTIPROCESSORS, MAJOR, MINOR = 13, 16, 75, 76
REPETITIONS = 30

A_CONVOLUTION = """
import sys
import mpgluon, mxnet as mx

with mx.gpu(0):
    net = mx.gluon.nn.Conv2D(64, 3, in_channels=64)
    net.initialize()
    if sys.argv[1] == "float16":
        mpgluon.cast_block(net)
    images = mx.nd.ones((8, 64, 16, 16))
    images.attach_grad()
    with mx.autograd.record():
        result = net(images)
    result.backward()
    mx.nd.waitall()
"""


def attribute(device: mx.Context, number: int) -> int:
    value = ctypes.c_int()
    runtime = ctypes.CDLL("libcudart.so.11.0")
    assert runtime.cudaDeviceGetAttribute(ctypes.byref(value), number, device.device_id) == 0
    return value.value


@pytest.fixture(scope="module")
def most_without_tensor_cores(gpu) -> float:
    """Return how many float16 operations a second this GPU can do at most without Tensor Cores."""
    architecture = attribute(gpu, MAJOR), attribute(gpu, MINOR)
    if architecture not in WITHOUT_TENSOR_CORES:
        pytest.skip("sm_{}{} has no Tensor Cores, or is not in the table".format(*architecture))
    per_clock = 2 * WITHOUT_TENSOR_CORES[architecture] * attribute(gpu, MULTIPROCESSORS)
    return per_clock * attribute(gpu, CLOCK_KHZ) * 1e3


def operations_per_second(net, data: mx.nd.NDArray, operations: float) -> float:
    net.hybridize(static_alloc=True, static_shape=True)
    for _ in range(3):  # the first chooses an algorithm
        net(data)
    mx.nd.waitall()
    began = time.perf_counter()
    for _ in range(REPETITIONS):
        net(data)
    mx.nd.waitall()
    return REPETITIONS * operations / (time.perf_counter() - began)


@pytest.mark.parametrize(
    ("layer", "shape", "operations"),
    [
        (lambda: nn.Dense(4096, in_units=4096, use_bias=False), (8192, 4096), 2.0**38),
        (
            lambda: nn.Conv2D(256, 3, padding=1, in_channels=256, use_bias=False),
            *((64, 256, 56, 56), 2.0 * 64 * 56**2 * 256 * 256 * 9),
        ),
    ],
    ids=["matrix product", "convolution"],
)
def test_a_product_is_faster_with_tensor_cores(most_without_tensor_cores, layer, shape, operations):
    net = layer()
    net.initialize(mx.init.Normal(0.01))
    mpgluon.cast_block(net)
    data = mx.nd.ones(shape, dtype="float16")
    assert operations_per_second(net, data, operations) > most_without_tensor_cores


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_mxnet_asks_cudnn_for_tensor_cores_in_float16_only(tmp_path, dtype):
    log = tmp_path / "cudnn.log"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", A_CONVOLUTION, dtype],
        check=True,
        timeout=300,
        env={**os.environ, "CUDNN_LOGINFO_DBG": "1", "CUDNN_LOGDEST_DBG": str(log)},
    )
    said = log.read_text()
    assert "function cudnnSetConvolutionMathType() called" in said
    assert ("val=CUDNN_TENSOR_OP_MATH (1)" in said) == (dtype == "float16")
