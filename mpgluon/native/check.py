"""Comparing a compiled library with MXNet, in a process that may fail.

A library that does not fit this MXNet may end the process that loads it; so this one does it first.
"""

from __future__ import annotations

import sys

import mxnet as mx
import numpy as np
from numpy.typing import NDArray

from mpgluon import native

__all__ = ["check"]


def check(path: str) -> None:
    """Load the library and compare each of its operators with MXNet's.

    Raises
    ------
    AssertionError
        If one gives other bits.
    """
    native.load(path)
    values = np.random.RandomState(0).randn(4, 16, 5, 5).astype("float32") * 2.0**12
    values.ravel()[:6] = 65520, 65519, -1e-8, 2.0**-25, np.nan, -np.inf
    single = mx.nd.array(values)
    half = mx.nd.amp_cast(single, dtype="float16")
    _same(native.invoke("_mpgluon_narrow", single), half)
    _same(native.invoke("_mpgluon_widen", half), mx.nd.amp_cast(half, dtype="float32"))
    _same(native.invoke("_mpgluon_round_value", single), mx.nd.amp_cast(half, dtype="float32"))
    other = half.copy()
    other[3, 15, 4, 3:] = 0
    for weight, differences in ((half, 0), (other, 2)):
        assert native.invoke("_mpgluon_count_differences", weight, single) == differences
    _check_graph(values)


def _check_graph(values: NDArray[np.float32]) -> None:
    """Compare a graph with oneDNN's layouts in it, forward and backward."""
    values = np.clip(np.nan_to_num(values / 2.0**12), -8, 8)
    results = []
    for own in (False, True):
        data = mx.sym.var("data")
        out = mx.sym.Convolution(data, kernel=(3, 3), num_filter=16, no_bias=True, name="conv")
        out = mx.sym.BatchNorm(_round(out, own), fix_gamma=False, name="bn|0.001|0.9|0|0")
        out = mx.sym.Activation(_round(out, own), act_type="relu")
        json = out.tojson(remove_amp_cast=False)
        if own:
            json = json.replace('"op": "BatchNorm"', '"op": "_mpgluon_batch_norm"')
        executor = mx.sym.load_json(json).simple_bind(mx.cpu(), data=values.shape)
        executor.arg_dict["data"][:] = values
        executor.arg_dict["conv_weight"][:] = np.random.RandomState(1).randn(16, 16, 3, 3)
        for name, array in executor.arg_dict.items():
            if name.endswith("gamma"):
                array[:] = 1.5
        for _ in range(2):  # the first run asks whether MXNet agrees
            executor.forward(is_train=True)
            executor.backward(executor.outputs[0] * 0.125)
        results.append([*executor.outputs, *executor.grad_arrays, *executor.aux_arrays])
    for one, other in zip(*results):
        _same(one, other)


def _round(symbol: mx.sym.Symbol, own: bool) -> mx.sym.Symbol:
    if not own:
        return mx.sym.amp_cast(mx.sym.amp_cast(symbol, dtype="float16"), dtype="float32")
    marked = mx.sym.identity(symbol, name=f"{symbol.name}_rounded")
    json = marked.tojson(remove_amp_cast=False).replace(
        '"op": "_copy"', '"op": "_mpgluon_round_both"'
    )
    return mx.sym.load_json(json)


def _same(one: mx.nd.NDArray, other: mx.nd.NDArray) -> None:
    np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


if __name__ == "__main__":
    check(sys.argv[1])
