"""Each operator that is written as ONNX, computed by onnxruntime and by MXNet."""

from __future__ import annotations

from mpgluon import PrecisionError
from mpgluon.graph.nodes import VARIABLE
from mpgluon_tools.deployment.folding import fold_constants
from mpgluon_tools.deployment.recording import record
from mpgluon_tools.onnx import export_onnx
from mpgluon_tools.onnx.operators import TRANSLATIONS
from mpgluon_tools.onnx.writer import onnx_model

import mxnet as mx
import numpy as np
import onnx
import onnxruntime
import pytest
from deployment_helpers import Lambda, served, some_images, with_random_values
from helpers import in_sequence, initialized
from interfaces import interface
from mxnet import gluon
from mxnet.gluon import nn, rnn

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


class Weighted(gluon.HybridBlock):
    """Computes one function of F, its input and a parameter."""

    def __init__(self, shape, function):
        super().__init__()
        self.weight = self.params.get("weight", shape=shape)
        self.function = function

    def hybrid_forward(self, F, x, weight):
        return self.function(F, x, weight)


class Unrolled(gluon.HybridBlock):
    """A recurrent cell over all times of an input, (batch, 5, ...)."""

    def __init__(self, make):
        super().__init__()
        self.cell = make()

    def hybrid_forward(self, F, x):
        return self.cell.unroll(5, x, layout="NTC", merge_outputs=True)[0]


def some_boxes(F, x):
    """Return boxes, (batch, row, 6), of three classes from random numbers of that shape."""
    corner, size = x.slice_axis(axis=2, begin=2, end=4), x.slice_axis(axis=2, begin=4, end=6)
    classes = F.clip(F.floor(x.slice_axis(axis=2, begin=0, end=1)), -1, 1)
    scores = F.sigmoid(x.slice_axis(axis=2, begin=1, end=2))
    return F.concat(classes, scores, corner, F.abs(size) + corner + 1, dim=2)


def boxes_at(F, w):
    """Return boxes of images, (box, 5), from random numbers, (box, 4); some reach beyond them."""
    first, size = F.slice_axis(w, axis=1, begin=0, end=2), F.slice_axis(w, axis=1, begin=2, end=4)
    number = F.expand_dims(F.arange(5) >= 2, 1)
    return F.concat(number, first * 4 + 3, first * 4 + 3 + F.abs(size) * 9, dim=1)


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
    "mx.np: truth values, and a sum over no axes": (
        lambda: Lambda(lambda F, x: F.np.sum(F.npx.relu(x).astype("bool") * x, axis=())),
        IMAGE,
    ),
    "mx.np: uneven parts": (
        lambda: Lambda(
            lambda F, x: F.np.concatenate(F.np.array_split(F.np.tile(x, 2), 5, axis=3)[::-1], 3)
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

VECTORS = (2, 5, 6)
FUNCTIONS = {
    "reshape with MXNet's codes": lambda F, x: F.concat(
        x.reshape((0, -4, 2, 3, -2)).reshape((0, -3, -2)), x.reshape((-1, 6, 9, 9)), dim=1),
    "reshape of two open sizes": lambda F, x: F.batch_dot(x.mean(axis=3).transpose((1, 0, 2)),
        x.mean(axis=3).transpose((1, 0, 2)), transpose_b=True).reshape((2, -1, 0)),
    "swapped axes": lambda F, x: F.swapaxes(x, 1, 3),
    "stack": lambda F, x: F.stack(x, x * 2, axis=-1),
    "tile": lambda F, x: F.tile(x, reps=(2, 3)) + F.tile(F.tile(x, reps=(1, 1, 1, 2, 3)).squeeze(
        axis=0).slice_axis(axis=3, begin=0, end=9).slice_axis(axis=2, begin=0, end=9), reps=(2, 3)),
    "repeat": lambda F, x: F.repeat(x, 2, axis=1) + F.repeat(x, 2, axis=-3),
    "repeat of all": lambda F, x: F.repeat(x, 3),
    "turned around": lambda F, x: F.reverse(x, axis=(1, 3)) + F.reverse(x, axis=2),
    "orders": lambda F, x: F.argsort(x, axis=1) + F.argsort(x, axis=-1, is_ascend=False) * 10
        + F.sort(x, axis=1) - F.sort(x, axis=2, is_ascend=False),
    "running sums": lambda F, x: F.cumsum(x, axis=2) + F.cumsum(x, axis=0) * 2,
    "binary logarithm": lambda F, x: F.log2(x * x + 1),
    "a condition for rows": lambda F, x: F.where(F.mean(x, axis=(1, 2, 3)) > 0, x, -x * 2),
    "expanded and squeezed": lambda F, x: x.expand_dims(1).squeeze(axis=(1,)).expand_dims(-1)
        .squeeze(axis=-1) + F.broadcast_add(x, F.zeros((1, 1, 9, 1)).squeeze()),
    "split": lambda F, x: F.split(x, 3, axis=1)[1].sum(axis=(1, 2)) + F.split(
        x, 9, axis=3, squeeze_axis=True)[4].sum(axis=1) + F.split(
        x, 1, axis=2).mean(axis=(1, 2)),
    "split at places": lambda F, x: F.split_v2(x, (2, 3), axis=1)[1] + F.split_v2(x, 6, axis=1)[5],
    "slices": lambda F, x: F.slice(x, begin=(None, 1, -2), end=(None, 4, None))
        + F.slice(x, (None, 5, 8), (None, 2, None), step=(1, -1, -8)),
    "slice of an axis": lambda _, x: x.slice_axis(axis=-1, begin=-4, end=-1),
    "slice like": lambda F, x: F.slice_like(x, x.slice_axis(axis=2, begin=0, end=4), axes=(-2,))
        + F.slice_like(x, x.slice_axis(axis=2, begin=0, end=4)),
    "like another": lambda F, x: F.reshape_like(x.reshape((0, -1)), x)
        + F.broadcast_like(x.mean(axis=1, keepdims=True), x),
    "broadcasts to a shape": lambda F, x: F.broadcast_to(x.mean(1, keepdims=True), (0, 6, 0, 0))
        + F.broadcast_axis(x.max(axis=(1, 2), keepdims=True), axis=(1, 2), size=(6, 9)),
    "constants": lambda F, x: F.broadcast_add(x * F.ones_like(x) + F.zeros_like(x), F.concat(
        F.zeros((1, 3, 9, 9)), F.ones((1, 2, 9, 9)), F.full((1, 1, 9, 9), 3), dim=1)),
    "numbers in a row": lambda F, x: F.broadcast_add(x, (
        F.contrib.arange_like(x, axis=3) + F.arange(9)
        + F.contrib.arange_like(x, axis=2, start=1, step=-0.5)).reshape((1, 1, 1, -1))),
    "a row as large as an array": lambda F, x: x * 40 + F.contrib.arange_like(x),
    "one hot": lambda F, x: F.one_hot(x * 3, 4, on_value=2, off_value=-1),
    "take": lambda F, x: F.take(F.take(x, x.mean(axis=(2, 3)) * 90, axis=2).mean(axis=1),
        F.arange(4) * 3 - 5, axis=3, mode="wrap"),
    "pick": lambda F, x: F.pick(x, x.mean(axis=1) * 30, axis=1)
        + F.pick(x, x.slice_axis(axis=1, begin=0, end=1) * 9, axis=1, keepdims=True).mean(axis=1),
    "gather": lambda F, x: F.gather_nd(x.transpose((1, 2, 3, 0)), F.arange(6).reshape((2, 3)))
        .transpose(),
    "largest": lambda F, x: F.topk(x, k=3, axis=1) + F.topk(x, k=3, axis=1, ret_typ="value")
        * F.topk(x, k=3, axis=1, ret_typ="both", is_ascend=True)[1],
    "first largest": lambda F, x: F.argmax(x, axis=1) + F.argmin(x, axis=-3),
    "first largest of an axis that stays": lambda F, x: F.broadcast_add(
        F.argmax(x, axis=2, keepdims=True), x),
    "casts": lambda F, x: F.cast(F.cast(x * 3, "int32"), "float32") + F.cast(x, "float32"),
    "integers": lambda F, x: F.broadcast_div(F.cast(x * 30, "int32"), F.cast(x * 0 + 7, "int32"))
        + F.broadcast_mod(F.cast(x * 30, "int32"), F.cast(x * 0 + 7, "int32")),
    "bytes and truth values": lambda F, x: F.cast(F.cast(x * 200, "uint8"), "float32") * 0.01
        + F.cast(F.cast(x * 200, "int8"), "float32") + F.cast(F.cast(x, "bool"), "float32"),
    "whole numbers among integers": lambda F, x: F.cast(
        F.clip(F.maximum(F.cast(x * 9, "int32") * 2, -4) - 1, -3, 7) > 0, "float32"),
    "sizes": lambda F, x: F.broadcast_mul(x, F.cast(x.shape_array(), "float32").slice_axis(
        axis=0, begin=1, end=2)),
    "comparisons of arrays": lambda F, x: sum(
        (n + 1) * getattr(F, f"broadcast_{name}")(F.floor(x), F.ceil(x * 0.5))
        for n, name in enumerate(("equal", "not_equal", "greater", "greater_equal", "lesser",
                                  "lesser_equal", "logical_and", "logical_or", "logical_xor"))),
    "comparisons": lambda _, x: (x > x * x) + 2 * (x < x * x) + 4 * (x >= x) + 8 * (x <= x - 1)
        + 16 * (x == x) + 32 * (x != x),
    "comparisons with a number": lambda F, x: (x > 1) + 2 * (x < -1) + 4 * (x >= 0.5) + 8 * (
        F.floor(x) <= 1) + 16 * (F.floor(x) == 0) + 32 * (F.floor(x) != 1),
    "choice": lambda F, x: F.where(F.logical_not(F.floor(x)), x, x * 2) + F.where(x > 0, x, x + 1),
    "larger and smaller arrays": lambda F, x: F.maximum(x, x * 2) + F.minimum(x, x * x),
    "powers": lambda F, x: F.power(x * x, x) + F.broadcast_power(x * x + 1, x) + 2**x,
    "more functions": lambda F, x: F.erf(x) + F.sin(x) * F.cos(x) + F.tan(x * 0.5) + F.sign(x)
        + F.rsqrt(x * x + 1),
    "gelu": lambda F, x: F.LeakyReLU(x, act_type="gelu"),
    "selu": lambda F, x: F.LeakyReLU(x, act_type="selu"),
    "softmax with a temperature": lambda F, x: F.softmax(x, axis=2, temperature=2.5),
    "reduction of everything": lambda F, x: F.broadcast_add(
        x, x.mean() + x.max() + F.min(x, axis=(0, 1, 2, 3))),
    "reduction of other axes": lambda F, x: F.sum(x, axis=(0, 1), exclude=True) + F.prod(
        x, axis=(2, -1)),
    "reduction of no axes": lambda F, x: F.broadcast_add(
        F.sum(x, axis=(0, 1, 2, 3), exclude=True) * F.mean(x.expand_dims(1), axis=1),
        F.max(x, axis=None, exclude=True)),
    "norms": lambda F, x: F.broadcast_add(F.norm(x, axis=1) + F.norm(x, ord=1, axis=1),
        F.norm(x)),
    **{f"unit length by {mode}": lambda F, x, mode=mode: F.L2Normalization(x, mode=mode)
       for mode in ("instance", "channel", "spatial")},
    "nearest pixels": lambda F, x: F.UpSampling(x, scale=3, sample_type="nearest"),
    "bilinear from corner to corner": lambda F, x: F.contrib.BilinearResize2D(
        x, height=13, width=7),
    "bilinear like another": lambda F, x: F.contrib.BilinearResize2D(
        x, F.UpSampling(x, scale=2, sample_type="nearest"), mode="like", align_corners=False),
    "adaptive pooling": lambda F, x: F.contrib.AdaptiveAvgPooling2D(x, output_size=(4, 3)),
    "products of a batch": lambda F, x: F.batch_dot(x.mean(axis=1), x.max(axis=1)) + F.batch_dot(
        x.mean(axis=1), x.max(axis=1), transpose_a=True) + F.batch_dot(
        x.mean(axis=1), x.max(axis=1), transpose_b=True),
    "products of transposed": lambda F, x: F.dot(F.dot(x.mean(axis=(2, 3)), x.max(axis=(2, 3)),
        transpose_b=True), F.dot(x.max(axis=(2, 3)), x.mean(axis=(2, 3)).transpose()),
        transpose_a=True),
    "product of vectors": lambda F, x: F.broadcast_mul(
        F.dot(x.mean(axis=(0, 2, 3)), F.arange(6)), x),
}  # fmt: skip
LAYERS = {
    "dense layer of more axes": (lambda: nn.Dense(4, in_units=6, flatten=False), VECTORS),
    "dense layer of more axes without bias": (
        lambda: nn.Dense(4, in_units=6, flatten=False, use_bias=False), VECTORS),
    "deconvolution": (lambda: nn.Conv2DTranspose(4, 3, in_channels=6), IMAGE),
    "deconvolution with all its options": (lambda: nn.Conv2DTranspose(
        4, (3, 4), (2, 3), (1, 2), (1, 2), (2, 1), groups=2, in_channels=6, use_bias=False), IMAGE),
    "deconvolution in one dimension": (
        lambda: nn.Conv1DTranspose(4, 3, 2, in_channels=6), (2, 6, 9)),
    "deconvolution in three dimensions": (
        lambda: nn.Conv3DTranspose(2, 2, 2, in_channels=6), (2, 6, 3, 3, 3)),
    "group norm": (lambda: nn.GroupNorm(3, epsilon=1e-3), IMAGE),
    "instance norm": (lambda: nn.InstanceNorm(in_channels=6), IMAGE),
    "embedding": (lambda: nn.Embedding(3, 4), VECTORS),
    "gelu layer": (lambda: nn.GELU(), IMAGE),
    "selu layer": (lambda: nn.SELU(), IMAGE),
    "swish layer": (lambda: nn.Swish(), IMAGE),
    "bilinear weight": (lambda: Weighted((6, 1, 4, 4), lambda F, x, w: F.UpSampling(
        x, w, scale=2, sample_type="bilinear", num_filter=6, num_args=2)), IMAGE),
    "computed parameters": (lambda: Weighted((2, 3), lambda F, x, w: F.broadcast_mul(
        x, (w.reshape(-1) * 2 + F.arange(6)).reshape((1, 6, 1, 1)))), IMAGE),
    **{f"recurrent layer {mode}": (lambda kind=kind, more=more: kind(
           4, 2, layout="NTC", input_size=6, dropout=0.5, **more), VECTORS)
       for mode, kind, more in (("lstm", rnn.LSTM, {}), ("gru", rnn.GRU, {}),
                                ("tanh", rnn.RNN, {"activation": "tanh"}),
                                ("relu", rnn.RNN, {"activation": "relu"}))},
    "recurrent layer in both directions": (
        lambda: rnn.GRU(4, 2, bidirectional=True, input_size=6), VECTORS),
    "boxes": (lambda: Lambda(lambda F, x: F.contrib.box_nms(
        some_boxes(F, x), overlap_thresh=0.2, topk=20, id_index=0, valid_thresh=0.1)), (2, 30, 6)),
    "boxes of all classes": (lambda: Lambda(lambda F, x: F.contrib.box_nms(
        some_boxes(F, x), overlap_thresh=0.1, id_index=0, background_id=1, force_suppress=True)),
        (2, 30, 6)),
    "boxes without classes": (lambda: Lambda(lambda F, x: F.contrib.box_nms(
        some_boxes(F, x), in_format="center", out_format="center", overlap_thresh=0.3)),
        (2, 30, 6)),
    **{f"decoded boxes by {form}": (lambda more=more: Weighted((1, 5, 4), lambda F, x, anchors:
        F.contrib.box_decode(*F.amp_multicast(x.slice_axis(axis=2, begin=0, end=4), anchors,
                             num_outputs=2), std0=0.1, std1=0.2, std2=0.3, std3=0.4, **more)),
        VECTORS) for form, more in (("center", {"format": "center"}),
                                    ("corner", {"format": "corner", "clip": 0.2}))},
    **{f"parts of boxes, {name}": (lambda more=more: Weighted((5, 4), lambda F, x, w:
        F.contrib.ROIAlign(x, boxes_at(F, w), pooled_size=(3, 2), spatial_scale=0.7, **more)),
        IMAGE) for name, more in (("two samples", {"sample_ratio": 2}), ("as many as fit", {}),
                                  ("aligned", {"sample_ratio": 3, "aligned": True}))},
    "cells": (lambda: Unrolled(lambda: rnn.LSTMCell(4, input_size=6)), VECTORS),
}  # fmt: skip

CASES = {
    **NUMPY_CASES,
    **{name: (lambda f=f: Lambda(f), IMAGE) for name, f in FUNCTIONS.items()},
    **LAYERS,
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
@pytest.mark.parametrize("names", [("logits", "weight"), ("dense", "logits")])
def test_an_operator_or_parameter_may_have_the_name_of_the_result(names):
    data, weight, images = mx.sym.var("data"), mx.sym.var(names[1]), some_images(*VECTOR)
    logits = mx.sym.relu(mx.sym.FullyConnected(data, weight, num_hidden=3, name=names[0]))
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
            written |= {node.operator for node in fold_constants(record(net)).graph.nodes}
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
    "an unknown operator": (lambda F, x: F.gamma(x), r"\(gamma\)"),
    "an unknown operator before others": (lambda F, x: F.relu(F.expm1(x) + x),
        r"expm10 \(expm1\); wri"),
    "several of them": (lambda F, x: F.gamma(F.rint(x)), r"\(rint\); .*\(gamma\)"),
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
    "softmax of lengths": (lambda F, x: F.softmax(
        x, F.cast(x.mean(axis=3), "int32"), use_length=True), "a length"),
    "another activation": (lambda F, x: F.LeakyReLU(x, act_type="rrelu"), "act_type='rrelu'"),
    "a mask of the largest": (lambda F, x: F.topk(x, ret_typ="mask"),
        "ret_typ='mask', k=1"),
    "a flat argmax": (lambda F, x: F.argmax(x), "it names no axis"),
    "flat largest elements": (lambda F, x: F.topk(x, k=2, axis=None), "it sorts over all axes"),
    "a flat running sum": (lambda F, x: F.cumsum(x), "it sums over all axes"),
    "a flat order": (lambda F, x: F.argsort(x, axis=None), "it sorts over all axes"),
    "a repetition of an open size": (lambda F, x: F.repeat(x.transpose(), 2, axis=2),
        "axis 3 is open"),
    "an index in an open axis": (lambda F, x: F.take(x, x, axis=0), "axis 0 is open"),
    "an index that must exist": (lambda F, x: F.take(x, x, axis=1, mode="raise"), "mode='raise'"),
    "a pick that turns around": (lambda F, x: F.pick(x, x.mean(1), axis=1, mode="wrap"),
        "not clip"),
    "a part of a shape": (lambda F, x: F.broadcast_like(x.mean(1, keepdims=True), x, lhs_axes=(1,),
        rhs_axes=(1,)), "it names axes"),
    "repeated numbers": (lambda F, x: F.contrib.arange_like(x, axis=1, repeat=2), "are repeated"),
    "parts of boxes by channel": (lambda F, x: F.contrib.ROIAlign(x, F.ones((1, 5)), (1, 1), 1,
        position_sensitive=True), "position_sensitive"),
    "a remainder": (lambda F, x: F.broadcast_mod(x, x), "not integers"),
    "a running sum of integers": (lambda F, x: F.cumsum(x, axis=1, dtype="int32"), "dtype=int32"),
    **{f"{name} of integers": (lambda F, x, f=f: f(F, F.cast(x, "int32")), message)
       for name, f, message in (
        ("a half", lambda _, x: x / 2, "it computes in int32; cast its operands to float32"),
        ("a power", lambda _, x: x**2, "it computes in int32"),
        ("a root", lambda F, x: F.sqrt(x), "it computes in int32"),
        ("a mean", lambda F, x: F.mean(x, axis=1), "it computes in int32"),
        ("a product with a fraction", lambda _, x: x * 0.5, "scalar=0.5 among integers"),
        ("a comparison with a fraction", lambda _, x: x < 0.5, "scalar=0.5 among integers"),
        ("a clip", lambda F, x: F.clip(x, 0, 1.5), "a_max=1.5 among integers"),
        ("a maximum", lambda F, x: F.maximum(x, 1.5), "scalar=1.5 among integers"))},
    "fractions of integers": (lambda F, x: F.one_hot(x, 4, on_value=1.5, dtype="int32"),
        "on_value=1.5 among integers"),
    "a sum of bytes": (lambda F, x: F.cast(x, "uint8") + F.cast(x, "uint8"), "computes in uint8"),
    "mx.np: a sum of bytes": (lambda _, x: x.astype("int8").sum(axis=1), "it computes in int8"),
    "mx.np: a sum of truth values": (lambda _, x: x.astype("bool") + x.astype("bool"), "in bool"),
    "upsampling of two": (lambda F, x: F.UpSampling(
        x, x, scale=2, sample_type="nearest", num_args=2), "several operands"),
    "resizing to an open size": (lambda F, x: F.contrib.BilinearResize2D(
        x, x.transpose((1, 2, 0, 3)), mode="like"), "its size is open"),
    "boxes of more axes": (lambda F, x: F.contrib.box_nms(x), "4 axes, not 3"),
    "boxes in two formats": (lambda F, x: F.contrib.box_nms(x.mean(axis=1), out_format="center"),
        "it changes the format"),
    "a layer with a projection": (lambda: in_sequence(
        nn.HybridLambda(lambda F, x: F.max(x, axis=1)),
        rnn.LSTM(4, projection_size=2, input_size=9)), "projection_size"),
    "a layer with computed parameters": (lambda: Weighted((4 * (9 + 4 + 2),), lambda F, x, w: F.RNN(
        x.mean(axis=1), F.broadcast_mul(w, x.max()), F.zeros((1, 9, 4)), mode="rnn_tanh",
        state_size=4, num_layers=1)), "its parameters are computed"),
    "a layer with a computed slope": (lambda: Weighted((6,), lambda F, x, w: F.LeakyReLU(
        x, F.broadcast_mul(w, x.max()), act_type="prelu")), "its slope is computed"),
    "several open sizes": (lambda F, x: F.batch_dot(*2 * [F.concat(x, x, dim=0).reshape(
        (-1, 81, 6)).transpose((1, 0, 2))], transpose_b=True).reshape((0, 0, 0)),
        "several of its sizes are open"),
    "a layer of a target shape": (lambda: Weighted((6, 4, 3, 3), lambda F, x, w: F.Deconvolution(
            x, w, kernel=(3, 3), num_filter=4, target_shape=(11, 11))), "a target_shape"),
    "a reshape that fixes the batch": (lambda _, x: x.reshape((2, -1)), "size of the batch"),
    "mx.np: an unknown operator": (lambda F, x: F.np.expm1(x), r"\(_npi_expm1\)"),
    "mx.np: a reshape that fixes the batch": (lambda _, x: x.reshape(2, -1), "size of the batch"),
    "mx.np: a reshape by columns": (lambda F, x: F.np.reshape(x, (-1, 3), order="F"), "order='F'"),
    "mx.np: a concatenation of all": (lambda F, x: F.np.concatenate([x], axis=None), "axis=None"),
    "mx.np: a product with many axes": (lambda F, x: F.np.dot(x, x), "of 4 and 4 axes"),
    "a product of transposed": (lambda F, x: F.dot(
        x.mean(axis=1), x.mean(axis=(1, 2)), transpose_a=True), "a transposed operand of 3 axes"),
    "mx.np: a sum in another format": (lambda F, x: F.np.sum(x, axis=1, dtype="float64"),
        "dtype=float64"),
    "a layer of another layout": (lambda: nn.Conv2D(4, 3, layout="NHWC", in_channels=9),
        "its layout is not NCHW"),
    "a layer of another axis": (lambda: nn.BatchNorm(axis=2, in_channels=9), "its axis is 2"),
    "a layer whose statistics are a result": (lambda: Weighted((9,), lambda F, x, w: F.LayerNorm(
        x, w, w, output_mean_var=True)[1]), "its statistics are used"),
    "a layer norm of another axis": (lambda: nn.LayerNorm(1, in_channels=6), "its axis is 1"),
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


def test_a_network_of_one_size_of_the_batch_is_written_for_given_shapes_alone(tmp_path, caplog):
    net = Lambda(lambda _, x: x.reshape((2, -1)))
    path = export_onnx(net, tmp_path / "net.onnx", input_shapes=[IMAGE])
    (shape,) = (one.type.tensor_type.shape for one in onnx.load_model(path).graph.input)
    assert [size.dim_value for size in shape.dim] == list(IMAGE)
    assert "takes the given shapes alone" in caplog.text
    assert "(Reshape: shape=(2, -1) fixes the size of the batch" in caplog.text
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    images = some_images(*IMAGE)
    (result,) = session.run(None, {"data": images.asnumpy()})
    assert result.tobytes() == net(images).asnumpy().tobytes()
