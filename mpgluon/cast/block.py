"""Casting a network to a 16-bit format, and back.

``cast_block`` and ``autocast`` do the same thing under different policies: each block of the
network gets, on its own instance, a ``hybrid_forward`` that calls the original one with a
stand-in for ``F``. MXNet is not patched, the block's class is untouched, and ``restore`` takes
everything off again.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple, Optional, Union

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.base import _LIB, check_call
from mxnet.gluon import nn

from mpgluon import native
from mpgluon.cast.arithmetic import policy_arithmetic
from mpgluon.cast.forward import PolicyForward, blocks_of, forward_of, is_hybrid
from mpgluon.cast.fp32 import Cast, fp32_value
from mpgluon.cast.frozen import forget_gradients
from mpgluon.cast.numpy_interface import numpy_interface_of
from mpgluon.cast.report import BeyondReach, CastReport
from mpgluon.cast.symbol_block import ImportedGraph
from mpgluon.cast.told_formats import learned_format, tell, untell
from mpgluon.errors import PrecisionError
from mpgluon.numerics.policy import Policy
from mpgluon.trainer import inside
from mpgluon.trainer.masters import MasterKeeper

__all__ = [
    "NORMALIZATION_LAYERS",
    "BeyondReach",
    "CastReport",
    "KeepFP32",
    "apply_policy",
    "blocks_of",
    "cast_block",
    "device_type_of",
    "restore",
]

NORMALIZATION_LAYERS: tuple[type, ...] = (
    nn.BatchNorm,
    nn.BatchNormReLU,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.InstanceNorm,
)
"""The layers whose parameters and statistics stay FP32; SyncBatchNorm is a BatchNorm."""

_logger = logging.getLogger(__name__)
_INFINITE_FROM = 65520.0  # halfway between float16's largest number and the next power of two

KeepFP32 = Iterable[Union[type, gluon.Block]]


def cast_block(
    net: gluon.Block,
    dtype: Union[str, type, Policy] = "float16",
    *,
    keep_fp32: KeepFP32 = NORMALIZATION_LAYERS,
) -> CastReport:
    """Cast a network to float16 in place: the parameters, and what it computes.

    Afterwards the network takes FP32 or float16 input and returns FP32, which is what a loss
    needs; between, values are float16. Parameters of normalization layers stay FP32. Train it
    with ``multi_precision=True``, so that the optimizer updates FP32 master weights. On a CPU
    the same code runs with a Tensor Core's arithmetic; see :mod:`mpgluon.cast.arithmetic`.

    Parameters
    ----------
    net : gluon.Block
        With or without initialized parameters, hybridized or not. FP32 values of parameters
        that it has are remembered on the CPU until an optimizer's masters begin with them, or
        :func:`restore`.
    dtype : str, NumPy dtype or Policy
        ``"float16"``, or a policy with any ``param_dtype``.
    keep_fp32 : iterable of block types and block instances
        Blocks to leave in FP32, with everything inside them. A normalization layer returns its
        result in float16; any other kept block returns FP32, and what follows rounds it.
        BatchNorm's parameters stay FP32 in any case: MXNet's operator accepts no others.

    Returns
    -------
    CastReport
        What was cast, what was kept, and which blocks do arithmetic that a cast cannot govern.

    Raises
    ------
    ValueError
        If ``dtype`` is not a 16-bit format that parameters can have.
    PrecisionError
        If ``net`` or a part of it is cast already, or holds an imported graph with control flow
        that ``keep_fp32`` does not name, or computes with MXNet's NumPy interface, or is on a
        device that cannot carry the format. Nothing is changed then.

    Notes
    -----
    A graph that was traced before is thrown away, here and in everything inside ``net``; call
    ``hybridize`` again on a larger block that contains ``net``. In a ``hybrid_forward``,
    ``F is mx.nd`` is false, and an operator called as ``mx.nd.…`` is out of reach. A block that
    is added later is not cast: restore, and cast again. ``net.export`` keeps the casts, unlike
    Gluon's own default (``remove_amp_cast=True``); what loads the graph needs MXNet only.
    """
    if isinstance(dtype, Policy):
        return apply_policy(net, dtype, keep_fp32)
    if dtype_of_argument(dtype) != "float16":
        raise ValueError(
            f"cast_block makes float16 parameters, received dtype={dtype!r}; for bfloat16 use "
            'amp.autocast(net, "bfloat16"), and for float32 mpgluon.restore(net)'
        )
    return apply_policy(net, Policy.parse("float16"), keep_fp32)


def _welcome_trainer(parameter: gluon.Parameter, trainer: Optional[gluon.Trainer]) -> None:
    """Do what a Parameter does when a Trainer is made for it, and see to the FP32 masters."""
    type(parameter)._set_trainer(parameter, trainer)
    if trainer is not None and inside.occupant(trainer) is None:
        inside.occupy(trainer, MasterKeeper(trainer))


def dtype_of_argument(dtype: Any) -> str:
    """Return the name of a dtype given as text, as ``np.float16`` or as ``np.dtype``.

    Raises
    ------
    TypeError
        If it is none of these.
    """
    if isinstance(dtype, str):
        return dtype
    if isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, np.generic)):
        return np.dtype(dtype).name
    raise TypeError(f'dtype must be text such as "float16" or a Policy, received {dtype!r}')


def apply_policy(
    net: gluon.Block, policy: Policy, keep_fp32: KeepFP32 = NORMALIZATION_LAYERS
) -> CastReport:
    """Make ``net`` compute under ``policy``; what :func:`cast_block` and ``autocast`` share.

    See :func:`cast_block` for the parameters and errors.
    """
    if policy.compute_dtype == "float32":
        raise ValueError(f"{policy} asks for nothing in 16 bits; a plain network computes in FP32")
    if isinstance(keep_fp32, (str, type, gluon.Block)):
        raise TypeError(
            f"keep_fp32 is a collection of block types and blocks, received {keep_fp32!r} itself; "
            "write keep_fp32=(*mpgluon.NORMALIZATION_LAYERS, block)"
        )
    if mx.util.is_np_array():
        raise PrecisionError(
            "MXNet's NumPy interface is switched on (mx.npx.set_np), so layers compute with F.npx; "
            "a cast governs operators of mx.nd and mx.sym. Nothing was changed. Switch it off with "
            "mx.npx.reset_np() before the network is made"
        )
    plan = _plan(net, tuple(keep_fp32))
    arithmetic = policy_arithmetic(policy, device_type_of(net))
    if device_type_of(net) == "cpu":
        native.load()
    learned = {
        entry.block: learned_format(entry.block, policy.compute_dtype)
        for entry in plan
        if not entry.computes_fp32
    }
    owner = Cast(policy, net)
    graphs = {
        entry.block: ImportedGraph(entry.block)
        for entry in plan
        if isinstance(entry.block, gluon.SymbolBlock) and not entry.computes_fp32
    }
    owner.undo = partial(restore, net)
    owner.told = {block: tell(block, found) for block, found in learned.items() if found}
    fp32_parameters = {
        parameter
        for entry in plan
        if entry.keeps_parameters
        for parameter in entry.block._reg_params.values()
    } | _unreachable_parameters(plan)
    for graph in graphs.values():  # BatchNorm takes no others, and the rest are normalizations too
        fp32_parameters |= graph.normalization_parameters()
    parameters = list(net.collect_params().values())
    for parameter in parameters:
        parameter.mpgluon_cast = owner
        parameter._set_trainer = partial(_welcome_trainer, parameter)
        _leave_inference_layout(parameter)
    if policy.param_dtype == "float16":
        for parameter in parameters:
            if parameter in fp32_parameters or np.dtype(parameter.dtype) != np.float32:
                continue
            initialized = parameter._data is not None
            owner.fp32_values[parameter] = _on_cpu(parameter) if initialized else None
            parameter.cast("float16")
        _warn_of_infinite_weights(owner)
    beyond_reach = []
    handing_fp32 = {  # to code that nobody can cast
        child
        for entry in plan
        if not entry.keeps_parameters and _beyond_reach(entry.block)
        for child in entry.block._children.values()
    }
    for entry in plan:
        block = entry.block
        _clear_traced_graph(block)
        if block in graphs:
            graphs[block].attach()
        unseen = None if entry.keeps_parameters else _beyond_reach(block)
        beyond_reach += [unseen] if unseen else []
        hands_fp32 = block in handing_fp32
        computes = is_hybrid(block) or block in graphs
        if entry.computes_fp32 or unseen or computes or block is net or hands_fp32:
            PolicyForward(
                block,
                owner,
                kept=entry.computes_fp32,
                takes_fp32=unseen is not None,
                hands_fp32=hands_fp32,
                graph=graphs.get(block),
            )
    return CastReport(
        policy=policy,
        cast=tuple(
            entry.block.name
            for entry in plan
            if (is_hybrid(entry.block) or entry.block in graphs) and not entry.keeps_parameters
        ),
        kept_fp32=tuple(entry.block.name for entry in plan if entry.keeps_parameters),
        beyond_reach=tuple(beyond_reach),
        parameters_cast=len(owner.fp32_values),
        parameters_kept=len(parameters) - len(owner.fp32_values),
        arithmetic=arithmetic.kind,
        told_format=tuple(block.name for block in owner.told),
    )


def device_type_of(net: gluon.Block) -> str:
    """Return the kind of device that a network's parameters are on, or will be."""
    for parameter in net.collect_params().values():
        if parameter._data is not None:
            return str(parameter.list_ctx()[0].device_type)
    return str(mx.current_context().device_type)


def restore(net: gluon.Block) -> None:
    """Turn a cast or autocast network back into a plain FP32 network, in place.

    Parameters get their FP32 values back, bit for bit: those from before the cast, or after
    training those of the optimizer's master weights. Elements that somebody else has written
    since are widened. A network that was never cast is left as it is. A Trainer made for the
    cast network holds state for float16 parameters: make a new one.

    Parameters
    ----------
    net : gluon.Block
        What was cast, or a part of it. A part computes in FP32 from then on, like one that
        ``keep_fp32`` named, until the network itself is restored.
    """
    blocks = list(blocks_of(net))
    roots = set()
    forwards = [forward for forward in map(forward_of, blocks) if forward is not None]
    for owner in {id(forward.owner): forward.owner for forward in forwards}.values():
        for block in set(owner.told).intersection(blocks):
            untell(block, owner.told.pop(block))
    for parameter in net.collect_params().values():
        for name in ("mpgluon_cast", "_set_trainer"):
            vars(parameter).pop(name, None)
    for block in blocks:
        forward = forward_of(block)
        if forward is None:
            continue
        for parameter in block._reg_params.values():
            if parameter in forward.owner.fp32_values:
                _restore_parameter(parameter, forward.owner.fp32_values.pop(parameter))
        forget_gradients(block)
        roots.add(forward.owner.root)
        if forward.owner.root in blocks:
            forward.detach()
        else:
            forward.kept = True
    for root in roots:
        for block in blocks_of(root):  # graphs around the part hold its old formats
            _clear_traced_graph(block)


def _restore_parameter(parameter: gluon.Parameter, known: Optional[mx.nd.NDArray]) -> None:
    value = fp32_value(_on_cpu(parameter), known) if known is not None else None
    parameter.cast("float32")
    if value is not None:
        parameter.set_data(value)


def _warn_of_infinite_weights(owner: Cast) -> None:
    """Log which finite weights have become infinite."""
    counts = {}
    for parameter, value in owner.fp32_values.items():
        if value is not None:
            size = np.abs(value.asnumpy())
            counts[parameter.name] = int((np.isfinite(size) & (size >= _INFINITE_FROM)).sum())
    infinite = {name: count for name, count in counts.items() if count}
    if infinite:
        named = ", ".join(f"{count} in {name}" for name, count in list(infinite.items())[:5])
        _logger.warning(
            "%d weights are beyond float16's range (65504) and have become infinite: %s%s; keep "
            "their blocks in FP32 with keep_fp32",
            sum(infinite.values()),
            named,
            ", …" if len(infinite) > 5 else "",
        )


def _leave_inference_layout(parameter: gluon.Parameter) -> None:
    """Put values back in their plain order in memory, on a CPU.

    Inference in FP32 leaves weights as oneDNN wants them. MXNet puts them back when they are
    trained in FP32, but not where a cast takes them, and each update of theirs is then twice as
    slow: to plain order and back.
    """
    if parameter._data is None or parameter._stype != "default":
        return
    for array in parameter.list_data():
        if array.context.device_type == "cpu":
            # Whoever asks for the address of the values has them put in order; who asks before they
            # are there has other memory made for them.
            array.wait_to_read()
            check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(ctypes.c_void_p())))


def _on_cpu(parameter: gluon.Parameter) -> mx.nd.NDArray:
    """Return a copy; devices hold equal values, and averaging them could round."""
    return parameter.list_data()[0].copyto(mx.cpu())


class _Planned(NamedTuple):
    """What becomes of one block."""

    block: gluon.Block
    keeps_parameters: bool  # in FP32
    computes_fp32: bool  # and returns it


def _plan(net: gluon.Block, keep_fp32: tuple[Any, ...]) -> list[_Planned]:
    """Return what becomes of every block, or refuse."""
    if not isinstance(net, gluon.Block):
        raise TypeError(f"net must be a gluon.Block, received {type(net).__name__}")
    for entry in keep_fp32:
        if not isinstance(entry, (type, gluon.Block)):
            raise TypeError(f"keep_fp32 holds block types and blocks, received {entry!r}")
    types = tuple(entry for entry in keep_fp32 if isinstance(entry, type))
    instances = {entry for entry in keep_fp32 if isinstance(entry, gluon.Block)}
    all_blocks = list(blocks_of(net))
    strangers = instances.difference(all_blocks)
    if strangers:
        names = ", ".join(sorted(block.name for block in strangers))
        raise ValueError(f"keep_fp32 names blocks that are not in {net.name}: {names}")
    named = [block for block in all_blocks if isinstance(block, types) or block in instances]
    kept = {inner for block in named for inner in blocks_of(block)}
    whole = {
        inner
        for block in named
        if not isinstance(block, NORMALIZATION_LAYERS)
        for inner in blocks_of(block)
    }
    for block in all_blocks:
        forward = forward_of(block)
        if forward is not None:
            raise PrecisionError(
                f"{block.name} is cast already, as a part of {forward.owner.root.name}; call "
                f"mpgluon.restore on {forward.owner.root.name} before another cast"
            )
        numpy_interface = None if block in whole else numpy_interface_of(block)
        if numpy_interface is not None:
            raise PrecisionError(
                f"{block.name} ({type(block).__name__}) {numpy_interface}: a cast governs "
                "operators of mx.nd and mx.sym, not MXNet's NumPy interface. Nothing was changed. "
                "Write the block with operators of F itself (F.dot, not F.np.dot), or keep it in "
                "FP32 with keep_fp32"
            )
    always = (nn.BatchNorm, nn.BatchNormReLU)
    return [
        _Planned(block, block in kept or isinstance(block, always), block in whole)
        for block in all_blocks
    ]


def _unreachable_parameters(plan: list[_Planned]) -> set[gluon.Parameter]:
    """Return the parameters that plain Blocks read themselves, out of the cast's sight."""
    return {
        parameter
        for entry in plan
        if not is_hybrid(entry.block) and not isinstance(entry.block, gluon.SymbolBlock)
        for parameter in entry.block._reg_params.values()
    }


def _beyond_reach(block: gluon.Block) -> Optional[BeyondReach]:
    only_calls_children = (
        nn.Sequential.forward,
        gluon.contrib.nn.Concurrent.forward,
        gluon.rnn.SequentialRNNCell.forward,
    )
    if (
        is_hybrid(block)
        or isinstance(block, gluon.SymbolBlock)
        or type(block).forward in only_calls_children
    ):
        return None
    return BeyondReach(
        name=block.name,
        kind=type(block).__name__,
        advice=(
            "operators that its forward calls itself are not governed: its own parameters stay "
            "FP32, and what it is handed, by the blocks in it too, is FP32; write it as a "
            "HybridBlock with hybrid_forward(F, …), or keep it in FP32 with keep_fp32"
        ),
    )


def _clear_traced_graph(block: gluon.Block) -> None:
    if isinstance(block, gluon.HybridBlock) and not isinstance(block, gluon.SymbolBlock):
        block._clear_cached_op()
