"""How much memory a training step takes under each policy, before anything is allocated.

Bytes are counted from shapes and formats alone: parameters, gradients, FP32 masters, the
optimizer's state, and the activations that wait for the backward pass. Not counted: the loss and
its labels, workspaces of convolutions, gradients of activations, arrays that live for one operator
only, and what an allocator rounds up or keeps.

An activation waits for the backward pass if the gradient of some operator reads it, according to
MXNet's gradient functions: a convolution's input and weight, a BatchNorm's input, a ReLU's result.
Of a convolution, its BatchNorm and its ReLU these are the convolution's result and the ReLU's; the
BatchNorm's is freed, or overwritten by the ReLU. A cast leaves a second copy if the gradient
reads it. Of an operator not in the table, inputs and results are counted.

Activations agree with MXNet's storage profiler within 0.3 MiB in most networks; a 16-bit network
may keep more, and workspaces come on top (docs/performance.md). Compare policies by totals, and
leave room.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Callable, Optional, Union

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.symbol import Symbol

from mpgluon import amp, native
from mpgluon.cast.arithmetic import Emulated, policy_arithmetic
from mpgluon.cast.block import blocks_of, cast_block
from mpgluon.cast.forward import forward_of
from mpgluon.cast.fp32 import format_of
from mpgluon.errors import PrecisionError
from mpgluon.graph.description import InputShape, trace, unchanged
from mpgluon.graph.grid import hold_on_grid
from mpgluon.graph.nodes import Entry, Graph, Key, Node
from mpgluon.numerics.formats import FLOAT32
from mpgluon.numerics.policy import Policy
from mpgluon.tables import Table
from mpgluon.trainer.inside import arrays_of_state

__all__ = ["MemoryEstimate", "PolicyMemory", "memory_estimate"]

_MIB = 2.0**20

# What the gradient of an operator reads: "i" its inputs, "1" or "2" the first of them, "o" its
# result. A test compares the table with MXNet's CPU build, operator by operator.
_KEPT = {
    name: kept
    for kept, names in {
        "": """
            elemwise_add elemwise_sub broadcast_add broadcast_sub add_n negative _plus_scalar
            _minus_scalar _rminus_scalar _mul_scalar _div_scalar _copy Cast amp_cast Reshape
            Flatten expand_dims squeeze transpose SwapAxis slice slice_axis SliceChannel stack
            mean sum Pad UpSampling _contrib_BilinearResize2D _contrib_AdaptiveAvgPooling2D
            broadcast_to broadcast_axis tile repeat Dropout BlockGrad _zeros _ones
        """,
        "i": """
            Convolution Deconvolution dot batch_dot _linalg_gemm _linalg_gemm2
            BatchNorm LRN _contrib_BatchNormWithReLU Concat
            _rnn_param_concat elemwise_mul elemwise_div broadcast_mul broadcast_div _maximum
            broadcast_maximum broadcast_minimum broadcast_power clip abs square log rsqrt
            reciprocal hard_sigmoid softsign erf expm1 log1p log2 sin cos _rdiv_scalar
            _power_scalar _maximum_scalar _minimum_scalar
        """,
        "1": "Embedding",
        "2": "FullyConnected LayerNorm GroupNorm InstanceNorm",
        "o": "relu sigmoid tanh exp sqrt cbrt softmax log_softmax L2Normalization",
    }.items()
    for name in names.split()
}

_NATIVE_NAME = re.compile(
    r"_mpgluon_(?:on_copies_|on_packed_copies_)?(\w+?)(?:_rounded)?(?:_\d+_\d+(?:_[a-z]\w*)?)?"
)
_IN_PLACE_OF = {
    "convolution": "Convolution",
    "fully_connected": "FullyConnected",
    "batch_norm": "BatchNorm",
    **dict.fromkeys(
        ("add", "fork", "concat", "pack", "unpack", "narrow", "widen", "block", "unblock"), "_copy"
    ),
}


@dataclass(frozen=True)
class PolicyMemory:
    """Bytes of one training step under one policy, on one device.

    Attributes
    ----------
    name : str
        The policy's.
    parameters, gradients, optimizer_state : int
    masters : int
        FP32 copies of 16-bit parameters. (bfloat16 parameters are FP32 arrays themselves.)
    activations : int
        Arrays that wait for the backward pass, the batch included.
    """

    name: str
    parameters: int
    gradients: int
    masters: int
    optimizer_state: int
    activations: int

    @property
    def total(self) -> int:
        """The sum, in bytes."""
        fixed = self.parameters + self.gradients + self.masters + self.optimizer_state
        return fixed + self.activations


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a training step under several policies; print it.

    Attributes
    ----------
    device_type : str
        ``"cpu"`` or ``"gpu"``: whose arithmetic was counted.
    input_shape : tuple
    optimizer : str
    policies : tuple of PolicyMemory
    impossible : dict of str to str
        Policies that the device does not support, and why.
    """

    device_type: str
    input_shape: InputShape
    optimizer: str
    policies: tuple[PolicyMemory, ...]
    impossible: dict[str, str]

    def table(self) -> Table:
        """Return a row for each policy, in MiB."""
        kinds = ("parameters", "gradients", "masters", "optimizer_state", "activations", "total")
        return Table(
            ("policy", *(f"{kind.replace('_', ' ')} MiB" for kind in kinds)),
            [
                (one.name, *(f"{getattr(one, kind) / _MIB:.1f}" for kind in kinds))
                for one in self.policies
            ],
        )

    def __str__(self) -> str:
        return "\n".join(
            (
                f"one training step on input of shape {self.input_shape} with {self.optimizer}, "
                f"in the arithmetic of a {self.device_type.upper()}, workspaces not counted",
                str(self.table()),
                *(f"{name}: {reason}" for name, reason in self.impossible.items()),
            )
        )


def memory_estimate(
    net: gluon.HybridBlock,
    input_shape: InputShape,
    *,
    optimizer: Union[str, mx.optimizer.Optimizer] = "sgd",
    optimizer_params: Optional[dict[str, Any]] = None,
    policies: Sequence[Union[str, Policy]] = (
        "float32",
        "float16",
        "mixed_float16",
        "mixed_bfloat16",
    ),
    ctx: Optional[mx.Context] = None,
    hybridized: bool = False,
) -> MemoryEstimate:
    """Count the bytes of a training step under each policy; nothing is allocated.

    Parameters
    ----------
    net : gluon.HybridBlock
        Not cast; initialized or not, shapes known or not. It is not changed.
    input_shape : tuple of int, or sequence of such tuples
        Of its FP32 input, batch included; or of each of its inputs, in order.
    optimizer : str or Optimizer
        As for ``gluon.Trainer``.
    optimizer_params : dict, optional
        Without ``multi_precision`` in it, 16-bit parameters have FP32 masters.
    policies : sequence of str or Policy
        As for :meth:`mpgluon.Policy.parse`.
    ctx : Context, optional
        Whose arithmetic to count, by default the current one; ``mx.gpu()`` needs no GPU.
    hybridized : bool
        Whether to count what a hybridized network keeps on a CPU with native operators: 16-bit
        arrays, half of FP32's. There, an imperative float16 step takes *more* memory than one in
        FP32, because the widened operands wait for the backward pass. On a GPU, and without native
        operators, this makes no difference.

    Raises
    ------
    TypeError
        If ``net`` is not a ``HybridBlock``.
    ValueError
        If ``input_shape`` does not fit the network, or a policy is unknown.
    PrecisionError
        If ``net`` or a part of it is cast.
    """
    if isinstance(net, gluon.Block):
        cast = next((b.name for b in blocks_of(net) if forward_of(b) is not None), None)
        if cast is not None:
            raise PrecisionError(
                f"{cast} is cast, and policies are compared on a plain network; estimate before "
                "the cast, or call mpgluon.restore first"
            )
    ctx = ctx or mx.current_context()
    options = {"multi_precision": True, **(optimizer_params or {})}
    if isinstance(optimizer, str):
        optimizer = mx.optimizer.create(optimizer, **options)
    found, impossible = [], {}
    for policy in policies:
        name = str(policy)
        parsed = Policy.parse(policy) if isinstance(policy, str) else policy
        try:
            found.append(_memory_under(parsed, name, net, input_shape, optimizer, ctx, hybridized))
        except PrecisionError as error:
            impossible[name] = str(error)
    return MemoryEstimate(
        device_type=ctx.device_type,
        input_shape=input_shape,
        optimizer=type(optimizer).__name__,
        policies=tuple(found),
        impossible=impossible,
    )


def _memory_under(
    policy: Policy,
    name: str,
    net: gluon.HybridBlock,
    input_shape: InputShape,
    optimizer: mx.optimizer.Optimizer,
    ctx: mx.Context,
    hybridized: bool,
) -> PolicyMemory:
    with unchanged(net):
        if policy.param_dtype != "float32":
            cast_block(net, policy)
        elif policy.compute_dtype != "float32":
            amp.autocast(net, policy)
        known = {p.name: p for p in net.collect_params().values()}
        dtypes = {name: np.dtype(parameter.dtype).name for name, parameter in known.items()}
        rewrite = _rewriting(policy, dtypes) if hybridized and ctx.device_type == "cpu" else None
        graph = trace(net, input_shape, ctx=ctx, rewrite=rewrite)
        trained = {p.name for p in net.collect_params().values() if p.grad_req != "null"}
        narrow = {name for name, parameter in known.items() if format_of(parameter) != FLOAT32}
    variables = [n for n in graph.nodes if n.is_variable and n.name in known]
    learning = [n.outputs[0] for n in variables if n.name in trained]
    mastered = [
        n.outputs[0] for n in variables if n.name in trained & narrow and optimizer.multi_precision
    ]
    return PolicyMemory(
        name=name,
        parameters=sum(n.outputs[0].nbytes for n in variables),
        gradients=sum(value.nbytes for value in learning),
        masters=sum(prod(value.shape) * 4 for value in mastered),
        optimizer_state=sum(
            _state_bytes(optimizer, value.shape, "float32" if value in mastered else value.dtype)
            for value in learning
        ),
        activations=_activations(graph, known, trained),
    )


def _rewriting(policy: Policy, dtypes: dict[str, str]) -> Optional[Callable[[Symbol], Symbol]]:
    """Return how the graph of a hybridized network is rewritten on a CPU, ``None`` if it is not."""
    if policy.compute_dtype == "float32":
        return None
    arithmetic = policy_arithmetic(policy, "cpu")
    if not isinstance(arithmetic, Emulated):
        return None

    def rewrite(symbol: Symbol) -> Symbol:
        known = {name: dtypes.get(name, "float32") for name in symbol.list_inputs()}
        return hold_on_grid(symbol, known, fmt=arithmetic.format, native=native.load())

    return rewrite


def _state_bytes(optimizer: mx.optimizer.Optimizer, shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of an optimizer's state for one parameter, going by that of 5 x 7."""
    probe = mx.nd.ones((5, 7), ctx=mx.cpu(), dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accumulating with float16 in optimizer")
        states = list(arrays_of_state(optimizer.create_state_multi_precision(0, probe)).values())
    rows, columns = shape[0], prod(shape[1:])
    return sum(
        prod({5: rows, 7: columns}.get(side, side) for side in state.shape)
        * np.dtype(state.dtype).itemsize
        for state in states
    )


def _activations(graph: Graph, parameters: Iterable[str], trained: Iterable[str]) -> int:
    """Return the bytes of the arrays that wait for the backward pass."""
    known, learning = set(parameters), set(trained)
    reached: set[Node] = set()  # by gradients
    kept: set[Key] = set()
    hidden = 0  # results that only gradients read
    for node in graph.nodes:
        if node.is_variable:
            reached.update([node] if node.name in learning else [])
            continue
        if node.operator == "BlockGrad" or reached.isdisjoint(one.node for one in node.inputs):
            continue
        reached.add(node)
        reads = _reads(node)
        if "i" in reads:
            kept.update(map(_unforked, node.inputs))
        elif reads.isdigit():
            kept.update(map(_unforked, node.inputs[: int(reads)]))
        if "o" in reads:
            kept.update((node, index) for index in range(len(node.outputs)))
        hidden += _hidden_bytes(node)
    return hidden + sum(
        node.outputs[index].nbytes for node, index in kept if node.name not in known
    )


def _unforked(entry: Entry) -> Key:
    """Return the value that is read; both results of a native fork have its memory."""
    while str(entry.node.operator).startswith("_mpgluon_fork"):
        entry = entry.node.inputs[0]
    return entry.key


def _operator(node: Node) -> str:
    """Return the name of a node's operator, of a native one the name of MXNet's in its place."""
    native_name = _NATIVE_NAME.fullmatch(node.mxnet_operator)
    return _IN_PLACE_OF.get(native_name[1], native_name[1]) if native_name else node.mxnet_operator


def _reads(node: Node) -> str:
    operator = _operator(node)
    if operator == "Activation" and node.attributes.get("act_type") == "relu":
        return "o"
    return _KEPT.get(operator, "io")


def _hidden_bytes(node: Node) -> int:
    """Return the bytes of results that only the operator's own gradient sees."""
    result = node.outputs[0]
    if _operator(node) == "Dropout":
        return result.nbytes
    if _operator(node) == "Pooling" and node.attributes.get("pool_type", "max") == "max":
        return prod(result.shape) * 4
    return 0
