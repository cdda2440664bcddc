"""One line that prepares a network and its Trainer for any format: the loop is the same in all."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Optional, Union

from mpgluon.amp import init_trainer
from mpgluon.base.blocks import require_values
from mpgluon.cast.block import cast_block, restore, uncast
from mpgluon.cast.plan import NORMALIZATION_LAYERS, KeepFP32
from mpgluon.errors import PrecisionError
from mpgluon.formats.float_format import format_named
from mpgluon.formats.loss_scale import LossScale
from mpgluon.formats.policy import Policy, as_policy

import mxnet as mx
import numpy as np
from mxnet import gluon

__all__ = ["automatic_loss_scale", "prepare"]


def prepare(
    net: gluon.Block,
    dtype: Union[str, type, Policy],
    optimizer: Union[str, mx.optimizer.Optimizer],
    optimizer_params: Optional[dict[str, Any]] = None,
    *,
    masters: bool = True,
    loss_scale: Union[str, float, LossScale] = "auto",
    update_rounding: str = "nearest",
    keep_fp32: KeepFP32 = NORMALIZATION_LAYERS,
    compute_16: Iterable[str] = (),
    params: Any = None,
    **options: Any,
) -> gluon.Trainer:
    """Cast a network and return its Trainer, with masters and a loss scale; in FP32, plain ones.

    ::

        trainer = mpgluon.prepare(net, args.dtype, "sgd", {"learning_rate": 0.1})
        for images, labels in batches:
            with autograd.record():
                loss = loss_fn(net(images), labels)
            with amp.scale_loss(loss, trainer) as scaled_loss:
                scaled_loss.backward()
            trainer.step(batch_size)

    The loop is the same for every ``dtype``. With ``"float32"`` nothing is cast or skipped, the
    loss scale is 1, all functions of :mod:`mpgluon.amp` can be called, and results, gradients and
    weights have the bits of a loop in plain Gluon.

    Parameters
    ----------
    net : gluon.Block
        In FP32, not cast, initialized; shapes may wait for the first call.
    dtype : str, NumPy dtype or Policy
        ``"float32"`` (``"fp32"``); ``"float16"`` (``"fp16"``) or ``"bfloat16"`` (``"bf16"``),
        parameters included; ``"mixed_float16"`` or ``"mixed_bfloat16"``, with FP32 parameters;
        ``"mixed_float8"``; or any other policy that ``Policy.parse`` takes.
    optimizer, optimizer_params
        As for ``gluon.Trainer``.
    masters : bool
        Whether the optimizer updates FP32 masters of 16-bit parameters (``multi_precision``, unless
        ``optimizer_params`` has it).
    loss_scale : str, float or LossScale
        As for ``amp.init_trainer``; ``"auto"`` is ``"dynamic"`` for formats with less range than
        FP32, and otherwise ``"none"``.
    update_rounding : {"nearest", "stochastic", "kahan"}
        As for ``amp.init_trainer``: updates of bfloat16 weights without masters.
    keep_fp32, compute_16
        As for :func:`mpgluon.cast_block`.
    params : ParameterDict, optional
        The parameters to train, by default ``net.collect_params()``.
    **options
        Further options of ``gluon.Trainer``, such as ``kvstore``.

    Raises
    ------
    TypeError, ValueError, PrecisionError, TrainerStateError
        As ``cast_block``, ``gluon.Trainer`` and ``amp.init_trainer`` do; the network is then in
        FP32 as before.

    Notes
    -----
    In FP32, blocks of ``net`` that are hybridized, before or later, compute with own operators on a
    CPU: a ``clip`` (ReLU6) behind a Convolution or BatchNorm, and a ``Pad`` with zeros behind that
    or a Convolution, if only convolutions follow. Elsewhere the layout of their results would
    change the order of other operators' sums. The first call may compile them, as a cast does.
    Files of ``net.export`` and copies have MXNet's, to which :func:`mpgluon.restore` returns.
    """
    policy = as_policy(dtype)
    require_values(net, with_shapes=False)
    if params is None and not net.collect_params().keys():
        raise ValueError(f"{net.name} has no parameters to train")
    if policy.compute_dtype == "float32":
        _refuse_16_bits(net)
    narrow = policy.param_dtype != "float32"
    if isinstance(optimizer, mx.optimizer.Optimizer):
        optimizer.multi_precision = optimizer.multi_precision or (masters and narrow)
    else:  # made before the cast: it may be refused
        optimizer_params = {"multi_precision": masters and narrow, **(optimizer_params or {})}
        optimizer, optimizer_params = mx.optimizer.create(optimizer, **optimizer_params), None
    scale = automatic_loss_scale(policy) if loss_scale == "auto" else loss_scale
    with ExitStack() as stack:
        if policy.compute_dtype != "float32":
            cast_block(net, policy, keep_fp32=keep_fp32, compute_16=compute_16)
            stack.callback(_give_back, net)  # if what follows is refused
        params = net.collect_params() if params is None else params
        trainer = gluon.Trainer(params, optimizer, optimizer_params, **options)
        init_trainer(trainer, scale, update_rounding=update_rounding)
        stack.pop_all()
    if policy.compute_dtype == "float32":
        from mpgluon.cast.plain_graph import use_own_operators  # for networks in FP32

        use_own_operators(net)
    return trainer


def _refuse_16_bits(net: gluon.Block) -> None:
    """Raise PrecisionError if a network that is to train in FP32 is cast, or has narrow weights."""
    for parameter in uncast(net).net.collect_params().values():
        if np.dtype(parameter.dtype).itemsize == 2:
            raise PrecisionError(
                f"{parameter.name} is {np.dtype(parameter.dtype).name}, and FP32 was asked for; "
                "call net.cast('float32') first"
            )


def _give_back(net: gluon.Block) -> None:
    """Take the cast off a network whose Trainer was refused, perhaps while it was being made."""
    for parameter in net.collect_params().values():
        parameter._set_trainer(None)
    restore(net)


def automatic_loss_scale(policy: Policy) -> str:
    """Return ``"dynamic"`` for a format with less range than FP32, and ``"none"`` for others."""
    return "dynamic" if format_named(policy.compute_dtype).exponent_bits < 8 else "none"
