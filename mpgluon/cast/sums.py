"""Sums in a graph of MXNet's NumPy interface whose operands have one shape, and its stacks.

``x + y`` broadcasts there. Where both have one shape, as in a residual network, an operator that
does not broadcast takes its place: that is faster, and has native ones. ``hstack`` and its like
join on an axis that depends on the number of axes. The shapes are those for which the graph was
traced; others are compared before the graph computes with them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Optional

from mpgluon.kernels.dtypes import Array

import mxnet as mx
from mxnet.symbol import Symbol

__all__ = ["SumsOfOneShape"]

Shapes = tuple[tuple[int, ...], ...]


class SumsOfOneShape:
    """The pairs of operands in one graph.

    Attributes
    ----------
    names : list of str
        Names of the graph's inputs.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._pairs: list[tuple[Symbol, Symbol]] = []
        self._shapes: Shapes = ()
        self._fitting: set[Shapes] = set()
        self._may_note = True
        self._needs_axes = False

    def begin(self, inputs: Sequence[Array]) -> None:
        """Discard the pairs: a graph is traced, for inputs of these shapes."""
        self._shapes = _shapes(inputs)
        self._pairs, self._fitting, self._needs_axes = [], {self._shapes}, False

    def note(self, one: Symbol, other: Symbol) -> bool:
        """Whether two symbols have one shape; if so, the graph depends on it from now on."""
        pair = one.as_nd_ndarray(), other.as_nd_ndarray()
        if not self._may_note or not self._have_one_shape(pair, self._shapes):
            return False
        self._pairs.append(pair)
        return True

    def axes(self, symbol: Symbol) -> int:
        """Return how many axes a value has, 0 if unknown; inputs may no longer change theirs."""
        self._needs_axes = True
        return len(self._inferred([symbol.as_nd_ndarray()], self._shapes)[0] or ())

    def fit(self, inputs: Sequence[Array]) -> bool:
        """Whether the graph computes such inputs; if not, no pair is noted again."""
        if not self._pairs and not self._needs_axes:
            return True
        shapes = _shapes(inputs)
        if shapes in self._fitting:
            return True
        if self._needs_axes and list(map(len, shapes)) != list(map(len, self._shapes)):
            return False
        self._may_note = all(self._have_one_shape(pair, shapes) for pair in self._pairs)
        if self._may_note:
            self._fitting.add(shapes)
        return self._may_note

    def _have_one_shape(self, pair: tuple[Symbol, Symbol], shapes: Shapes) -> bool:
        one, other = self._inferred(pair, shapes)
        return one == other and one is not None and all(size > 0 for size in one) and one != ()

    def _inferred(
        self, symbols: Sequence[Symbol], shapes: Shapes
    ) -> Sequence[Optional[tuple[int, ...]]]:
        given = dict(zip(self.names, shapes))
        group = mx.sym.Group(list(symbols))
        known = {name: given[name] for name in group.list_arguments() if name in given}
        with warnings.catch_warnings():  # MXNet's, about what stays unknown
            warnings.simplefilter("ignore")
            _, results, _ = group.infer_shape_partial(**known)
        return results or [None] * len(symbols)


def _shapes(inputs: Sequence[Array]) -> Shapes:
    return tuple(tuple(one.shape) for one in inputs)
