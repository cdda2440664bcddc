"""Comparing a compiled library with MXNet, in a process that may fail.

A library that does not fit this MXNet may end the process that loads it, so this one is the first.
"""

from __future__ import annotations

import sys
from typing import Callable

from mpgluon import kernels
from mpgluon.formats.float_format import BFLOAT16, FLOAT16, round_to

import mxnet as mx
import numpy as np
from mxnet.base import MXNetError
from numpy.typing import NDArray

__all__ = ["check"]

_BFLOAT16 = np.dtype([("bfloat16", np.uint16)])


def check(path: str) -> None:
    """Load the library and compare each of its operators with MXNet's.

    Raises
    ------
    AssertionError
        If one gives other bits.
    """
    kernels.load_library(path)
    values = np.random.RandomState(0).randn(4, 16, 5, 5).astype("float32") * 2.0**12
    values.ravel()[:6] = 65520, 65519, -1e-8, 2.0**-25, np.nan, -np.inf
    single = mx.nd.array(values)
    half = mx.nd.amp_cast(single, dtype="float16")
    _same(kernels.invoke("_mpgluon_narrow_11_5", single), half)
    _same(kernels.invoke("_mpgluon_widen_11_5", half), mx.nd.amp_cast(half, dtype="float32"))
    for fmt in (FLOAT16, BFLOAT16):
        rounded = kernels.invoke(kernels.operator("plain_value", fmt), single)
        np.testing.assert_array_equal(rounded.asnumpy(), round_to(values, fmt))
    other = half.copy()
    other[3, 15, 4, 3:] = 0
    for weight, differences in ((half, 0), (other, 2)):
        assert kernels.invoke("_mpgluon_count_differences", weight, single) == differences
    _check_graph(values)
    _check_bfloat16(single)


def _check_bfloat16(single: mx.nd.NDArray) -> None:
    """Compare the casts to bfloat16 and back, and gradients that are added to."""
    try:
        mx.nd.amp_cast(single, dtype=_BFLOAT16).wait_to_read()
    except MXNetError:
        return  # oneDNN has no bfloat16 on this processor, so no network uses the casts
    results = []
    data = mx.sym.var("data")
    for graph in (_through_bfloat16(data), _natively_through_bfloat16(data)):
        gradient = mx.nd.ones(single.shape) / 3
        executor = graph.bind(mx.cpu(), {"data": single}, {"data": gradient}, grad_req="add")
        for _ in range(2):
            executor.forward(is_train=True)
            executor.backward(single)
        results.append([*executor.outputs, gradient])
    for one, other in zip(*results):
        _same(one, other)


def _through_bfloat16(data: mx.sym.Symbol) -> mx.sym.Symbol:
    rounded = mx.sym.amp_cast(mx.sym.identity(data), dtype=_BFLOAT16)
    return mx.sym.amp_cast(mx.sym.identity(rounded), dtype="float32")


def _natively_through_bfloat16(data: mx.sym.Symbol) -> mx.sym.Symbol:
    json = mx.sym.identity(mx.sym.identity(data)).tojson(remove_amp_cast=False)
    for own in ("_mpgluon_to_bfloat16", "_mpgluon_from_bfloat16"):
        json = json.replace('"op": "_copy"', f'"op": "{own}"', 1)
    return mx.sym.load_json(json)


def _check_graph(values: NDArray[np.float32]) -> None:
    """Compare a graph with oneDNN's layouts and float16 weights in it, forward and backward."""
    values = np.clip(np.nan_to_num(values / 2.0**12), -8, 8).astype("float16")
    weight = np.random.RandomState(1).randn(16, 16, 3, 3).astype("float16")
    results = []
    for graph in (_graph_with_casts(), _own_graph()):
        dtypes = {"data": "float32", "weight": "float16"}
        executor = graph.simple_bind(mx.cpu(), type_dict=dtypes, data=values.shape)
        executor.arg_dict["data"][:] = values
        executor.arg_dict["weight"][:] = mx.nd.array(weight, dtype="float16")
        executor.arg_dict[f"{_NORM}_gamma"][:] = 1.5
        for _ in range(2):  # the first run compares with MXNet
            executor.forward(is_train=True)
            executor.backward(executor.outputs[0] * 0.125)
        results.append([*executor.outputs, *executor.grad_arrays, *executor.aux_arrays])
    for one, other in zip(*results):
        _same(one, other)


_NORM = kernels.node_name("bn", 1e-3, 0.9, 0, 0)


def _graph_with_casts() -> mx.sym.Symbol:
    data, weight = mx.sym.var("data"), mx.sym.var("weight")
    wide = mx.sym.amp_cast(weight, dtype="float32")
    return _layers(_through_float16(data), wide, _through_float16)


def _own_graph() -> mx.sym.Symbol:
    data, weight = mx.sym.identity(mx.sym.var("data")), mx.sym.var("weight")
    graph = mx.sym.identity(_layers(data, weight, lambda symbol: symbol))
    json = graph.tojson(remove_amp_cast=False)
    for of_mxnet, own in (
        ("_copy", "pack"),
        ("Convolution", "convolution"),
        ("BatchNorm", "batch_norm"),
        ("Activation", "relu"),
        ("_copy", "unpack"),
    ):
        json = json.replace(f'"op": "{of_mxnet}"', f'"op": "{kernels.operator(own, FLOAT16)}"', 1)
    return mx.sym.load_json(json)


def _layers(
    data: mx.sym.Symbol, weight: mx.sym.Symbol, rounded: Callable[[mx.sym.Symbol], mx.sym.Symbol]
) -> mx.sym.Symbol:
    out = mx.sym.Convolution(data, weight, kernel=(3, 3), num_filter=16, no_bias=True, name="conv")
    out = mx.sym.BatchNorm(rounded(out), fix_gamma=False, name=_NORM)
    return rounded(mx.sym.Activation(rounded(out), act_type="relu"))


def _through_float16(symbol: mx.sym.Symbol) -> mx.sym.Symbol:
    return mx.sym.amp_cast(mx.sym.amp_cast(symbol, dtype="float16"), dtype="float32")


def _same(one: mx.nd.NDArray, other: mx.nd.NDArray) -> None:
    np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


if __name__ == "__main__":
    try:
        check(sys.argv[1])
    except (OSError, AttributeError) as error:
        sys.exit(f"it cannot be loaded: {error}")
    except (AssertionError, MXNetError) as error:
        sys.exit(f"its results are not MXNet's: {' '.join(str(error).split())[:300]}")
