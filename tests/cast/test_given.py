"""Values that a network is given, as constants and as numbers in its code, stay what they are.

The oracle computes in NumPy: a dense layer with the identity for its weight passes small integers
on, exact in every format, and what follows is computed with the value as it was given.
"""

from __future__ import annotations

import mpgluon
from mpgluon.base.blocks import set_value
from mpgluon.deployment import export_mxnet, import_mxnet, inference_network
from mpgluon.tools.onnx import export_onnx

import mxnet as mx
import numpy as np
import pytest
from deployment.deployment_helpers import served
from helpers import BOTH, EACH_WAY, STATIC, WAYS, assert_same_bits, cast_net, in_sequence
from interfaces import IN_NUMPY, interface
from mxnet import autograd, gluon
from mxnet.gluon import nn

X = np.array([[0, 0, 0, 0], [1, 2, 3, 4], [4, 0, 1, 2]], np.float32)
GIVEN = np.array([1e-8, 1 / 3, 1e6, 2049.5], np.float32)  # float16 has none of these
KINDS = ("constant", "without gradient", "written later")


class Passes(gluon.HybridBlock):
    """A dense layer that returns its input in the network's format."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(4, in_units=4, use_bias=False)

    def initialized(self):
        self.initialize()
        set_value(self.dense.weight, mx.nd.array(np.eye(4)))
        return self


class Scaled(Passes):
    """Multiplies by values that are not trained."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        with self.name_scope():
            if kind == "constant":
                self.given = self.params.get_constant("given", mx.nd.array(GIVEN))
            else:
                self.given = self.params.get("given", shape=4, init="zeros", grad_req="null")

    def hybrid_forward(self, F, x, given):
        return F.broadcast_mul(self.dense(x), given)


def scaled(kind, cast=None, *, hybridize=False):
    net = Scaled(kind).initialized()
    for is_cast in (False, True):
        if is_cast and cast is not None:
            cast(net)
        if kind != "constant" and is_cast == (kind == "written later"):
            net.given.set_data(mx.nd.array(GIVEN))
    net.hybridize(hybridize, **STATIC)
    return net


@BOTH
@EACH_WAY
@pytest.mark.parametrize("kind", KINDS)
def test_a_network_computes_with_the_values_that_it_was_given(kind, way, hybridize):
    net = scaled(kind, WAYS[way], hybridize=hybridize)
    np.testing.assert_array_equal(net(mx.nd.array(X)).asnumpy(), X * GIVEN)
    mpgluon.restore(net)
    np.testing.assert_array_equal(net.given.data().asnumpy(), GIVEN)


@pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments")
@pytest.mark.parametrize("cast", [None, mpgluon.cast_block], ids=["plain", "cast"])
@pytest.mark.parametrize("kind", KINDS)
def test_so_does_every_way_to_deploy_it(kind, cast, tmp_path):
    net, x = scaled(kind, cast), mx.nd.array(X)
    net(x)
    results = {}
    for dtype in ("float16", "bfloat16", "float32"):
        results[dtype] = inference_network(net, dtype)(x).asnumpy()
        export_mxnet(net, tmp_path / dtype, dtype=dtype)
        results[f"file in {dtype}"] = import_mxnet(tmp_path / dtype)(x).asnumpy()
    for dtype in ("float16", "float32"):
        path = export_onnx(net, tmp_path / f"{dtype}.onnx", dtype=dtype, input_shapes=[X.shape])
        results[f"ONNX in {dtype}"] = served(str(path), x)
    for name, result in results.items():
        np.testing.assert_array_equal(result, X * GIVEN, err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_so_does_a_network_from_a_checkpoint(kind, tmp_path):
    first, second = scaled(kind, mpgluon.cast_block), scaled(kind, mpgluon.cast_block)
    trainers = [gluon.Trainer(net.collect_params(), "sgd") for net in (first, second)]
    mpgluon.save_checkpoint(tmp_path / "one", first, trainers[0])
    second.given.set_data(mx.nd.zeros(4))
    mpgluon.load_checkpoint(tmp_path / "one", second, trainers[1])
    np.testing.assert_array_equal(second(mx.nd.array(X)).asnumpy(), X * GIVEN)


def test_an_operand_of_a_product_is_rounded_as_a_weight_is():
    matrix = np.full((4, 4), 1 / 3, np.float32)

    class Projects(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            self.matrix = self.params.get_constant("matrix", mx.nd.array(matrix))

        def hybrid_forward(self, F, x, matrix):
            return F.dot(x, matrix)

    net = in_sequence(Projects(), nn.Dense(4, in_units=4))
    net.initialize()
    net[1].collect_params().setattr("grad_req", "null")
    report = mpgluon.cast_block(net)
    assert report.parameters_cast == 2  # of the frozen layer, as if it were trained
    expected = (X @ matrix.astype(np.float16).astype(np.float64)).astype(np.float16)
    np.testing.assert_array_equal(net[0](mx.nd.array(X)).asnumpy(), expected)


@pytest.mark.parametrize(
    "convert", [mpgluon.cast_block, lambda net: inference_network(net, "float16")]
)
@pytest.mark.parametrize(
    ("values", "is_named"), [([1e-9, 1e-6], True), ([1e-9, 0.1], False), ([0, 1e-6], False)]
)
def test_weights_that_become_0_are_named_in_the_log_unless_the_array_has_normal_numbers(
    convert, values, is_named, caplog
):
    net = in_sequence(nn.Dense(1, in_units=2, use_bias=False))
    net.initialize()
    net[0].weight.set_data(mx.nd.array([values]))
    convert(net)
    assert (f"1 in {net[0].weight.name}" in caplog.text) == is_named


# ruff: noqa: ARG005 - not every function of F and an array uses both
NUMBERS = {
    "a denominator": lambda F, x: x / (F.abs(x) + 1e-8),
    "a quotient": lambda F, x: 1e-8 / (x + 1e-8),
    "a difference": lambda F, x: 1 / (1e-8 - x),
    "a bound": lambda F, x: F.log(F.maximum(x, 1e-8)),
    "two bounds": lambda F, x: F.log(F.clip(x, 1e-8, 1e6)),
    "a method's bounds": lambda F, x: F.log(x.clip(1e-8, 1e6)),
    "a factor": lambda F, x: x * 1e6 * 1e-6,
    "a comparison": lambda F, x: F.where(x >= 1e-8, x, 1 - x),
    "a mask": lambda F, x: F.exp(F.where(x > 2, x, -1e18 - x)),
}
FORMATS = (
    "float16", "mixed_float16", "emulated_bfloat16", "compute=float8_e5m2", "compute=float4_e2m1",
)  # fmt: skip


@IN_NUMPY
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("case", NUMBERS)
def test_a_number_that_the_format_lacks_counts_in_fp32(case, dtype, in_numpy, request):
    if "16" not in dtype:
        request.getfixturevalue("native_operators")
    function = NUMBERS[case]

    class Computes(Passes):
        def hybrid_forward(self, F, x):
            return function(F.np if in_numpy else F, self.dense(x)) * 1

    found = []
    with interface(in_numpy) as array:
        for hybridize in (False, True):
            net = cast_net(Computes().initialized(), dtype)
            net.hybridize(hybridize, **STATIC)
            x = array(X)
            x.attach_grad()
            with autograd.record():
                result = net(x)
                loss = (result * array(X + 1)).sum()
            loss.backward()
            found.append([result.asnumpy(), x.grad.asnumpy()])
    assert_same_bits(*found)
    with np.errstate(all="ignore"):
        expected = function(np, X.astype(np.float64))
    # bfloat16 has the numbers, rounded; a sum of two of them is rounded too.
    rtol = 2.0**-6 if "bfloat16" in dtype else 1e-6
    np.testing.assert_allclose(found[0][0], expected, rtol=rtol)
