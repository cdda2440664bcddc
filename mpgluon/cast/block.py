"""Casting a network to a 16-bit format, and back.

``cast_block`` and ``autocast`` do the same thing under different policies: each block of the
network gets, on its own instance, a ``hybrid_forward`` that calls the original one with a
stand-in for ``F``. The block's class is untouched, and ``restore`` takes everything off again.
MXNet's functions are its own, but for three of them while a block computes, and then other threads
have its results as ever (:mod:`mpgluon.cast.dispatch`).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable
from functools import partial
from typing import Union

from mpgluon import kernels
from mpgluon.base.blocks import NamedBlocks, blocks_of, device_type_of
from mpgluon.base.machine import give_memory_back
from mpgluon.cast import fp32
from mpgluon.cast.block_formats import tell, untell
from mpgluon.cast.forward import PolicyForward, forward_of
from mpgluon.cast.frozen import remove_gradients
from mpgluon.cast.given import warn_of_lost_values
from mpgluon.cast.guards import guard, unguard
from mpgluon.cast.network_cast import NetworkCast, release
from mpgluon.cast.plan import NORMALIZATION_LAYERS, KeepFP32, plan_of, with_normalization_layers
from mpgluon.cast.report import BeyondReach, CastReport, report_of
from mpgluon.errors import PrecisionError
from mpgluon.formats.float_format import FloatFormat, format_named
from mpgluon.formats.policy import Policy, as_policy
from mpgluon.kernels.reductions import sums_of_squares

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.base import _LIB, check_call

__all__ = [
    "NORMALIZATION_LAYERS",
    "BeyondReach",
    "CastReport",
    "KeepFP32",
    "apply_policy",
    "autocast",
    "blocks_of",
    "cast_block",
    "device_type_of",
    "restore",
    "uncast",
]

_logger = logging.getLogger(__name__)


def cast_block(
    net: gluon.Block,
    dtype: Union[str, type, Policy] = "float16",
    *,
    keep_fp32: KeepFP32 = NORMALIZATION_LAYERS,
    compute_16: Iterable[str] = (),
) -> CastReport:
    """Cast a network to 16 bits in place: its parameters and its computation.

    Afterwards the network takes FP32 or float16 input and returns FP32, which a loss needs;
    between, values are in the format. Parameters of normalization layers stay FP32. Train it
    with ``multi_precision=True``, so that the optimizer updates FP32 master weights. On a CPU
    products are exact, sums FP32, and results rounded once; see :mod:`mpgluon.cast.arithmetic`.
    Constants whose values the format lacks, and other parameters without gradient, stay FP32, apart
    from frozen weights of layers that are products; an operator that reads one returns FP32.

    Parameters
    ----------
    net : gluon.Block
        With or without initialized parameters, hybridized or not. FP32 values of parameters
        that it has are remembered on the CPU until an optimizer's masters begin with them, or
        :func:`restore`.
    dtype : str, NumPy dtype or Policy
        ``"float16"``; ``"bfloat16"``, in FP32 arrays, on a CPU; or any other policy, as text that
        ``Policy.parse`` takes (``"mixed_float8"``) or as an object.
    keep_fp32 : iterable of block types, blocks, names of blocks and names of operators
        Blocks to leave in FP32, with everything inside them: as objects, or by name
        (``"net_dense0"``), place (``"features.0"``) or a pattern of either
        (``"features.*.body"``). A normalization layer returns its result in float16; any other
        kept block returns FP32, and what follows rounds it. Normalization layers are kept in
        addition, unless a type of theirs is among the entries, or there is no entry. BatchNorm's
        parameters stay FP32 in any case: MXNet's operator accepts no others.
        An operator, ``"Convolution"`` in all blocks or ``"block:Convolution"`` in one (its name,
        or its place: ``"features.0:Convolution"``), computes in FP32 and returns FP32; its
        parameters still become float16, and are widened. Names are as in ``F``; ``x + y`` is
        ``"broadcast_add"``, and an operator's name precedes a block's.
    compute_16 : iterable of str
        Operators that otherwise return FP32 (``"softmax"``, ``"mean"``), named in the same way:
        computed in FP32 as before, with results in the 16-bit format. This affects calls like
        ``F.mean(x)``, not methods (``x.mean()``).

    Returns
    -------
    CastReport
        The blocks that were cast, those that were kept, and those with arithmetic that a cast
        cannot govern.

    Raises
    ------
    TypeError
        If an argument is of another kind.
    ValueError
        If ``dtype`` is not a policy, or has nothing in 16 bits, or if ``keep_fp32`` or
        ``compute_16`` names a block that is not in ``net``, or an operator that MXNet does not
        have or whose format cannot be chosen.
    PrecisionError
        If ``net`` or a part of it is already cast, or holds an imported graph with control flow or
        8-bit integers that ``keep_fp32`` does not name, or belongs to the interface of MXNet
        (``mx.nd``, ``mx.np``) that is switched off, or is on a device that cannot compute in the
        format. Nothing is changed then.

    Notes
    -----
    A graph that was traced before is discarded, here and in everything inside ``net``; call
    ``hybridize`` again on a larger block that contains ``net``. In a ``hybrid_forward``,
    ``F is mx.nd`` is false. A block that is added later is not cast: restore, and cast again.
    ``net.export`` keeps the casts, unlike Gluon's own default (``remove_amp_cast=True``); the
    exported graph needs MXNet only. Under a policy whose formats MXNet does not have it raises
    PrecisionError; :func:`mpgluon.deployment.export_mxnet` writes such a network.
    """
    return apply_policy(net, as_policy(dtype), with_normalization_layers(keep_fp32), compute_16)


def autocast(
    net: gluon.Block,
    dtype: Union[str, type, Policy] = "float16",
    *,
    keep_fp32: KeepFP32 = (),
    compute_16: Iterable[str] = (),
) -> CastReport:
    """Make a network compute in 16 bits while its parameters stay FP32, in place.

    Weights are rounded each time they are used, so the optimizer needs no master weights: the
    parameters are the masters. ``amp.restore`` takes the cast off again.

    Parameters
    ----------
    net : gluon.Block
        With or without initialized parameters, hybridized or not.
    dtype : str, NumPy dtype or Policy
        ``"float16"``; ``"bfloat16"``, on a CPU only, native where the processor has it and else
        emulated; or any other policy, as text that ``Policy.parse`` takes
        (``"mixed_float8"``) or as an object, which means the same as in :func:`mpgluon.cast_block`.
    keep_fp32 : iterable of block types, blocks, names of blocks and names of operators
        Blocks that compute in FP32, with everything inside them. Normalization layers need not
        be named: their sums are FP32 under every policy. Names as for :func:`mpgluon.cast_block`.
    compute_16 : iterable of str
        As for :func:`mpgluon.cast_block`. Without effect on a processor that has bfloat16 itself:
        there, all values except the products' are FP32.

    Raises
    ------
    TypeError, ValueError, PrecisionError
        As for :func:`mpgluon.cast_block`.
    """
    return apply_policy(net, as_policy(dtype, keeps_parameters=True), keep_fp32, compute_16)


def apply_policy(
    net: gluon.Block,
    policy: Policy,
    keep_fp32: KeepFP32 = NORMALIZATION_LAYERS,
    compute_16: Iterable[str] = (),
) -> CastReport:
    """Make ``net`` compute under ``policy``; what :func:`cast_block` and :func:`autocast` share.

    See :func:`cast_block` for the parameters and errors.
    """
    if policy.compute_dtype == "float32":
        raise ValueError(
            f"the policy {policy} has nothing in 16 bits; a plain network computes in FP32, and "
            "mpgluon.restore(net) takes a cast off"
        )
    network, device_type = uncast(net), device_type_of(net)
    plan = plan_of(network, device_type, policy, keep_fp32, compute_16)
    # Nothing is refused from here on.
    mx.nd.waitall()  # a running inference may change the layout of a weight
    if device_type == "cpu":
        kernels.load()
    network_cast = NetworkCast(policy, net, undo=partial(restore, net))
    _warn_of_float64(plan.parameters)
    for parameter in plan.parameters:
        network_cast.adopt(parameter)
        _leave_inference_layout(parameter)
    if policy.param_dtype != "float32":
        fmt = format_named(policy.param_dtype)
        for parameter in plan.narrowed:
            fp32.narrow(parameter, fmt)
        _warn_of_lost_weights(plan.narrowed, fmt)
        give_memory_back()
    for entry in plan.blocks:
        block = entry.block
        if entry.learned:
            network_cast.former_attributes[block] = tell(block, entry.learned)
        _remove_own_operators(block)
        _clear_traced_graph(block)
        if entry.graph is not None:
            entry.graph.attach()
        if entry.computes_fp32 or entry.is_governed or block is net:
            PolicyForward(entry, network_cast)
    guard(network.blocks, plan.parameters, network_cast, restore)
    return report_of(plan)


def restore(net: gluon.Block) -> None:
    """Turn a cast or autocast network back into a plain FP32 network, in place.

    Parameters get their FP32 values back, bit for bit: from before the cast or, after training,
    from the optimizer's master weights. Elements that were written otherwise since
    then are widened. A network that was never cast is left as it is, but for the own operators
    that :func:`mpgluon.prepare` gave its graph. A Trainer made for the cast network holds state for
    float16 parameters: make a new one. ``net.cast("float32")`` does the same.

    Parameters
    ----------
    net : gluon.Block
        A network that was cast, or a part of it. A part computes in FP32 from then on, like one
        that ``keep_fp32`` named, until the network itself is restored.

    Raises
    ------
    TypeError
        If it is not a Block.
    """
    if not isinstance(net, gluon.Block):
        raise TypeError(f"net must be a gluon.Block, received {type(net).__name__}")
    blocks = list(blocks_of(net))
    forwards = [forward for forward in map(forward_of, blocks) if forward is not None]
    parameters = list(net.collect_params().values())
    unguard([*blocks, *parameters])
    for block in blocks:
        _remove_own_operators(block)
    for parameter in parameters:
        release(parameter)
        fp32.restore(parameter)
    for forward in forwards:
        remove_gradients(forward.block)
        if forward.network_cast.root in blocks:
            forward.detach()
        else:
            forward.kept = True
    for network_cast in {forward.network_cast for forward in forwards}:
        for block in blocks:
            untell(block, network_cast.former_attributes.pop(block, {}))
        for block in blocks_of(network_cast.root):  # graphs around the part hold its old formats
            _clear_traced_graph(block)


def uncast(net: gluon.Block) -> NamedBlocks:
    """Return the blocks of a network; raise PrecisionError if one is already cast."""
    if not isinstance(net, gluon.Block):
        raise TypeError(
            f"net must be a gluon.Block, received {type(net).__name__}; a cast belongs to a "
            "network, not to a device or a passage of code: amp.autocast(net)"
        )
    network = NamedBlocks(net)
    for forward in filter(None, map(forward_of, network.blocks)):
        root, name = forward.network_cast.root.name, forward.block.name
        part = "" if name == root else f" as a part of {root}"
        raise PrecisionError(f"{name} is already cast{part}; call mpgluon.restore on {root} first")
    return network


def _warn_of_float64(parameters: list[gluon.Parameter]) -> None:
    """Log which parameters no policy makes narrower."""
    names = [one.name for one in parameters if np.dtype(one.dtype) == np.float64]
    if names:
        _logger.warning(
            "%d of %d parameters are float64, the first is %s: a cast leaves them as they are, and "
            "what is computed from them is float64; call net.cast('float32') before the cast",
            *(len(names), len(parameters), names[0]),
        )


def _warn_of_lost_weights(narrowed: list[gluon.Parameter], fmt: FloatFormat) -> None:
    """Log which weights have become infinite, or 0 in arrays without larger ones."""
    values = {p: value for p in narrowed if (value := fp32.known(p)) is not None}
    if not values:
        return
    sums = sums_of_squares([p.list_data()[0] for p in values], in_any_order=True).asnumpy()
    suspicious = {
        parameter.name: value.asnumpy()
        for (parameter, value), total in zip(values.items(), sums)
        if not value.size * fmt.smallest_normal**2 <= total < np.inf
    }
    warn_of_lost_values(suspicious, fmt, "keep their blocks in FP32 with keep_fp32")


def _leave_inference_layout(parameter: gluon.Parameter) -> None:
    """Put values back in their plain order in memory, on a CPU.

    Inference in FP32 leaves weights in oneDNN's layout. MXNet puts them back when they are trained
    in FP32, but not where a cast takes them, and each update is then twice as slow.
    """
    if parameter._data is None or parameter._stype != "default":
        return
    for array in parameter.list_data():
        if array.ctx.device_type == "cpu":
            # Reading the address puts the values in order. All operators that use them must have
            # ended: else MXNet allocates them a second time, or changes their layout in between.
            check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(ctypes.c_void_p())))


def _remove_own_operators(block: gluon.Block) -> None:
    """Undo what ``prepare`` has done to a block that it left in FP32."""
    if "mpgluon_graph" in vars(block):
        block.mpgluon_graph.detach()


def _clear_traced_graph(block: gluon.Block) -> None:
    if isinstance(block, gluon.HybridBlock) and not isinstance(block, gluon.SymbolBlock):
        block._clear_cached_op()
