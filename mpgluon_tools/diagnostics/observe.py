"""Observing a network while it computes one batch, array by array, and leaving it as it was.

Every other module of this folder that looks into a network does so through :func:`observed_batch`.
A hybridized network is observed in an imperative run: the same operators on the same numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any, Callable, Optional, Union

from mpgluon.base.blocks import blocks_of, empty_gradient, require_values
from mpgluon.cast.arrays import arrays_in, convert_arrays, format_of, mark
from mpgluon.cast.calls import OperatorCall, at_work, ungoverned
from mpgluon.cast.dispatch import PLAIN_OPERATORS, governed
from mpgluon.cast.forward import forward_of
from mpgluon.cast.numpy_arrays import as_nd, in_current_interface
from mpgluon.cast.plan import is_hybrid
from mpgluon.cast.stand_in import OperatorNamespace
from mpgluon.cast.status_flags import muted_run
from mpgluon.errors import PrecisionError
from mpgluon.kernels.dtypes import cast, dtype_name
from mpgluon_tools.diagnostics.temporarily import temporarily, untouched

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import autograd, gluon
from mxnet.ndarray import NDArray

__all__ = [
    "Batch",
    "BlockCall",
    "Observer",
    "Seen",
    "complete",
    "observed_batch",
    "observing",
    "takes_operators",
    "values_of",
]

LossFunction = Callable[[Any, Any], NDArray]


@dataclass(frozen=True)
class Batch:
    """The inputs and labels that a network is run on, and its loss.

    Attributes
    ----------
    inputs : NDArray or tuple
        The arguments of the network, of which at least one is an array or has one.
    labels : any
        The second argument of ``loss_fn``.
    loss_fn : callable
        Takes the network's result and ``labels``; returns a loss of any shape, which is summed.

    Raises
    ------
    TypeError
        If the inputs are of another kind, or ``loss_fn`` cannot be called.
    """

    inputs: Union[NDArray, tuple[NDArray, ...]]
    labels: Any
    loss_fn: LossFunction

    def __post_init__(self) -> None:
        if not isinstance(self.inputs, (NDArray, tuple)) or not arrays_in(self.inputs):
            raise TypeError(
                "a Batch has NDArrays as its inputs, mx.nd.array(images), received "
                f"{type(self.inputs).__name__}; several arguments are a tuple, (x, y)"
            )
        if not callable(self.loss_fn):
            raise TypeError(
                "a Batch is Batch(inputs, labels, loss_fn), with a loss such as "
                "gluon.loss.SoftmaxCrossEntropyLoss(); received as loss_fn "
                f"{type(self.loss_fn).__name__}"
            )

    @property
    def arguments(self) -> tuple[NDArray, ...]:
        """The inputs as a tuple."""
        return self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)


class BlockCall:
    """One call of a block: its operands, and which arrays the block computed itself.

    A block computed an array itself if it passes it to an inner block, or returns it, and did not
    receive it, neither as an operand nor from an inner block. A mere container computes nothing.

    Attributes
    ----------
    arguments : tuple
        As the block received them, nested or not.
    keywords : mapping
        The arrays of its parameters.
    returned : list of (gluon.Block, any)
        The results of the inner blocks, in order.
    handed_on : list of (NDArray, bool)
        Each array that it passed on or returned, in order, and whether it computed it itself.
    """

    def __init__(
        self, block: gluon.Block, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> None:
        self.block, self.arguments, self.keywords = block, arguments, keywords
        self.returned: list[tuple[gluon.Block, Any]] = []
        self.handed_on: list[tuple[NDArray, bool]] = []
        self._received = arrays_in([*arguments, *keywords.values()])

    def made(self, array: NDArray) -> bool:
        """Whether the block computed this array itself."""
        return not any(array is received for received in self._received)

    def hand_on(self, value: Any) -> list[NDArray]:
        """Record arrays that leave the block; return its own that leave it for the first time."""
        before = [array for array, _ in self.handed_on]
        arrays = arrays_in(value)
        self.handed_on += [(array, self.made(array)) for array in arrays]
        return [a for a in arrays if self.made(a) and not any(a is one for one in before)]

    def receive(self, block: gluon.Block, result: Any) -> None:
        """Record the result of an inner block."""
        self.returned.append((block, result))
        self._received += arrays_in(result)


@dataclass(frozen=True)
class Seen:
    """One array, as an observer receives it: one of ``mx.nd``, whatever the network computes with.

    Attributes
    ----------
    block : gluon.Block
        The innermost block at work.
    kind : {"operator", "handed on", "output", "output gradient", "gradient"}
        The result of an operator, an array that the block computed and passed to an inner block,
        a result of the block, the gradient of a result, or the gradient of a block's parameter.
    operator : str
        As the block called it, such as ``"FullyConnected"``, or the operator that computes
        ``x * y``, ``"broadcast_mul"``, in a cast network; in MXNet's NumPy interface, its name in
        ``F`` (``mx.np.add`` is ``"broadcast_add"``), or else in a graph (``"_np_dot"``); for a
        gradient, the parameter's name; otherwise empty.
    array : NDArray
        Valid during the call of the observer; copy values to keep them.
    inputs : tuple of NDArray
        Operands of the operator or block; empty for gradients.
    place : int
        The position among the results of the block or operator.
    made : bool
        Whether the block computed its result itself, and no inner block did.
    call : BlockCall, optional
        The call of the block, where ``kind`` is ``"output"``.
    onward : NDArray, optional
        The equal array that goes on in its place where gradients are observed.
    """

    block: gluon.Block
    kind: str
    operator: str
    array: NDArray
    inputs: tuple[NDArray, ...] = ()
    place: int = 0
    made: bool = True
    call: Optional[BlockCall] = None
    onward: Optional[NDArray] = None

    def __post_init__(self) -> None:
        for name in ("array", "inputs", "onward"):
            object.__setattr__(self, name, as_nd(getattr(self, name)))


Observer = Callable[[Seen], None]
Tap = Callable[[gluon.Block, NDArray, bool], NDArray]


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
    each call uses another dropout mask. Shapes that are not known yet are taken from the batch.

    Parameters
    ----------
    net : gluon.Block
        Initialized; plain, cast or autocast.
    batch : Batch
        On one device.
    observer : callable
        Receives every :class:`Seen` in the order of computation.
    loss_scale : float
        Multiplies the loss, and so the gradients.
    operators, handed_on : bool
        Whether to observe arrays of these kinds, too.

    Returns
    -------
    dict from Parameter to NDArray
        Copies, on the device of the batch, times ``loss_scale``; of the parameters that it used.

    Raises
    ------
    PrecisionError
        If the loss is float16: scaling it would overflow.
    """
    complete(net, batch)
    context = batch.arguments[0].ctx
    taps: list[Seen] = []

    def tap(block: gluon.Block, array: NDArray, made: bool) -> NDArray:
        zeros = mx.nd.zeros_like(array)  # which have the gradient of the sum
        zeros.attach_grad()
        taps.append(Seen(block, "output gradient", "", zeros, made=made))
        return mx.nd.elemwise_add(array, zeros)

    watching = observing(net, observer, operators=operators, handed_on=handed_on, tap=tap)
    with untouched(net), watching:
        trained = [
            p for p in net.collect_params().values() if p.grad_req != "null" and p._data is not None
        ]
        for parameter in trained:
            parameter.data(context)._fresh_grad = False
            if parameter.grad_req == "add":
                empty_gradient(parameter)
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
        gradients = {p: p.grad(context).as_nd_ndarray().copy() for p in used}
        shown: set[gluon.Parameter] = set()
        for seen in reversed(taps):
            observer(replace(seen, array=seen.array.grad))
            for parameter in seen.block._reg_params.values():
                if parameter in gradients and parameter not in shown:
                    shown.add(parameter)
                    observer(Seen(seen.block, "gradient", parameter.name, gradients[parameter]))
        return gradients


def complete(net: gluon.Block, batch: Batch) -> None:
    """Infer the unknown shapes of a network's parameters by a forward pass on a batch.

    A second pass, as in training, follows if parts that only training uses are left.

    Raises
    ------
    TypeError, ValueError
        If these are not a network and its batch, or the network was not initialized.
    """
    if not isinstance(net, gluon.Block):
        raise TypeError(f"net must be a gluon.Block, received {type(net).__name__}")
    if not isinstance(batch, Batch):
        raise TypeError(
            "batch must be mpgluon.diagnostics.Batch(images, labels, loss_fn), received "
            f"{type(batch).__name__}"
        )
    require_values(net, with_shapes=False)
    if _has_unknown_shapes(net):
        net(*batch.arguments)
    if _has_unknown_shapes(net):
        with untouched(net), autograd.train_mode():
            net(*batch.arguments)


def _has_unknown_shapes(net: gluon.Block) -> bool:
    return any(parameter._deferred_init for parameter in net.collect_params().values())


@contextmanager
def observing(
    net: gluon.Block,
    observer: Observer,
    *,
    operators: bool = False,
    handed_on: bool = False,
    tap: Optional[Tap] = None,
) -> Iterator[None]:
    """Inside the block, show an observer every result of a network's blocks in forward passes.

    While MXNet records, ``tap`` receives each of them, its block and whether the block computed it
    itself; an equal array that it returns goes on in its place.
    """

    def show(seen: Seen) -> None:
        with ungoverned():  # the network at work must not have the observer's operators
            observer(seen)

    watch = _Watch(show, operators, handed_on, tap, muted_run())
    blocks = list(blocks_of(net))
    hybridized = [b for b in blocks if isinstance(b, gluon.HybridBlock) and b._active]
    with ExitStack() as stack:
        stack.enter_context(
            temporarily(hybridized, "_active", False)
        )  # their graphs stay for later
        for block in blocks:
            stack.enter_context(block.register_forward_pre_hook(watch.note_arguments))
            stack.enter_context(block.register_forward_hook(watch.note_result))
            # Inside its cast, if it has one: there, arrays are as the operators returned them.
            method = "hybrid_forward" if is_hybrid(block) else "forward"
            forward = forward_of(block)
            if isinstance(block, gluon.SymbolBlock) and takes_operators(block):
                # A cast graph is compiled, hybridized or not. Here its operators run one by one.
                one_by_one = partial(gluon.HybridBlock.forward, block)
                stack.enter_context(temporarily([block], "forward", one_by_one))
            owner, name = (block, method) if forward is None else (forward, "original")
            watched = partial(watch.call, block, getattr(owner, name))
            stack.enter_context(temporarily([owner], name, watched))
        yield


def takes_operators(block: gluon.Block) -> bool:
    """Whether a block's own method receives an ``F``; an imported graph's does while it is cast."""
    forward = forward_of(block)
    return is_hybrid(block) if forward is None else forward.method == "hybrid_forward"


@dataclass(frozen=True)
class _Watch:
    """Shows an observer the results of the calls of a network's blocks."""

    observer: Observer
    operators: bool
    handed_on: bool
    tap: Optional[Tap]
    run: Optional[object]
    _local: threading.local = field(default_factory=threading.local)

    @property
    def calls(self) -> list[BlockCall]:
        """The calls at work in this thread, the innermost last."""
        calls: list[BlockCall] = vars(self._local).setdefault("calls", [])
        return calls

    def note_arguments(self, inner: gluon.Block, arguments: tuple[Any, ...]) -> None:
        """Record the arguments that a block passes to an inner one."""
        # MXNet's recurrent layers add their first states in a __call__ of their own.
        own = arguments if type(inner).__call__ is gluon.Block.__call__ else arguments[:1]
        for array in self.calls[-1].hand_on(own) if self.calls else ():
            if self.handed_on:
                self.observer(Seen(self.calls[-1].block, "handed on", "", array))

    def note_result(self, inner: gluon.Block, _: tuple[Any, ...], result: Any) -> None:
        """Record the result that a block receives from an inner one."""
        if self.calls:
            self.calls[-1].receive(inner, result)

    def note_operator(self, block: gluon.Block, call: OperatorCall, result: Any) -> None:
        """Show the result of an operator that is not called through ``F``, such as ``*``."""
        if self.operators:
            inputs = tuple(arrays_in([*call.args, *call.kwargs.values()]))
            for place, array in enumerate(arrays_in(result)):
                self.observer(Seen(block, "operator", call.name, array, inputs, place))

    def call(
        self, block: gluon.Block, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call a block's own forward method, and show its results."""
        if muted_run() is not self.run:  # of another diagnosis, while this one waits for a step
            return original(*args, **kwargs)
        inputs, in_numpy = args, mx.util.is_np_array()
        if takes_operators(block):
            namespace, inputs = args[0], args[1:]
            spies = self.operators and not in_numpy  # there, the operators themselves tell
            args = (_Spy(namespace, block, self.observer) if spies else namespace, *inputs)
        call = BlockCall(block, inputs, kwargs)
        self.calls.append(call)
        try:
            with ExitStack() as stack:
                stack.enter_context(at_work(observer=partial(self.note_operator, block)))
                if in_numpy and self.operators and forward_of(block) is None:
                    stack.enter_context(governed(arithmetic=PLAIN_OPERATORS))
                result = original(*args, **kwargs)
        finally:
            self.calls.pop()
        call.hand_on(result)
        tap = self.tap

        def tapped(array: NDArray) -> NDArray:
            assert tap is not None
            if dtype_name(array) == "bool":  # which MXNet does not add, and has no gradient
                return array
            made, array = call.made(array), as_nd(array)
            with ungoverned():
                onward = mark(tap(block, array, made), format_of(array))
            return in_current_interface(onward)

        is_tapped = tap is not None and autograd.is_recording()
        returned = convert_arrays(result, tapped) if is_tapped else result
        arrays = tuple(arrays_in(inputs))
        for place, (array, onward) in enumerate(zip(arrays_in(result), arrays_in(returned))):
            made = call.made(array)
            self.observer(Seen(block, "output", "", array, arrays, place, made, call, onward))
        return returned


class _Spy(OperatorNamespace):
    """An ``F`` that shows an observer the results of its operators."""

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
        attribute = getattr(self._wrapped, name)
        if isinstance(attribute, (ModuleType, OperatorNamespace)):
            return _Spy(attribute, self._block, self._observer, f"{self._prefix}{name}.")
        if not callable(attribute) or isinstance(attribute, type):
            return attribute

        def operator(*args: Any, **kwargs: Any) -> Any:
            result = attribute(*args, **kwargs)
            inputs = tuple(arrays_in([*args, *kwargs.values()]))
            called = self._prefix + name
            for place, array in enumerate(arrays_in(result)):
                self._observer(Seen(self._block, "operator", called, array, inputs, place))
            return result

        return operator


def values_of(array: NDArray) -> npt.NDArray[np.float32]:
    """Return an array's values in FP32, of a sparse one the stored rows; waits for the device."""
    dense = array.data if array.stype == "row_sparse" else array.as_nd_ndarray()
    values: npt.NDArray[np.float32] = cast(dense, "float32").asnumpy()
    return values
