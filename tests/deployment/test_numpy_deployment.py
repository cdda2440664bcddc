"""Deployment of a network of MXNet's NumPy interface: the bits of the same network in mx.nd."""

from __future__ import annotations

from mpgluon import CheckpointError, PrecisionError
from mpgluon.deployment import export_mxnet, export_onnx, import_mxnet, inference_network
from mpgluon.kernels.bfloat16 import has_native_bfloat16

import mxnet as mx
import numpy as np
import pytest
from deployment_helpers import served
from helpers import assert_same_bits, in_way, initialized
from interfaces import images_of, in_both, interface, made
from mxnet import gluon

pytestmark = pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments")

DTYPES = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])


def results_of(net, array):
    result = net(images_of(array))
    assert isinstance(result, mx.np.ndarray) == mx.util.is_np_array()
    return result.asnumpy()


@DTYPES
@pytest.mark.parametrize("way", [None, "cast float16"])
def test_an_inference_network_computes_the_same_bits(dtype, way):
    def computed(array):
        net = inference_network(made(way), dtype)
        hybridized = results_of(net, array)
        net.hybridize(False)
        return hybridized, results_of(net, array)

    assert_same_bits(*in_both(computed))


@DTYPES
def test_an_exported_file_computes_the_bits_of_the_inference_network(dtype, tmp_path):
    with interface(in_numpy=True) as array:
        net = made("cast float16")
        export_mxnet(net, tmp_path / "net", dtype=dtype)
        imported = results_of(import_mxnet(tmp_path / "net"), array)
        expected = results_of(inference_network(net, dtype), array)
    if dtype == "bfloat16" and has_native_bfloat16():
        # Without shapes, a sum of mx.np may broadcast, which oneDNN's bfloat16 does not: FP32.
        assert np.abs(imported - expected).max() <= 2.0**-8 * np.abs(expected).max()
    else:
        assert_same_bits([imported], [expected])
    with pytest.raises(CheckpointError, match=r"call mx\.npx\.set_np\(\) first"):
        import_mxnet(tmp_path / "net")


@pytest.mark.parametrize("way", [None, "cast float16", "autocast bfloat16"])
def test_the_export_of_a_hybridized_network_computes_the_same_bits(way, tmp_path):
    with interface(in_numpy=True) as array:
        net = made(way, hybridize=True)
        expected = results_of(net, array)
        net.export(str(tmp_path / "net"))
        assert_same_bits([results_of(import_mxnet(tmp_path / "net"), array)], [expected])


@pytest.mark.parametrize("way", ["cast float16", "autocast float16", "emulated bfloat16"])
def test_a_cast_of_an_imported_graph_computes_the_bits_of_the_network(way, tmp_path):
    with interface(in_numpy=True) as array:
        net = made(hybridize=True)
        results_of(net, array)
        net.export(str(tmp_path / "net"))
        imported = in_way(way, import_mxnet(tmp_path / "net"))
        expected = results_of(made(way, hybridize=True), array)
        assert_same_bits([results_of(imported, array)], [expected])


def test_a_graph_of_the_numpy_interface_is_refused_where_that_is_switched_off():
    with interface(in_numpy=True):
        inference = inference_network(made(), "float32")
    with pytest.raises(PrecisionError, match=r"operator _npi_add.*call mx\.npx\.set_np\(\)"):
        inference(mx.sym.var("data"))


class Splits(gluon.HybridBlock):
    """Has an operator with several results."""

    def hybrid_forward(self, F, x):
        first, second = F.np.split(x, 2, axis=1)
        return first * second.mean() - 2


def test_an_operator_with_several_results_is_replayed():
    with interface(in_numpy=True) as array:
        x = array(np.random.RandomState(0).standard_normal((2, 4)).astype(np.float32))
        net = Splits()
        assert_same_bits([inference_network(net, "float32")(x).asnumpy()], [net(x).asnumpy()])


class WithComputedWeight(gluon.HybridBlock):
    """A dense layer of a weight that is computed."""

    def __init__(self):
        super().__init__()
        self.weight = self.params.get("weight", shape=(3, 4), init="normal")

    def hybrid_forward(self, F, x, weight):
        return F.npx.fully_connected(x, F.np.tanh(weight) * 2, num_hidden=3, no_bias=True)


def test_a_weight_that_is_computed_from_parameters_is_computed_once():
    with interface(in_numpy=True) as array:
        x = array(np.random.RandomState(0).standard_normal((2, 4)).astype(np.float32))
        net = initialized(WithComputedWeight())
        inference = inference_network(net, "float32")
        (weight,) = inference.collect_params().values()
        expected = mx.np.tanh(net.weight.data()) * 2
        assert_same_bits([weight.data().asnumpy()], [expected.asnumpy()])
        assert_same_bits([inference(x).asnumpy()], [net(x).asnumpy()])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_onnx_file_gives_the_same_numbers(dtype, tmp_path):
    def computed(array):
        images = images_of(array)
        export_onnx(
            made("cast float16"), tmp_path / "net", dtype=dtype, input_shapes=[images.shape]
        )
        return [served(str(tmp_path / "net"), images)]

    assert_same_bits(*in_both(computed))
