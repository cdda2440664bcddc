"""Findings about a Trainer of 16-bit weights: FP32 masters, loss scale, what MXNet can compute.

Nothing here changes a Trainer. ``init_trainer``, or without it the first step, raises or logs these
findings, and :func:`mpgluon.diagnostics.check_training` reports them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from typing import Optional

from mpgluon.base.blocks import is_mxnets_own
from mpgluon.base.findings import Finding, error, examples, ok, warning
from mpgluon.cast.network_cast import cast_of
from mpgluon.errors import PrecisionError
from mpgluon.formats.float_format import FLOAT16, FLOAT32, FloatFormat, format_named
from mpgluon.updates import gluon_trainer
from mpgluon.updates.rounded_updates import NEAREST, grid_weights

import mxnet as mx
import numpy as np
from mxnet import gluon

__all__ = [
    "check_weights",
    "float16_parameters",
    "narrow_gradients",
    "obstacle_without_masters",
    "on_loss_scale",
    "on_masters",
    "on_plain_cast",
    "plainly_cast",
]

_logger = logging.getLogger(__name__)

_WITH_FP32_STATE = (
    *(mx.optimizer.AdaDelta, mx.optimizer.AdaGrad, mx.optimizer.Ftrl, mx.optimizer.RMSProp),
    mx.optimizer.contrib.GroupAdaGrad,
)
_EPSILONS = ("epsilon", "float_stable_eps", "eps")  # as MXNet's optimizers name theirs


def float16_parameters(parameters: Iterable[gluon.Parameter]) -> list[gluon.Parameter]:
    """Return the parameters that are float16."""
    return [parameter for parameter in parameters if np.dtype(parameter.dtype) == np.float16]


def plainly_cast(parameters: Iterable[gluon.Parameter]) -> list[gluon.Parameter]:
    """Return the float16 parameters that are in no network of ``cast_block``."""
    return [p for p in float16_parameters(parameters) if cast_of(p) is None]


def narrow_gradients(parameters: Iterable[gluon.Parameter]) -> Optional[FloatFormat]:
    """Return a format with less range than FP32 that gradients pass through, ``None`` without."""
    parameters = list(parameters)
    for network_cast in filter(None, dict.fromkeys(map(cast_of, parameters))):
        fmt = format_named(network_cast.policy.compute_dtype)
        if fmt.exponent_bits < FLOAT32.exponent_bits:
            return fmt
    return FLOAT16 if plainly_cast(parameters) else None


def obstacle_without_masters(optimizer: mx.optimizer.Optimizer) -> Optional[str]:
    """Return why an optimizer cannot update float16 weights themselves, ``None`` if it can.

    Only updates that are MXNet's own are judged: another one may compute in FP32.
    """
    if not is_mxnets_own(type(optimizer).update):
        return None
    if isinstance(optimizer, _WITH_FP32_STATE):
        return "its state is FP32, which MXNet's operators refuse together with float16 weights"
    for name in _EPSILONS:
        value = vars(optimizer).get(name)
        if value and np.float16(value) == 0:
            return f"its {name}={value:g} is 0 in float16: a division by zero, and NaN for weights"
    return None


def on_masters(trainer: gluon.Trainer, rounding: str) -> Iterator[Finding]:
    """Yield whether trained 16-bit weights have FP32 masters, or updates that are not lost."""
    optimizer = gluon_trainer.optimizer_of(trainer)
    parameters = gluon_trainer.parameters_of(trainer)
    trained = [parameter for parameter in parameters if parameter.grad_req != "null"]
    for weights, dtype, part in (
        (grid_weights(parameters), "bfloat16", 512),
        (float16_parameters(trained), "float16", 4096),
    ):
        if not weights:
            continue
        counted = f"{len(weights)} {dtype} weights"
        what = (
            f"{type(optimizer).__name__} updates {counted} without FP32 masters, "
            f"{weights[0].name} first"
        )
        why = f"updates below 1/{part} of their weight are lost"
        fix = "create the Trainer's optimizer with multi_precision=True"
        obstacle = obstacle_without_masters(optimizer) if dtype == "float16" else None
        if optimizer.multi_precision:
            yield ok("masters", f"{counted} with FP32 masters")
        elif obstacle is not None:
            yield error("masters", what, obstacle, fix)
        elif dtype == "float16":
            yield warning("masters", what, why, fix)
        elif rounding == NEAREST.way:
            call = 'amp.init_trainer(trainer, update_rounding="stochastic")'
            yield warning("masters", what, why, f"{fix}, or call {call}")
        else:
            yield ok("masters", f"{counted} without any, updates rounded: {rounding}")


def on_loss_scale(parameters: Iterable[gluon.Parameter]) -> Iterator[Finding]:
    """Yield a finding if gradients that nothing scales pass through a format of little range."""
    fmt = narrow_gradients(parameters)
    if fmt is not None:
        zero, subnormal = fmt.smallest_subnormal / 2, fmt.smallest_normal
        yield warning(
            "loss scale",
            f"this Trainer has no loss scale, though gradients are {fmt}",
            f"gradients below 2^{math.log2(zero):g} become 0, and those below "
            f"2^{math.log2(subnormal):g} lose digits; a step with infinite ones is not skipped",
            "call amp.init_trainer(trainer) right after making the Trainer, and "
            'amp.scale_loss(loss, trainer) around backward; amp.init_trainer(trainer, "none") if '
            "that is intended",
        )


def on_plain_cast(parameters: Iterable[gluon.Parameter], *, on_cpu: bool) -> Iterator[Finding]:
    """Yield a finding if parameters are float16 that ``cast_block`` did not make so."""
    plain = plainly_cast(parameters)
    if plain:
        yield Finding(
            "error" if on_cpu else "warning",
            "cast",
            "float16 parameters that cast_block did not make: "
            f"{examples([parameter.name for parameter in plain])}",
            "MXNet refuses float16 convolutions and dense layers on a CPU"
            if on_cpu
            else "net.cast makes LayerNorm, GroupNorm and softmax compute in float16, and masters "
            "then begin with weights that are rounded already",
            'make the network in FP32 (net.cast("float32") takes a cast back), then '
            "mpgluon.cast_block(net)",
        )


def check_weights(trainer: gluon.Trainer, rounding: str, *, is_scaled: bool = True) -> None:
    """Log one warning about masters, a missing loss scale, and ``net.cast("float16")`` on a CPU.

    Raises
    ------
    PrecisionError
        If the optimizer cannot work without masters.
    """
    parameters = gluon_trainer.parameters_of(trainer)
    findings = list(on_masters(trainer, rounding))
    for finding in findings:
        if finding.level == "error":
            raise PrecisionError(finding.sentence)
    if not is_scaled:
        findings += on_loss_scale(parameters)
    if any(device.device_type == "cpu" for device in gluon_trainer.devices_of(trainer)):
        trained = [parameter for parameter in parameters if parameter.grad_req != "null"]
        findings += on_plain_cast(trained, on_cpu=True)
    sentences = [finding.sentence for finding in findings if finding.level != "ok"]
    if sentences:
        _logger.warning("%s", "\n".join(sentences))
