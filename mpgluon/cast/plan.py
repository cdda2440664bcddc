"""The plan of a cast: its effect on each block of a network, and the networks it refuses.

All is decided here, and nothing is changed; :mod:`mpgluon.cast.block` does what a plan says.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

from mpgluon.base.blocks import NamedBlocks, blocks_of, fitting, is_mxnets_own, is_numpy
from mpgluon.cast.arithmetic import policy_arithmetic
from mpgluon.cast.block_formats import Attributes, learned_format
from mpgluon.cast.given import is_given, weights_of_layers
from mpgluon.cast.operator_rules import NO_RULES, Rules, is_operator, rules_of
from mpgluon.errors import PrecisionError
from mpgluon.formats.float_format import format_named
from mpgluon.formats.policy import Policy

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn

if TYPE_CHECKING:
    from mpgluon.cast.symbol_block import ImportedGraph

__all__ = [
    "BATCH_NORMS",
    "NORMALIZATION_LAYERS",
    "BlockPlan",
    "KeepFP32",
    "NetworkPlan",
    "is_hybrid",
    "plan_of",
    "with_normalization_layers",
]

BATCH_NORMS = (nn.BatchNorm, nn.BatchNormReLU)
"""The layers that are always FP32: MXNet's operator takes no other parameters and statistics."""

NORMALIZATION_LAYERS: tuple[type, ...] = (
    *BATCH_NORMS,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.InstanceNorm,
)
"""The layers whose parameters and statistics stay FP32; SyncBatchNorm is a BatchNorm."""

KeepFP32 = Iterable[Union[type, gluon.Block, str]]

_PRODUCTS = (nn.Dense, nn.Conv1D, nn.Conv2D, nn.Conv3D)
_CALL_CHILDREN_ONLY = (
    nn.Sequential.forward,
    gluon.contrib.nn.Concurrent.forward,
    gluon.rnn.SequentialRNNCell.forward,
)
# Names in a forward method with which it may read a parameter that it does not name.
_REACHES_PARAMETERS = {"getattr", "vars", "__dict__", "_reg_params", "params", "collect_params"}


class BlockPlan(NamedTuple):
    """The effect of a cast on one block.

    Attributes
    ----------
    block : Block
    keeps_parameters : bool
        Whether its own parameters stay FP32.
    computes_fp32 : bool
        Whether it and all inside it compute and return FP32.
    is_governed : bool
        Whether it computes itself: it has a ``hybrid_forward``, a ``forward`` that does more than
        to call its children, or an imported graph.
    rules : mapping from the name of an operator to Rule
        Those that precede the table's in it.
    is_edge : bool
        Whether it is the network's first or last convolution or dense layer, in the order in which
        the blocks were added.
    method : {"hybrid_forward", "forward"}
        The method in which it computes.
    learned : dict
        The attributes that its own ``cast`` to the format would set.
    graph : ImportedGraph or None
        The graph of a SymbolBlock that does not compute in FP32.
    """

    block: gluon.Block
    keeps_parameters: bool
    computes_fp32: bool
    is_governed: bool
    rules: Rules
    is_edge: bool
    method: str
    learned: Attributes
    graph: Optional[ImportedGraph]


class NetworkPlan(NamedTuple):
    """The effect of a cast on a network.

    Attributes
    ----------
    policy : Policy
    blocks : list of BlockPlan
        Parents first.
    operators_fp32, operators_16 : tuple of str
        The operators that ``keep_fp32`` and ``compute_16`` name.
    arithmetic : {"native", "emulated"}
        Whether the device computes products in the format.
    parameters : list of Parameter
    narrowed : list of Parameter
        Those among them that the cast rounds.
    """

    policy: Policy
    blocks: list[BlockPlan]
    operators_fp32: tuple[str, ...]
    operators_16: tuple[str, ...]
    arithmetic: str
    parameters: list[gluon.Parameter]
    narrowed: list[gluon.Parameter]


def with_normalization_layers(keep_fp32: KeepFP32) -> KeepFP32:
    """Add the normalization layers to ``keep_fp32``, unless it is empty or has a type of theirs."""
    if not _is_collection(keep_fp32):
        return keep_fp32  # refused later
    entries = tuple(keep_fp32)
    names_layers = any(isinstance(e, type) and issubclass(e, NORMALIZATION_LAYERS) for e in entries)
    return entries if names_layers or not entries else (*NORMALIZATION_LAYERS, *entries)


def _is_collection(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, type, gluon.Block))


def _as_collections(
    keep_fp32: KeepFP32, compute_16: Iterable[str]
) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Return both arguments of a cast as tuples; raise TypeError for a single entry."""
    if not _is_collection(keep_fp32):
        entry = repr(keep_fp32) if isinstance(keep_fp32, str) else "block"
        raise TypeError(
            "keep_fp32 is a collection of block types, blocks, and names of blocks and operators, "
            f"received {keep_fp32!r} itself; write keep_fp32=[{entry}], or keep_fp32=() for none"
        )
    if isinstance(compute_16, str):
        raise TypeError(f"compute_16 is a collection of operator names, received {compute_16!r}")
    return tuple(keep_fp32), tuple(compute_16)


def plan_of(
    network: NamedBlocks,
    device_type: str,
    policy: Policy,
    keep_fp32: KeepFP32,
    compute_16: Iterable[str],
) -> NetworkPlan:
    """Return the plan of a cast of a network that is not cast.

    Raises
    ------
    TypeError, ValueError, PrecisionError
        As :func:`mpgluon.cast_block` says.
    """
    keep_fp32, operators_16 = _as_collections(keep_fp32, compute_16)
    blocks, keep_fp32 = network.blocks, _with_blocks_by_name(network, keep_fp32)
    operators_fp32 = tuple(one for one in keep_fp32 if isinstance(one, str))
    named = _named_blocks(network, [one for one in keep_fp32 if not isinstance(one, str)])
    stay_fp32 = _with_all_inside(named)
    whole = _with_all_inside(b for b in named if not isinstance(b, NORMALIZATION_LAYERS))
    for block in blocks:
        if block not in whole:
            _refuse_mixed_interfaces(block)
    stay_fp32.update(block for block in blocks if isinstance(block, BATCH_NORMS))
    governed = {
        block
        for block in blocks
        if is_hybrid(block) or type(block).forward not in _CALL_CHILDREN_ONLY
    }
    products = [block for block in blocks if isinstance(block, _PRODUCTS)]
    edges = products[:1] + products[-1:]
    rules = rules_of(network, governed - whole, operators_fp32, operators_16)
    arithmetic = policy_arithmetic(policy, device_type).kind
    graphs = _imported_graphs(block for block in blocks if block not in whole)
    entries = [
        BlockPlan(
            block=block,
            keeps_parameters=block in stay_fp32,
            computes_fp32=block in whole,
            is_governed=block in governed,
            rules=rules.get(block, NO_RULES),
            is_edge=block in edges,
            method="hybrid_forward" if is_hybrid(block) or block in graphs else "forward",
            learned={} if block in whole else learned_format(block, policy.compute_dtype),
            graph=graphs.get(block),
        )
        for block in blocks
    ]
    parameters = list(network.net.collect_params().values())
    return NetworkPlan(
        policy=policy,
        blocks=entries,
        operators_fp32=operators_fp32,
        operators_16=operators_16,
        arithmetic=arithmetic,
        parameters=parameters,
        narrowed=_parameters_to_narrow(parameters, policy.param_dtype, entries),
    )


def _with_blocks_by_name(network: NamedBlocks, keep_fp32: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``keep_fp32`` with blocks in place of their names, places and patterns of these."""
    blocks = list[Any]()
    for entry in keep_fp32:
        is_name = isinstance(entry, str) and not is_operator(entry)
        blocks += (is_name and fitting(network.by_name, entry)) or [entry]
    return tuple(blocks)


def _named_blocks(network: NamedBlocks, keep_fp32: list[Any]) -> list[gluon.Block]:
    """Return the blocks that ``keep_fp32`` names by type or as instances."""
    for entry in keep_fp32:
        if not isinstance(entry, (type, gluon.Block)):
            raise TypeError(
                "keep_fp32 holds block types, blocks, and names of blocks and operators, received "
                f"{entry!r}"
            )
    types = tuple(entry for entry in keep_fp32 if isinstance(entry, type))
    instances = {entry for entry in keep_fp32 if isinstance(entry, gluon.Block)}
    unknown = instances.difference(network.blocks)
    if unknown:
        names = ", ".join(sorted(block.name for block in unknown))
        raise ValueError(f"keep_fp32 names blocks that are not in {network.net.name}: {names}")
    return [block for block in network.blocks if isinstance(block, types) or block in instances]


def _with_all_inside(blocks: Iterable[gluon.Block]) -> set[gluon.Block]:
    return {inner for block in blocks for inner in blocks_of(block)}


def _refuse_mixed_interfaces(block: gluon.Block) -> None:
    """Refuse a block that does not belong to the interface of MXNet that is switched on."""
    is_on = bool(mx.util.is_np_array())
    use = _other_interface_of(block, is_on)
    if use is not None:
        switch = "is switched on" if is_on else "is switched off"
        cure = "mx.npx.reset_np()" if is_on else "mx.npx.set_np()"
        raise PrecisionError(
            f"{block.name} ({type(block).__name__}) {use}, and MXNet's NumPy interface {switch}. "
            f"Nothing was changed. Call {cure} before the network is made, cast and run, or keep "
            "the block in FP32 with keep_fp32"
        )


def _other_interface_of(block: gluon.Block, is_on: bool) -> Optional[str]:
    """Describe how a block uses the interface that is not switched on, ``None`` if it does not.

    Blocks inside it are not examined. A call of ``F.np`` or ``F.npx`` is found when it runs.
    """
    parameters = block._reg_params.values()
    if is_on:
        made_off = any(p._data is not None and not is_numpy(p) for p in parameters)
        return "has parameters that are mx.nd arrays" if made_off else None
    if any(map(is_numpy, parameters)):
        return "has parameters that are mx.np arrays"
    for name in ("hybrid_forward", "forward") if is_hybrid(block) else ("forward",):
        method = getattr(type(block), name)
        if is_mxnets_own(inspect.unwrap(method)):
            continue  # written for both; the parameters and the switch tell
        if any(_switches_on(layer) for layer in _layers(method)):
            return "is decorated with use_np"
    return None


def _layers(function: Any) -> Iterator[Any]:
    """Yield a function and those that it wraps."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _switches_on(function: Any) -> bool:
    """Whether a function is what ``mx.util.use_np_array`` makes of another one."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_name == "_with_np_array"


def _imported_graphs(blocks: Iterable[gluon.Block]) -> dict[gluon.Block, ImportedGraph]:
    imported = [block for block in blocks if isinstance(block, gluon.SymbolBlock)]
    if not imported:
        return {}
    from mpgluon.cast.symbol_block import ImportedGraph

    return {block: ImportedGraph(block) for block in imported}


def _parameters_to_narrow(
    parameters: list[gluon.Parameter], dtype: str, blocks: list[BlockPlan]
) -> list[gluon.Parameter]:
    """Return the FP32 parameters that a cast rounds."""
    if dtype == "float32":
        return []
    fmt, graphs = format_named(dtype), [entry.graph for entry in blocks if entry.graph is not None]
    weights = weights_of_layers(entry.block for entry in blocks if not entry.computes_fp32)
    weights.update(*(graph.product_weights() for graph in graphs))
    # MXNet's BatchNorm accepts no others; the rest of a graph's are normalizations too.
    stay_fp32 = _parameters_that_stay_fp32(blocks).union(
        *(graph.normalization_parameters() for graph in graphs)
    )
    return [
        parameter
        for parameter in parameters
        if parameter not in stay_fp32
        and np.dtype(parameter.dtype) == np.float32
        and parameter._stype == "default"  # not rows, which Gluon does not hand out
        and (parameter in weights or not is_given(parameter, fmt))
    ]


def _parameters_that_stay_fp32(blocks: list[BlockPlan]) -> set[gluon.Parameter]:
    """Return parameters of kept blocks, norms, and plain Blocks that read them unseen."""
    parameters = {
        parameter
        for entry in blocks
        if entry.keeps_parameters or not entry.is_governed
        for parameter in entry.block._reg_params.values()
    }
    return parameters.union(*(_unread_parameters(entry.block) for entry in blocks))


def _unread_parameters(block: gluon.Block) -> list[gluon.Parameter]:
    """Return the parameters of a plain Block that its ``forward`` does not mention.

    Methods that are called from outside of the forward pass read them, such as a loss, and a cast
    does not govern these. Where ``forward``, or a method that it calls, may reach parameters
    without their names, there are none.
    """
    if is_hybrid(block) or not block._reg_params:
        return []
    names: set[str] = set()
    pending = {"forward"}
    while pending:
        new = set(_names_in_methods(type(block), pending.pop())) - names
        names |= new
        pending |= new
    if names & _REACHES_PARAMETERS:
        return []
    return [parameter for name, parameter in block._reg_params.items() if name not in names]


def _names_in_methods(kind: type, name: str) -> Iterator[str]:
    """Yield the names in the code of a method or property, the one of each class above included."""
    for base in kind.__mro__:
        method = None if base in gluon.Block.__mro__ else vars(base).get(name)
        method = getattr(method, "fget", getattr(method, "__func__", method))
        codes = [getattr(layer, "__code__", None) for layer in _layers(method)]
        while codes:
            code = codes.pop()
            if code is not None:
                yield from code.co_names
                codes += [one for one in code.co_consts if isinstance(one, CodeType)]


def is_hybrid(block: gluon.Block) -> bool:
    """Whether the block computes in a ``hybrid_forward`` of its own."""
    inherited = (gluon.HybridBlock.hybrid_forward, gluon.SymbolBlock.hybrid_forward)
    return isinstance(block, gluon.HybridBlock) and type(block).hybrid_forward not in inherited
