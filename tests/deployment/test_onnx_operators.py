"""Each operator that is written as ONNX, computed by onnxruntime and by MXNet."""

from __future__ import annotations

from mpgluon import PrecisionError
from mpgluon.graph.nodes import VARIABLE
from mpgluon_tools.deployment.recording import record
from mpgluon_tools.onnx.operators import TRANSLATIONS
from mpgluon_tools.onnx.writer import onnx_model

import mxnet as mx
import numpy as np
import onnx
import pytest
from deployment_helpers import Lambda, served, some_images, with_random_values
from helpers import in_sequence, initialized
from interfaces import interface
from mxnet import gluon
from mxnet.gluon import nn

IMAGE = (2, 6, 9, 9)
VECTOR = (2, 12)


def prelu():
    net = initialized(nn.PReLU(in_channels=6))
    net.alpha.set_data(mx.nd.array(np.linspace(-0.5, 1, 6)))
    return net


def plain_pool(**options):
    return Lambda(lambda F, x: F.Pooling(x, kernel=(3, 3), stride=(2, 2), **options))


class Product(gluon.HybridBlock):
    """Multiplies by a matrix that is a parameter."""

    def __init__(self):
        super().__init__()
        self.matrix = self.params.get("matrix", shape=(12, 5))

    def hybrid_forward(self, F, x, matrix):
        if mx.util.is_np_array():
            return F.np.dot(x, matrix) + F.np.matmul(x, matrix)
        return F.dot(x, matrix)


NUMPY_CASES = {
    "mx.np: arrays": (
        lambda: Lambda(lambda F, x: F.np.divide(x * x + x, x * x + 1) - F.np.power(x * x, x)),
        IMAGE,
    ),
    "mx.np: numbers": (
        lambda: Lambda(lambda _, x: (1 - (3 / (x * x * 0.5 + 1.5) - 1) / 4) ** 2),
        IMAGE,
    ),
    "mx.np: functions": (
        lambda: Lambda(
            lambda F, x: F.np.log(F.np.sqrt(F.np.abs(x) + 1)) - F.np.exp(F.np.negative(x * x))
        ),
        IMAGE,
    ),
    "mx.np: functions of positive numbers": (
        lambda: Lambda(lambda F, x: F.np.reciprocal(F.np.square(x) + 1) + F.np.tanh(x)),
        IMAGE,
    ),
    "mx.npx: activations": (
        lambda: Lambda(lambda F, x: F.npx.relu(x) + F.npx.sigmoid(x) * F.npx.softmax(x)),
        IMAGE,
    ),
    "mx.np: the larger and the smaller": (
        lambda: Lambda(lambda F, x: F.np.maximum(x, x * x) + F.np.minimum(x, 0.5)),
        IMAGE,
    ),
    "mx.np: reductions": (
        lambda: Lambda(
            lambda F, x: (
                F.np.mean(x, axis=(2, 3))
                + F.np.sum(x, axis=(2, 3)) * 0.1
                + x.max(axis=3).min(axis=2)
            )
        ),
        IMAGE,
    ),
    "mx.np: shapes": (
        lambda: Lambda(
            lambda F, x: F.np.concatenate(
                [
                    F.np.transpose(x, (0, 3, 1, 2)).reshape(-1, 3, 3, 54),
                    F.npx.reshape(x, (-2, 3, 3, -1)),
                ],
                axis=2,
            )
        ),
        IMAGE,
    ),
    "mx.np: products": (lambda: Product(), VECTOR),
}

NUMPY_CASES["heads of attention, before the batch"] = (
    lambda: Lambda(
        lambda F, x: F.np.mean(
            F.npx.reshape(
                F.np.transpose(F.npx.reshape(x, (-2, -2, -6, 3, 3, -2)), (2, 0, 1, 3, 4)),
                (-2, -2, -1),
            ),
            axis=0,
        )
    ),
    IMAGE,
)
NUMPY_CASES["the batch as the second axis"] = (
    lambda: Lambda(
        lambda F, x: F.np.mean(
            F.npx.reshape(F.np.transpose(x, (1, 0, 2, 3)), (-1, -2, -2, -2)), axis=0
        )
    ),
    IMAGE,
)

CASES = {
    **NUMPY_CASES,
    "convolution": (lambda: nn.Conv2D(4, 3, in_channels=6), IMAGE),
    "convolution with all its options": (
        lambda: nn.Conv2D(
            4, (3, 2), (2, 1), (1, 2), (1, 3), groups=2, in_channels=6, use_bias=False
        ),
        IMAGE,
    ),
    "convolution in one dimension": (lambda: nn.Conv1D(4, 3, in_channels=6), (2, 6, 9)),
    "convolution in three dimensions": (lambda: nn.Conv3D(2, 3, in_channels=6), (2, 6, 5, 5, 5)),
    "dense layer": (lambda: nn.Dense(5, in_units=12), VECTOR),
    "dense layer on an image": (lambda: nn.Dense(5, in_units=6 * 81, use_bias=False), IMAGE),
    "dense layer that does not flatten": (lambda: nn.Dense(5, in_units=12, flatten=False), VECTOR),
    "batch norm": (lambda: nn.BatchNorm(in_channels=6, epsilon=1e-3), IMAGE),
    "batch norm without gamma": (lambda: nn.BatchNorm(in_channels=6, scale=False), IMAGE),
    "layer norm": (lambda: nn.LayerNorm(epsilon=1e-3, in_channels=12), VECTOR),
    **{
        f"activation {kind}": (lambda kind=kind: nn.Activation(kind), IMAGE)
        for kind in ("relu", "sigmoid", "tanh", "softrelu", "softsign")
    },
    "F.relu": (lambda: Lambda(lambda F, x: F.relu(x)), IMAGE),
    "F.sigmoid": (lambda: Lambda(lambda F, x: F.sigmoid(x)), IMAGE),
    "F.tanh": (lambda: Lambda(lambda F, x: F.tanh(x)), IMAGE),
    "leaky relu": (lambda: nn.LeakyReLU(0.3), IMAGE),
    "leaky relu by default": (lambda: Lambda(lambda F, x: F.LeakyReLU(x)), IMAGE),
    "elu": (lambda: nn.ELU(0.7), IMAGE),
    "prelu": (prelu, IMAGE),
    "max pooling": (lambda: nn.MaxPool2D(3, 2, 1), IMAGE),
    "max pooling of an even size": (lambda: nn.MaxPool2D(2, 2), IMAGE),
    "max pooling rounded up": (lambda: nn.MaxPool2D(2, 2, ceil_mode=True), IMAGE),
    "max pooling rounded up from 10": (lambda: nn.MaxPool2D(3, 2, ceil_mode=True), (2, 6, 10, 10)),
    "average pooling with its padding": (lambda: nn.AvgPool2D(3, 2, 1), IMAGE),
    "average pooling without": (lambda: nn.AvgPool2D(3, 2, 1, count_include_pad=False), IMAGE),
    "average pooling rounded up": (
        lambda: nn.AvgPool2D(2, 2, ceil_mode=True, count_include_pad=False),
        IMAGE,
    ),
    "average pooling rounded up to what fits": (lambda: nn.AvgPool2D(3, 2, ceil_mode=True), IMAGE),
    "pooling by default": (lambda: plain_pool(), IMAGE),
    "global average pooling": (lambda: nn.GlobalAvgPool2D(), IMAGE),
    "global max pooling": (lambda: nn.GlobalMaxPool2D(), IMAGE),
    "adaptive pooling to one pixel": (
        lambda: Lambda(lambda F, x: F.contrib.AdaptiveAvgPooling2D(x, output_size=1)),
        IMAGE,
    ),
    "clip": (lambda: Lambda(lambda F, x: F.clip(x, -0.5, 0.25)), IMAGE),
    **{
        f"padding {mode}": (
            lambda mode=mode: Lambda(
                lambda F, x: F.pad(
                    x, mode=mode, pad_width=(0, 0, 0, 0, 1, 2, 0, 3), constant_value=0.75
                )
            ),
            IMAGE,
        )
        for mode in ("constant", "edge", "reflect")
    },
    "concatenation": (lambda: Lambda(lambda F, x: F.concat(x, x * 2, x - 1, dim=2)), IMAGE),
    "flatten": (lambda: nn.Flatten(), IMAGE),
    "reshape": (lambda: Lambda(lambda _, x: x.reshape((0, -1, 27))), IMAGE),
    "transpose": (lambda: Lambda(lambda _, x: x.transpose((0, 3, 1, 2))), IMAGE),
    "softmax": (lambda: Lambda(lambda F, x: F.softmax(x, axis=1)), IMAGE),
    "log softmax": (lambda: Lambda(lambda F, x: F.log_softmax(x)), VECTOR),
    "mean": (lambda: Lambda(lambda _, x: x.mean(axis=(2, 3))), IMAGE),
    "mean of one axis that stays": (lambda: Lambda(lambda _, x: x.mean(1, keepdims=True)), IMAGE),
    "numbers": (lambda: Lambda(lambda _, x: 2 - (3 / (x * x * 0.5 + 1.5) - 1) / 4), IMAGE),
    "arrays": (lambda: Lambda(lambda _, x: (x * x + x) / (x * x + 1) - x), IMAGE),
    "broadcasts": (
        lambda: Lambda(
            lambda F, x: F.broadcast_div(
                F.broadcast_add(F.broadcast_sub(x, F.mean(x, axis=1, keepdims=True)), x),
                F.broadcast_mul(x, F.mean(x, axis=(2, 3), keepdims=True)) + 8,
            )
        ),
        IMAGE,
    ),
    "functions": (
        lambda: Lambda(lambda F, x: F.log(F.sqrt(F.abs(x) + 1)) - F.exp(-F.square(x))),
        IMAGE,
    ),
    "functions of positive numbers": (
        lambda: Lambda(lambda F, x: F.reciprocal(F.negative(x * x + 1)) * (x * x + 1) ** 1.5),
        IMAGE,
    ),
    "the larger and the smaller": (
        lambda: Lambda(
            lambda F, x: (
                F.broadcast_maximum(x, F.minimum(x, 0.5) * 2)
                + F.broadcast_minimum(F.maximum(x, -1), x * x)
            )
        ),
        IMAGE,
    ),
    "reductions": (
        lambda: Lambda(
            lambda F, x: F.sum(x, axis=(2, 3)) * 0.1 + F.max(x, axis=(2, 3)) + F.min(x, axis=(2, 3))
        ),
        IMAGE,
    ),
    "product": (lambda: Product(), VECTOR),
    "sum of several": (lambda: Lambda(lambda F, x: F.add_n(x, x * 2, x * x)), IMAGE),
    "a block that is called twice": (
        lambda: (lambda dense: in_sequence(dense, nn.Activation("tanh"), dense))(
            nn.Dense(12, in_units=12)
        ),
        VECTOR,
    ),
}


@pytest.fixture
def _interface_of(name):
    with interface(name in NUMPY_CASES):
        yield


def made(name):
    make, shape = CASES[name]
    net = make()
    if name != "prelu":
        with_random_values(net)
    images = some_images(*shape)
    return net, images.as_np_ndarray() if name in NUMPY_CASES else images


def model_of(net, shape, dtype="float32"):
    return onnx_model(record(net), [shape], dtype)


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("_interface_of")
@pytest.mark.parametrize("name", CASES)
def test_an_operator_gives_in_onnxruntime_what_it_does_in_mxnet(name):
    net, images = made(name)
    result = served(model_of(net, images.shape).SerializeToString(), images)
    expected = net(images).asnumpy()  # which sets a gamma that does not count to 1
    assert result.shape == expected.shape
    # The longest sum has 486 terms: gamma_486 = 2.9e-5 of the sum of magnitudes, of which the
    # results are a fair part. Two of them are compared; a wrong option changes the first digit.
    np.testing.assert_allclose(result, expected, rtol=6e-5, atol=6e-5)
    # In float16, of a file for any size of the batch.
    parts = [images, images * 0.5, images * 2]
    in_numpy = name in NUMPY_CASES
    images = mx.np.concatenate(parts) if in_numpy else mx.nd.concat(*parts, dim=0)
    expected = net(images).asnumpy()
    result = served(model_of(net, (1, *images.shape[1:]), "float16").SerializeToString(), images)
    assert result.dtype == np.float32
    # At most eight roundings of 2**-11 each, of terms up to 8 times as large as the result's norm.
    assert np.linalg.norm(result - expected) <= 64 * 2**-11 * np.linalg.norm(expected)


@pytest.mark.filterwarnings("ignore:Cannot decide type:UserWarning")
def test_an_operator_may_have_the_name_of_the_result():
    data, images = mx.sym.var("data"), some_images(*VECTOR)
    logits = mx.sym.relu(mx.sym.FullyConnected(data, num_hidden=3, name="logits"))
    net = gluon.SymbolBlock(mx.sym.FullyConnected(logits, num_hidden=2, name="logits_"), data)
    net.initialize(mx.init.One())
    net(images)
    expected = net(images).asnumpy()
    result = served(model_of(net, VECTOR).SerializeToString(), images)
    np.testing.assert_allclose(result, expected, rtol=6e-5, atol=6e-5)


def test_sizes_of_a_result_are_open_where_the_batch_changes_them():
    net = Lambda(lambda F, x: F.dot(x, F.transpose(x)))
    (output,) = model_of(net, VECTOR).graph.output
    sizes = output.type.tensor_type.shape.dim
    assert [(size.dim_param, size.dim_value) for size in sizes] == [("batch", 0), ("logits_1", 0)]


def test_every_translation_is_among_the_cases():
    written = set()
    for name in CASES:
        with interface(name in NUMPY_CASES):
            net, _ = made(name)
            written |= {node.operator for node in record(net).graph.nodes}
    assert set(TRANSLATIONS) == written - {VARIABLE}


def test_formats_in_a_float16_model_are_those_of_the_table_of_operators():
    net = in_sequence(nn.Conv2D(4, 3, in_channels=6), nn.BatchNorm(in_channels=4))
    net.add(nn.Activation("relu"), nn.MaxPool2D(2), nn.Dense(5, in_units=36))
    net.add(Lambda(lambda F, x: F.softmax(x)), nn.Dense(3, in_units=5))
    model = model_of(with_random_values(net), IMAGE, "float16")
    graph = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    types = {constant.name: constant.data_type for constant in graph.initializer}
    for value in (*graph.value_info, *graph.input, *graph.output):
        types[value.name] = value.type.tensor_type.elem_type
    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    formats = {**dict.fromkeys(("Conv", "Relu", "MaxPool", "Gemm"), half),
               **dict.fromkeys(("BatchNormalization", "Softmax"), single)}  # fmt: skip
    nodes = [node for node in model.graph.node if node.op_type in formats]
    assert {node.op_type for node in nodes} == set(formats)
    for node in nodes:
        assert {types[name] for name in node.input} == {formats[node.op_type]}
    assert {types[value.name] for value in (*graph.input, *graph.output)} == {single}


REFUSED = {
    "an unknown operator": (lambda F, x: F.erf(x), r"\(erf\)"),
    "an unknown operator before others": (lambda F, x: F.relu(F.expm1(x) + x),
        r"expm10 \(expm1\); wri"),
    "one of several outputs": (lambda F, x: F.relu(F.split(x, 2, axis=1)[1]), r"\(SliceChannel\)"),
    "several of them": (lambda F, x: F.erf(F.cos(x)), r"\(cos\); .*\(erf\)"),
    "pooling of a kind": (lambda F, x: F.Pooling(x, kernel=(2, 2), pool_type="sum"),
        "pool_type='sum'"),
    "average pooling beyond the padding": (
        lambda F, x: F.Pooling(
            x, kernel=(2, 2), stride=(2, 2), pool_type="avg", pooling_convention="full"
        ),
        "whose last window reaches beyond the padding",
    ),
    "pooling whose last window lies in the padding": (
        lambda F, x: F.Pooling(
            x, kernel=(1, 1), stride=(3, 3), pool_type="max", pooling_convention="full"
        ),
        "last window lies in the padding",
    ),
    "a sum of every axis": (lambda F, x: F.sum(x, axis=(0, 1, 2, 3)), "it reduces every axis"),
    "adaptive pooling to several pixels": (
        lambda F, x: F.contrib.AdaptiveAvgPooling2D(x, output_size=3),
        r"its output has \(3, 3\) pixels",
    ),
    "gelu": (lambda F, x: F.LeakyReLU(x, act_type="gelu"), "act_type='gelu'"),
    "softmax with a temperature": (lambda F, x: F.softmax(x, temperature=2.0), "a temperature"),
    "a mean of everything": (lambda _, x: x.mean(), "it names no axes"),
    "a mean of all other axes": (lambda F, x: F.mean(x, axis=1, exclude=True), "names no axes"),
    "a reshape with MXNet's own codes": (lambda _, x: x.reshape((0, 0, -3)), "ONNX knows 0 and -1"),
    "a reshape that fixes the batch": (lambda _, x: x.reshape((2, -1)), "size of the batch"),
    "mx.np: an unknown operator": (lambda F, x: F.np.expm1(x), r"\(_npi_expm1\)"),
    "mx.np: a reshape that fixes the batch": (lambda _, x: x.reshape(2, -1), "size of the batch"),
    "mx.np: a reshape by columns": (lambda F, x: F.np.reshape(x, (-1, 3), order="F"), "order='F'"),
    "mx.np: a reshape without the batch": (
        lambda F, x: F.npx.reshape(x.sum(axis=0, keepdims=True), (-3, -4)),
        "removes the size of the batch",
    ),
    "mx.np: a concatenation of all": (lambda F, x: F.np.concatenate([x], axis=None), "axis=None"),
    "mx.np: a product with many axes": (lambda F, x: F.np.dot(x, x), "of 4 and 4 axes"),
    "a product of transposed": (lambda F, x: F.dot(x, x, transpose_b=True), "a transposed operand"),
    "mx.np: a sum in another format": (lambda F, x: F.np.sum(x, axis=1, dtype="float64"),
        "dtype=float64"),
    "a layer of another layout": (lambda: nn.Conv2D(4, 3, layout="NHWC", in_channels=9),
        "its layout is not NCHW"),
    "a layer of another axis": (lambda: nn.BatchNorm(axis=2, in_channels=9), "its axis is 2"),
    "a layer norm of another axis": (lambda: nn.LayerNorm(1, in_channels=6), "its axis is 1"),
    "a layer of more axes": (lambda: nn.Dense(3, in_units=9, flatten=False),
        "flatten=False with more than two axes"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_operator_without_an_equal_in_onnx_is_refused_by_name(name):
    make, message = REFUSED[name]
    net = with_random_values(make()) if name.startswith("a layer") else Lambda(make)
    with (
        interface("np" in name),
        pytest.raises(PrecisionError, match=f"ONNX export cannot express .*{message}") as refused,
    ):
        model_of(net, IMAGE)
    if name == "an unknown operator":
        _, operators = str(refused.value).split("The operators that it knows: ")
        assert operators.split(", ") == sorted(TRANSLATIONS)
