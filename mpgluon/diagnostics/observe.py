"""Watching a network compute one batch, array by array, without leaving a trace in it.

Everything else in this folder that looks into a network does so through :func:`observed_batch`. It
runs imperatively, also where the network is hybridized: the same operators on the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Callable, Optional, Union

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import autograd, gluon
from mxnet.ndarray import NDArray

from mpgluon.cast.arrays import arrays_in, convert_arrays, mark
from mpgluon.cast.block import blocks_of
from mpgluon.cast.forward import forward_of, is_hybrid
from mpgluon.cast.stand_in import OperatorNamespace
from mpgluon.errors import PrecisionError
from mpgluon.numerics.dtypes import cast, dtype_name

__all__ = [
    "Batch",
    "Call",
    "Observer",
    "Seen",
    "imperative",
    "observed_batch",
    "observing",
    "untouched",
    "values_of",
]

LossFunction = Callable[[Any, Any], NDArray]


@dataclass(frozen=True)
class Batch:
    """What a network is run on.

    Attributes
    ----------
    inputs : NDArray or tuple of NDArray
        The arguments of the network.
    labels : any
        The second argument of ``loss_fn``.
    loss_fn : callable
        Takes the network's result and ``labels``; returns a loss of any shape, which is summed.
    """

    inputs: Union[NDArray, tuple[NDArray, ...]]
    labels: Any
    loss_fn: LossFunction

    @property
    def arguments(self) -> tuple[NDArray, ...]:
        """The inputs as a tuple."""
        return self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)


class Call:
    """One call of a block: what went in, and what the block made of it itself.

    A block makes what it hands on, to a block that it calls or as its result, and has neither
    received nor been given by a block that it called. A mere container makes nothing.

    Parameters
    ----------
    block : gluon.Block
    arguments : tuple
        What the block was called with, as it was nested.
    keywords : mapping
        Its parameters' arrays.

    Attributes
    ----------
    returned : list of (gluon.Block, any)
        What the blocks that it called returned, in order.
    handed_on : list of (NDArray, bool)
        Every array that it handed on, in order, and whether it made it.
    """

    def __init__(
        self, block: gluon.Block, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> None:
        self.block, self.arguments, self.keywords = block, arguments, keywords
        self.returned: list[tuple[gluon.Block, Any]] = []
        self.handed_on: list[tuple[NDArray, bool]] = []
        self._given = arrays_in([*arguments, *keywords.values()])

    def made(self, array: NDArray) -> bool:
        """Whether the block made this array."""
        return not any(array is given for given in self._given)

    def hand_on(self, value: Any) -> list[NDArray]:
        """Note what is handed on; return what of it the block made and had not handed on yet."""
        before = [array for array, _ in self.handed_on]
        arrays = arrays_in(value)
        self.handed_on += [(array, self.made(array)) for array in arrays]
        return [a for a in arrays if self.made(a) and not any(a is known for known in before)]

    def receive(self, block: gluon.Block, result: Any) -> None:
        """Note what a block that it called returned."""
        self.returned.append((block, result))
        self._given += arrays_in(result)


@dataclass(frozen=True)
class Seen:
    """One array on its way through a network.

    Attributes
    ----------
    block : gluon.Block
        The innermost block at work.
    kind : {"operator", "handed on", "output", "output gradient", "gradient"}
        What an operator returned, what the block made and gave to a block that it calls, what the
        block returned, the gradient of that, or the gradient of a parameter of the block's own.
    operator : str
        As the block called it, such as ``"FullyConnected"``; for a gradient, the parameter's name;
        empty for the block's own result.
    array : NDArray
        Valid during the call of the observer; copy what is to be kept.
    inputs : tuple of NDArray
        Of the operator or block; empty for gradients.
    place : int
        Which of the arrays that a block returned.
    made : bool
        Whether the block made what it returned, and no block in it did.
    call : Call, optional
        Of the block, where ``kind`` is ``"output"``.
    """

    block: gluon.Block
    kind: str
    operator: str
    array: NDArray
    inputs: tuple[NDArray, ...] = ()
    place: int = 0
    made: bool = True
    call: Optional[Call] = None


Observer = Callable[[Seen], None]


def observed_batch(
    net: gluon.Block,
    batch: Batch,
    observer: Observer,
    *,
    loss_scale: float = 1.0,
    operators: bool = False,
    handed_on: bool = False,
) -> dict[gluon.Parameter, NDArray]:
    """Run a batch forward and backward as in training, and return the parameters' gradients.

    Afterwards weights, gradients and running statistics are as before. Random numbers are drawn:
    a dropout mask is another one each time.

    Parameters
    ----------
    net : gluon.Block
        With initialized parameters; plain, cast or autocast.
    batch : Batch
        On one device.
    observer : callable
        Is handed every :class:`Seen` in the order of computation.
    loss_scale : float
        Multiplies the loss; the gradients are that much larger.
    operators : bool
        Whether to observe what each operator returns, and not only what each block does.
    handed_on : bool
        Whether to observe what a block makes and gives to a block that it calls.

    Returns
    -------
    dict from Parameter to NDArray
        Copies, on the device of the batch, times ``loss_scale``; of the parameters that it used.

    Raises
    ------
    PrecisionError
        If the loss is float16: scaling it would overflow.
    """
    context = batch.arguments[0].context
    taps: list[_Tap] = []
    watching = observing(net, observer, operators=operators, handed_on=handed_on, taps=taps)
    with untouched(net), watching:
        trained = [p for p in net.collect_params().values() if p.grad_req != "null"]
        for parameter in trained:
            parameter.data(context)._fresh_grad = False
            if parameter.grad_req == "add":
                parameter.zero_grad()
        with autograd.record():
            loss = batch.loss_fn(net(*batch.arguments), batch.labels)
            if dtype_name(loss) == "float16":
                raise PrecisionError(
                    "the loss is float16, in which the scaled loss overflows above 65504; cast "
                    "the network's output before the loss: loss_fn(net(x).astype('float32'), y)"
                )
            scaled = loss * loss_scale
        scaled.backward()
        used = [parameter for parameter in trained if parameter.data(context)._fresh_grad]
        gradients = {parameter: parameter.grad(context).copy() for parameter in used}
        shown: set[gluon.Parameter] = set()
        for tap in reversed(taps):
            observer(Seen(tap.block, "output gradient", "", tap.zeros.grad, made=tap.made))
            for parameter in tap.block._reg_params.values():
                if parameter in gradients and parameter not in shown:
                    shown.add(parameter)
                    seen = Seen(tap.block, "gradient", parameter.name, gradients[parameter])
                    observer(seen)
        return gradients


@contextmanager
def untouched(net: gluon.Block) -> Iterator[None]:
    """Put gradients and running statistics back after the block of code."""
    mx.nd.waitall()  # a static graph's running statistics can be read before they are written
    saved: list[tuple[NDArray, NDArray, Any]] = []
    for parameter in net.collect_params().values():
        if parameter.grad_req == "null":
            saved += [(array, array.copy(), None) for array in parameter.list_data()]
        else:
            pairs = zip(parameter.list_data(), parameter.list_grad())
            saved += [(grad, grad.copy(), (data, data._fresh_grad)) for data, grad in pairs]
    try:
        yield
    finally:
        for array, copy, freshness in saved:
            copy.copyto(array)
            if freshness is not None:
                data, data._fresh_grad = freshness[0], freshness[1]
        mx.nd.waitall()


@contextmanager
def imperative(net: gluon.Block) -> Iterator[None]:
    """Let a hybridized network compute operator by operator; its graphs stay for later."""
    active = [b for b in blocks_of(net) if isinstance(b, gluon.HybridBlock) and b._active]
    for block in active:
        block._active = False
    try:
        yield
    finally:
        for block in active:
            block._active = True


@dataclass(frozen=True)
class _Tap:
    """Zeros that were added to what a block returned: their gradient is that of the result."""

    block: gluon.Block
    zeros: NDArray
    made: bool


@contextmanager
def observing(
    net: gluon.Block,
    observer: Observer,
    *,
    operators: bool = False,
    handed_on: bool = False,
    taps: Optional[list[_Tap]] = None,
) -> Iterator[None]:
    """Hand every array that the blocks of a network return to ``observer``, forward only.

    Parameters
    ----------
    operators : bool
        Also what each operator returns.
    handed_on : bool
        Also what a block makes and gives to a block that it calls.
    taps : list, optional
        Receives, while MXNet records, where gradients can be read after ``backward``.
    """
    calls: list[Call] = []  # of the blocks at work, the innermost last
    note = observer if handed_on else lambda _: None
    with ExitStack() as stack:
        stack.enter_context(imperative(net))
        for block in blocks_of(net):
            stack.enter_context(_calls_observed(block, note, calls))
            stack.enter_context(_observed(block, observer, operators, calls, taps))
        yield


@contextmanager
def _calls_observed(block: gluon.Block, observer: Observer, calls: list[Call]) -> Iterator[None]:
    """Let the block that calls this one know what passes between them."""
    # MXNet's recurrent layers add their first states in a __call__ of their own.
    count = None if type(block).__call__ is gluon.Block.__call__ else 1

    def note_arguments(_: gluon.Block, arguments: tuple[Any, ...]) -> None:
        if calls:
            for array in calls[-1].hand_on(arguments[:count]):
                observer(Seen(calls[-1].block, "handed on", "", array))

    def note_result(_: gluon.Block, __: tuple[Any, ...], result: Any) -> None:
        if calls:
            calls[-1].receive(block, result)

    before = block.register_forward_pre_hook(note_arguments)
    with before, block.register_forward_hook(note_result):
        yield


@contextmanager
def _observed(
    block: gluon.Block,
    observer: Observer,
    operators: bool,
    calls: list[Call],
    taps: Optional[list[_Tap]],
) -> Iterator[None]:
    forward = forward_of(block)
    # Inside its cast, if it has one: there, arrays are what the operators left.
    owner, name = (block, _method_of(block)) if forward is None else (forward, "original")
    original = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        inputs = args
        if is_hybrid(block):
            namespace, inputs = args[0], args[1:]
            args = (_Spy(namespace, block, observer) if operators else namespace, *inputs)
        call = Call(block, inputs, kwargs)
        calls.append(call)
        try:
            result = original(*args, **kwargs)
        finally:
            calls.pop()
        call.hand_on(result)
        arrays = tuple(arrays_in(inputs))
        for place, array in enumerate(arrays_in(result)):
            made = call.made(array)
            observer(Seen(block, "output", "", array, arrays, place, made, call))
        if taps is None or not autograd.is_recording():
            return result
        return convert_arrays(result, lambda a: _tapped(a, block, call.made(a), taps))

    setattr(owner, name, watched)
    try:
        yield
    finally:
        if forward is None:
            delattr(block, name)
        else:
            forward.original = original


def _method_of(block: gluon.Block) -> str:
    return "hybrid_forward" if is_hybrid(block) else "forward"


def _tapped(array: NDArray, block: gluon.Block, made: bool, taps: list[_Tap]) -> NDArray:
    zeros = mx.nd.zeros_like(array)
    zeros.attach_grad()
    taps.append(_Tap(block, zeros, made))
    return mark(mx.nd.elemwise_add(array, zeros), None)


class _Spy(OperatorNamespace):
    """An ``F`` that shows what its operators return."""

    def __init__(
        self, wrapped: Any, block: gluon.Block, observer: Observer, prefix: str = ""
    ) -> None:
        self.module = wrapped.module if isinstance(wrapped, OperatorNamespace) else wrapped
        self._wrapped, self._block, self._observer = wrapped, block, observer
        self._prefix = prefix

    # Gluon's HybridLambda looks its operator up in a dict with F as the key.
    def __hash__(self) -> int:
        return hash(self._wrapped)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._wrapped

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wrapped, name)
        if isinstance(found, (ModuleType, OperatorNamespace)):
            return _Spy(found, self._block, self._observer, f"{self._prefix}{name}.")
        if not callable(found) or isinstance(found, type):
            return found

        def operator(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            inputs = tuple(arrays_in([*args, *kwargs.values()]))
            for array in arrays_in(result):
                self._observer(Seen(self._block, "operator", self._prefix + name, array, inputs))
            return result

        return operator


def values_of(array: NDArray) -> npt.NDArray[np.float32]:
    """Return an array's values in FP32, of a sparse one the stored rows; waits for the device."""
    dense = array.data if array.stype == "row_sparse" else array
    values: npt.NDArray[np.float32] = cast(dense, "float32").asnumpy()
    return values
