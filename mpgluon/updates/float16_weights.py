"""Checks of a Trainer's float16 weights before the first step: FP32 masters, and CPU support.

Nothing here changes a Trainer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Optional

from mpgluon.cast.network_cast import cast_of
from mpgluon.errors import PrecisionError
from mpgluon.updates import gluon_trainer

import mxnet as mx
import numpy as np
from mxnet import gluon

__all__ = ["check_float16_weights", "float16_weights", "obstacle_without_masters", "plainly_cast"]

_logger = logging.getLogger(__name__)

_WITH_FP32_STATE = (
    *(mx.optimizer.AdaDelta, mx.optimizer.AdaGrad, mx.optimizer.Ftrl, mx.optimizer.RMSProp),
    mx.optimizer.contrib.GroupAdaGrad,
)
_EPSILONS = ("epsilon", "float_stable_eps", "eps")  # as MXNet's optimizers name theirs


def float16_weights(trainer: gluon.Trainer) -> list[gluon.Parameter]:
    """Return the float16 parameters that a Trainer trains."""
    trained = [p for p in gluon_trainer.parameters_of(trainer) if p.grad_req != "null"]
    return [parameter for parameter in trained if np.dtype(parameter.dtype) == np.float16]


def plainly_cast(parameters: Iterable[gluon.Parameter]) -> list[gluon.Parameter]:
    """Return the float16 parameters that are in no network of ``cast_block``."""
    narrow = [p for p in parameters if np.dtype(p.dtype) == np.float16]
    return [parameter for parameter in narrow if cast_of(parameter) is None]


def obstacle_without_masters(optimizer: mx.optimizer.Optimizer) -> Optional[str]:
    """Return why an optimizer cannot update float16 weights themselves, ``None`` if it can.

    Only updates that are MXNet's own are judged: another one may compute in FP32.
    """
    if not type(optimizer).update.__module__.startswith("mxnet."):
        return None
    if isinstance(optimizer, _WITH_FP32_STATE):
        return "its state is FP32, which MXNet's operators refuse together with float16 weights"
    for name in _EPSILONS:
        value = vars(optimizer).get(name)
        if value and np.float16(value) == 0:
            return f"its {name}={value:g} is 0 in float16: a division by zero, and NaN for weights"
    return None


def check_float16_weights(trainer: gluon.Trainer) -> None:
    """Warn of float16 weights without FP32 masters, and of ``net.cast("float16")`` on a CPU.

    Raises
    ------
    PrecisionError
        If the optimizer cannot work without masters.
    """
    weights, optimizer = float16_weights(trainer), gluon_trainer.optimizer_of(trainer)
    if weights and not optimizer.multi_precision:
        _check_optimizer(optimizer, weights)
    on_cpu = any(device.device_type == "cpu" for device in gluon_trainer.devices_of(trainer))
    if on_cpu and plainly_cast(weights):
        _logger.warning(
            "%s float16, on a CPU, and not made so by cast_block: MXNet refuses float16 "
            "convolutions and dense layers there, when a result is waited for. Make the network in "
            'FP32 (net.cast("float32") takes a cast back), then mpgluon.cast_block(net), which '
            'trains on a CPU too, instead of net.cast("float16")',
            _counted(plainly_cast(weights), "is", "are"),
        )


def _check_optimizer(optimizer: mx.optimizer.Optimizer, weights: list[gluon.Parameter]) -> None:
    name = type(optimizer).__name__
    fix = f'write gluon.Trainer(params, "{name.lower()}", {{"multi_precision": True, …}})'
    obstacle = obstacle_without_masters(optimizer)
    if obstacle is not None:
        raise PrecisionError(
            f"{name} cannot train float16 weights without FP32 masters ("
            f"{_counted(weights, 'has', 'have')} none): {obstacle}; {fix}"
        )
    _logger.warning(
        "%s no FP32 master: %s adds to the float16 numbers themselves, and updates below half a "
        "unit in a weight's last place, 2^-12 at 1.0, are lost; %s",
        _counted(weights, "has", "have"),
        name,
        fix,
    )


def _counted(parameters: Sequence[gluon.Parameter], one: str, several: str) -> str:
    """Return the beginning of a sentence about parameters: their number, a name and a verb."""
    first = parameters[0].name
    if len(parameters) == 1:
        return f"{first} {one}"
    return f"{len(parameters)} weights ({first} first) {several}"
