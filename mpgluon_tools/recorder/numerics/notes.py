"""The tensors of one step while it is recorded: statistics are computed, and none is waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from threading import Lock
from typing import NamedTuple, Optional

from mpgluon import kernels
from mpgluon.cast.arrays import format_of
from mpgluon.cast.numpy_arrays import as_nd
from mpgluon.kernels.dtypes import cast, dtype_name
from mpgluon.kernels.statistics import LENGTH, Statistics, probed, statistics
from mpgluon_tools.diagnostics.observe import Seen
from mpgluon_tools.recorder.numerics.files import KINDS, Tensor, TensorName
from mpgluon_tools.recorder.steps.recorded_network import paths_of

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import gluon
from mxnet.ndarray import NDArray

__all__ = ["StepNotes"]

_FLOATS = ("float32", "float16", "bfloat16")


class _Noted(NamedTuple):
    """One tensor whose statistics are on their way."""

    id: TensorName
    format: str
    shape: tuple[int, ...]
    block: str = ""
    array: Optional[NDArray] = None


class StepNotes:
    """The tensors of a step that is being recorded; its forward passes may be in several threads.

    Parameters
    ----------
    net : gluon.Block
    keeps_arrays : bool
        Whether all values are kept.
    """

    def __init__(self, net: gluon.Block, *, keeps_arrays: bool) -> None:
        self._paths, self._keeps_arrays = paths_of(net), keeps_arrays
        self._noted: list[tuple[list[_Noted], NDArray]] = []  # with their rows of statistics
        self._taps: list[tuple[_Noted, NDArray]] = []  # of activation gradients, forward order
        self._calls: Counter[tuple[str, str]] = Counter()
        self._lock = Lock()  # held while a call is counted

    def note(self, kind: str, named: Iterable[tuple[str, NDArray, str]], block: str = "") -> None:
        """Take the statistics of arrays, each with its name and its format, if that is known."""
        noted, arrays = [], []
        for name, array, fmt in named:
            array = as_nd(array)
            if array.stype != "default":
                array = array.tostype("default")
            fmt = fmt or _format_name(array)
            if dtype_name(array) not in _FLOATS:
                array = array.astype("float32")
            kept = array.copy() if self._keeps_arrays else None
            noted.append(_Noted(self._named(kind, name), fmt, array.shape, block, kept))
            arrays.append(array)
        if arrays:
            self._noted.append((noted, statistics(*arrays)))

    def observe(self, seen: Seen) -> None:
        """Take the statistics of a result that a layer computed itself."""
        is_array = isinstance(seen.array, NDArray)  # not where shapes are inferred
        if seen.kind == "output" and seen.made and is_array:
            path = self._path(seen.block)
            self.note("activation", [(path, seen.array, "")], type(seen.block).__name__)

    def tap(self, block: gluon.Block, array: NDArray, made: bool) -> NDArray:
        """Return a result to pass on, whose gradient's statistics will be taken."""
        if not made or not isinstance(array, NDArray) or array.stype != "default":
            return array
        if dtype_name(array) not in _FLOATS:
            return array
        name = self._named("activation gradient", self._path(block))
        noted = _Noted(name, _format_name(array), array.shape, type(block).__name__)
        native = kernels.available() and array.ctx.device_type == "cpu" and not self._keeps_arrays
        receiver = (
            mx.nd.zeros(LENGTH, ctx=array.ctx, dtype="float64")
            if native
            else mx.nd.zeros_like(array)
        )
        receiver.attach_grad()
        self._taps.append((noted, receiver))
        return probed(array, receiver) if native else mx.nd.elemwise_add(array, receiver)

    def note_activation_gradients(self) -> None:
        """Record the gradients that the taps received, in the order of the backward pass."""
        for noted, receiver in reversed(self._taps):
            gradient = receiver.grad
            is_probe = gradient.dtype == np.float64
            row = gradient.reshape((1, LENGTH)) if is_probe else statistics(gradient)
            kept = gradient.copy() if self._keeps_arrays else None
            self._noted.append(([noted._replace(array=kept)], row))
        self._taps = []

    def tensors(self) -> dict[TensorName, Tensor]:
        """Wait for the statistics, and return the tensors in the order of their kinds."""
        rows = mx.nd.concat(*(rows.as_in_context(mx.cpu()) for _, rows in self._noted), dim=0)
        noted = [one for together, _ in self._noted for one in together]
        tensors = [_tensor(one, row) for one, row in zip(noted, rows.asnumpy())]
        tensors.sort(key=lambda tensor: KINDS.index(tensor.id.kind))
        return {tensor.id: tensor for tensor in tensors}

    def _path(self, block: gluon.Block) -> str:
        """Return the path of a block, or the class of the network itself."""
        return self._paths.get(block, "") or type(block).__name__

    def _named(self, kind: str, name: str) -> TensorName:
        with self._lock:
            call = self._calls[kind, name]
            self._calls[kind, name] += 1
        return TensorName(kind, name, call)


def _tensor(noted: _Noted, row: npt.NDArray[np.float64]) -> Tensor:
    array = None if noted.array is None else cast(noted.array, "float32").asnumpy()
    return Tensor(noted.id, noted.format, noted.shape, Statistics(row), noted.block, array)


def _format_name(array: NDArray) -> str:
    fmt = format_of(array)
    return str(getattr(fmt, "name", fmt))
