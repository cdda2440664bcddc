"""One call of an operator, before the formats of its operands are decided."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Callable, NamedTuple, Optional, Union

from mpgluon.cast.arrays import Convert, Format, arrays_in, convert_arrays, format_of, mark, widen
from mpgluon.formats.float_format import FloatFormat
from mpgluon.graph.operators import (
    Rule,
    excluded_operands,
    lost_numbers,
    one_name,
    rule_of,
    sends_zeros,
)
from mpgluon.kernels.dtypes import Array

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.symbol import Symbol

__all__ = [
    "AT_WORK",
    "LOOPS",
    "ROUNDING_RULES",
    "OperatorCall",
    "at_work",
    "each_output",
    "is_inside",
    "rule_here",
    "settled",
    "ungoverned",
]

AT_WORK = threading.local()
"""What :func:`at_work` says of the block whose ``hybrid_forward`` this thread is in."""

# The arguments of a loop that are its body, and the states that it passes from round to round.
LOOPS = {
    "contrib.foreach": ("body", "init_states"),
    "contrib.while_loop": ("func", "loop_vars"),
}
_CASTS = frozenset({"Cast", "cast"})
_NAME_A_FORMAT = _CASTS | {"zeros", "ones", "full"}

ROUNDING_RULES = frozenset({Rule.COMPUTE, Rule.NORMALIZE, Rule.FOLLOW})
"""Rules of operators whose results are rounded, whatever dtype is asked for."""

_NO_OPTIONS: Mapping[str, Any] = {}


@contextmanager
def at_work(**about: Any) -> Iterator[None]:
    """Temporarily set attributes of :data:`AT_WORK` that describe a block.

    Parameters
    ----------
    rules : mapping from the ``one_name`` of an operator to Rule
        Those that precede the table's, in this block but not in its children.
    histories : iterator
        As ``ScaleHistories.in_turn`` returns, for the products of a block with delayed scaling.
    input_formats : dict from name to Format
        The inputs of the graph that is being traced.
    arithmetic : Arithmetic, optional
        For operators that are called by name, in :mod:`mpgluon.cast.dispatch`.
    have_one_shape, axes_of : callable
        Whether two symbols of the NumPy interface have one shape, in the graph that is being
        traced, and how many axes a symbol has there.
    is_inside : bool
        Present while a block of a cast network computes; see :func:`is_inside`.
    observer : callable
        Receives each :class:`OperatorCall` of a Python operator, and its result.
    drops_nothing : bool
        Whether operators that drop values at random drop none of an array's.
    """
    before = dict(vars(AT_WORK))
    vars(AT_WORK).update(about)
    try:
        yield
    finally:
        vars(AT_WORK).clear()
        vars(AT_WORK).update(before)


def is_inside() -> bool:
    """Whether this thread is in the forward pass of a cast network's block."""
    return "is_inside" in vars(AT_WORK)


def ungoverned() -> AbstractContextManager[None]:
    """Return a context in which operators that are called by name are MXNet's own."""
    return at_work(arithmetic=None)


def rule_here(name: str, options: Mapping[str, Any] = _NO_OPTIONS) -> Rule:
    """Return the rule of an operator in the block at work: the user's, else the table's."""
    rules: Optional[Mapping[str, Rule]] = vars(AT_WORK).get("rules")
    return (rules or {}).get(one_name(name)) or rule_of(name, options)


class OperatorCall(NamedTuple):
    """One call of an operator, before the formats are decided; ``name`` as in the table."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: Mapping[str, Any] = _NO_OPTIONS  # that ``function`` has received already

    @property
    def excluded(self) -> frozenset[Union[int, str]]:
        """The operands that the format does not concern, as positions and keywords."""
        return excluded_operands(self.name, self.args, self.kwargs)

    def run(self, convert: Optional[Convert] = None) -> Any:
        """Call the operator, with its operands converted if ``convert`` is given."""
        if convert is not None:
            call = self.converted(convert)
        else:
            self._keep_what_receives_zeros()
            call = self
        return call.function(*call.args, **call.kwargs)

    def converted(self, convert: Convert) -> OperatorCall:
        """Return the call with the operands converted that a format concerns."""
        self._keep_what_receives_zeros()
        skip = self.excluded
        args = tuple(
            arg if i in skip else convert_arrays(arg, convert) for i, arg in enumerate(self.args)
        )
        kwargs = {
            key: arg if key in skip else convert_arrays(arg, convert)
            for key, arg in self.kwargs.items()
        }
        return self._replace(args=args, kwargs=kwargs)

    def _keep_what_receives_zeros(self) -> None:
        """Make MXNet keep the arrays that receive zeros for gradients until the backward pass.

        While it records arrays, MXNet 1.9.1 hands zeros on through a cast as zeros of the shape of
        an array that it has not kept; where these are computed, the process ends. What counts
        shapes is recorded, and lets it keep its operand.
        """
        if not autograd.is_recording():
            return
        operands: Iterable[Any] = (*self.args, *self.kwargs.values())
        if not sends_zeros(self.name):
            if rule_of(self.name) is Rule.NORMALIZE:
                return
            places = self.excluded
            operands = [arg for i, arg in enumerate(self.args) if i in places]
            operands += [arg for key, arg in self.kwargs.items() if key in places]
        for array in arrays_in(list(operands)):
            if not isinstance(array, Symbol):
                mx.nd.shape_array(array.as_nd_ndarray())

    def with_fp32_states(self) -> OperatorCall:
        """Return a loop whose states are FP32 before and after each round of its body.

        MXNet requires one format for all rounds, and the body's results may have another format
        than the first states.
        """
        body_name, states_name = LOOPS[self.name]
        arguments = inspect.signature(self.function).bind(*self.args, **self.kwargs).arguments
        body = arguments[body_name]

        def with_wide_states(*given: Any) -> Any:
            outputs, states = body(*given)
            return outputs, convert_arrays(states, widen)

        arguments[body_name] = with_wide_states
        arguments[states_name] = convert_arrays(arguments[states_name], widen)
        return self._replace(args=(), kwargs=arguments)

    def with_fp32_branches(self) -> OperatorCall:
        """Return a ``contrib.cond`` with results in FP32: MXNet requires one for both branches."""
        arguments = inspect.signature(self.function).bind(*self.args, **self.kwargs).arguments

        def widened(branch: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: convert_arrays(branch(), widen)

        for name in ("then_func", "else_func"):
            arguments[name] = widened(arguments[name])
        return self._replace(args=(), kwargs=arguments)

    def formats(self) -> set[Optional[Format]]:
        """Return the floating formats of the operands; ``None`` among them is an unknown."""
        skip = self.excluded
        args = [arg for i, arg in enumerate(self.args) if i not in skip]
        kwargs = [arg for key, arg in self.kwargs.items() if key not in skip]
        formats = {format_of(array) or _inferred(array) for array in arrays_in(args + kwargs)}
        return {fmt for fmt in formats if not isinstance(fmt, str) or "float" in fmt}

    def loses_number(self, fmt: FloatFormat) -> bool:
        """Whether one of its operands is a number that a format turns into 0 or infinity."""
        options: dict[Any, Any] = {**dict(enumerate(self.args)), **self.kwargs, **self.options}
        return bool(lost_numbers(fmt, self.name, options))

    def all_formats_known(self) -> bool:
        """Whether no operand is a symbol that one of MXNet's own operators has returned."""
        return all(map(format_of, arrays_in([*self.args, *self.kwargs.values()])))

    def requested_format(self) -> Optional[str]:
        """Return the format that a call names for its result, ``None`` where it names none."""
        dtype = self.kwargs.get("dtype") if self.name in _NAME_A_FORMAT else None
        if self.name in _CASTS and len(self.args) > 1:
            dtype = self.args[1]
        return None if dtype in (None, "None") else np.dtype(dtype).name


def each_output(result: Any) -> Any:
    """Return a list for a symbol with several outputs, so that each is cast by itself."""
    return list(result) if isinstance(result, Symbol) and len(result) > 1 else result


def settled(result: Any, fmt: Optional[Format] = None) -> Any:
    """Mark a result: a symbol with the dtype that MXNet infers, if that is certain, else ``fmt``.

    FP32 values are on the grid that ``fmt`` is, or on an unknown one without it.
    """

    def settle(array: Array) -> Array:
        dtype = _inferred(array) if isinstance(array, Symbol) else None
        on_grid = dtype == "float32" and not isinstance(fmt, str)
        return mark(array, fmt if on_grid else dtype or fmt)

    is_mixed = isinstance(result, Symbol) and len(result) > 1 and _inferred(result) is None
    return convert_arrays(each_output(result) if is_mixed else result, settle)


def _inferred(symbol: Symbol) -> Optional[str]:
    """Return the dtype of a symbol that an operator of MXNet's own has returned, if it is certain.

    An array would say it, and an imperative run computes in the format of its arrays.
    """
    inputs: Mapping[str, Optional[Format]] = vars(AT_WORK).get("input_formats", {})
    formats = {name: inputs[name] for name in symbol.list_arguments() if inputs.get(name)}
    dtypes = {name: fmt if isinstance(fmt, str) else "float32" for name, fmt in formats.items()}
    with warnings.catch_warnings():  # MXNet's, about what stays unknown
        warnings.simplefilter("ignore")
        try:
            _, results, _ = symbol.infer_type_partial(**dtypes)
        except mx.MXNetError:  # an index that has no type yet, such as the variable of a loop
            return None
    names = {"" if dtype is None else np.dtype(dtype).name for dtype in results or [None]}
    return None if names & {"", "void16"} or len(names) > 1 else names.pop()
