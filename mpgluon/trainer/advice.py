"""Warnings of a Trainer's steps: when each is due, the cause, and what to do."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Callable, NamedTuple, Optional

from mpgluon.cast.network_cast import cast_of
from mpgluon.cast.status_flags import StepFlags
from mpgluon.errors import LossScaleCollapseError
from mpgluon.formats.loss_scale import DynamicLossScale, LossScale, MeasuredLossScale
from mpgluon.kernels.dtypes import dtype_name
from mpgluon.kernels.reductions import all_finite, global_norm
from mpgluon.trainer.gradients import Gradients
from mpgluon.updates import gluon_trainer

from mxnet import gluon
from mxnet.ndarray import NDArray

__all__ = ["Advice"]

_logger = logging.getLogger(__name__)

_STUCK = 5  # skipped steps at the smallest scale, after which the log says so

_NO_GRADIENT = (
    "no gradient of this Trainer's weights was computed inside autograd.record before its first "
    "step; did backward run, on a loss that was computed inside `with autograd.record():`? What "
    "Gluon calls a gradient that has not been updated is this"
)

_LOSS_NOT_SCALED = (
    "no loss was scaled for this Trainer before its step, so its gradients are not divided; scale "
    "each loss with amp.scale_loss and the Trainer that steps (an Estimator of gluon.contrib does "
    "if it is given batch_processor=mpgluon.estimator.BatchProcessor())"
)


def _scale_too_large(skips: int, scale: float) -> str:
    """Return the warning that the smallest loss scale is too large for some steps, not for all."""
    return (
        f"{skips} steps were skipped at a loss scale of {scale:g}, which can shrink no further: "
        "their batches train nothing. A loss that is a sum, over pixels, boxes or tokens, needs a "
        "smaller scale: take its mean, or amp.init_trainer(trainer, "
        "mpgluon.DynamicLossScale(min_scale=2.0**-10))"
    )


def _collapse_of_the_scale(
    skips: int, scale: float, parameters: Sequence[gluon.Parameter], flags: StepFlags
) -> str:
    """Return the message that nothing is being trained any more, and why, if that can be known."""
    layer = flags.first("forward")
    where = "" if layer is None else f"The forward pass overflowed first in {layer.layer}. "
    return (
        f"{skips} steps in a row had gradients that are not finite although the loss scale, "
        f"{scale:g}, can shrink no further: nothing is being trained. {where}"
        f"{_explain_bad_gradients(parameters)}"
    )


class Advice:
    """Logs the warnings of one Trainer's steps, most of them once."""

    def __init__(self, max_consecutive_skips: Optional[int]) -> None:
        self.stuck = 0  # steps that were skipped although the scale could not shrink
        self._limit = max_consecutive_skips
        self._has_had_gradients = False
        self._logged: set[str] = set()  # warnings that are not repeated

    def warn_of_what_is_missing(self, gradients: Gradients, next_scale: float) -> None:
        """Log, once each, that there are no gradients at all, or none of a scaled loss."""
        self._has_had_gradients = self._has_had_gradients or bool(
            gradients.written or gradients.flags.fresh_weights()
        )
        if not self._has_had_gradients:
            self._warn_once(_NO_GRADIENT)
        elif gradients.now.scale is None and next_scale != 1:
            self._warn_once(_LOSS_NOT_SCALED)

    def warn_of_skips(
        self,
        scale: LossScale,
        in_a_row: int,
        trainers: Iterable[gluon.Trainer],
        flags: StepFlags,
    ) -> None:
        """Log once that nothing is being trained any more, or too little, and in the end raise.

        ``in_a_row`` is the number of steps that were skipped at a scale that cannot shrink.
        """
        ends = self._limit is not None and in_a_row >= self._limit
        if ends or in_a_row == 2:
            parameters = [p for one in trainers for p in gluon_trainer.parameters_of(one)]
            message = _collapse_of_the_scale(in_a_row, scale.scale, parameters, flags)
            if ends:
                raise LossScaleCollapseError(message)
            _logger.warning(message)
        # Where no step between is good, the warning above has said why.
        if (
            in_a_row == 1
            and self.stuck >= _STUCK
            and isinstance(scale, (DynamicLossScale, MeasuredLossScale))
        ):
            self._warn_once(_scale_too_large(_STUCK, scale.scale))

    def _warn_once(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            _logger.warning(message)


class _BadArray(NamedTuple):
    """The first array that is not finite."""

    parameter: gluon.Parameter
    array: NDArray
    kind: str  # "NaN" or "infinite"

    def __str__(self) -> str:
        dtype, device = dtype_name(self.array), self.array.ctx
        return f"{self.parameter.name} ({dtype}, {self.kind}, on {device})"


def _explain_bad_gradients(parameters: Sequence[gluon.Parameter]) -> str:
    """Return which gradient is not finite first, and why, as far as that can be known."""
    ordered = sorted(parameters, key=_place_in_forward_order)
    trained = [parameter for parameter in ordered if parameter.grad_req != "null"]
    gradient = _first_bad_array(trained, gluon.Parameter.list_grad)
    weight = _first_bad_array(trained, gluon.Parameter.list_data)
    where = gradient or "another Trainer, whose step came first and has emptied it"
    if weight is not None:
        cause = (
            f"Weights are not finite themselves, first {weight}, so no loss scale helps: load an "
            "earlier checkpoint, and look for what made them so, such as float16 weights without "
            "FP32 masters (multi_precision=True) or a learning rate that is too large"
        )
    else:
        cause = (
            "A forward pass that overflows does this whatever the scale, and so does a division by "
            "zero or a learning rate that is too large: mpgluon.diagnostics.OverflowLocator names "
            "the place"
        )
        if gradient is not None and gradient.kind == "infinite":
            cause += (
                ". If FP32 has these gradients and float16 does not, as of a loss summed over many "
                "pixels, the scale has to be below 1: DynamicLossScale(min_scale=2.0**-10)"
            )
    return f"The first such gradient, by forward order, is that of {where}. {cause}"


def _first_bad_array(
    parameters: Iterable[gluon.Parameter], arrays_of: Callable[[gluon.Parameter], list[NDArray]]
) -> Optional[_BadArray]:
    for parameter in parameters:
        for array in arrays_of(parameter):
            if not all_finite([array]):
                kind = "NaN" if math.isnan(global_norm([array])) else "infinite"
                return _BadArray(parameter, array, kind)
    return None


def _place_in_forward_order(parameter: gluon.Parameter) -> tuple[int, list[Any]]:
    """Return a key for sorting: as a cast network met it, else by name, dense2 before dense10."""
    owner = cast_of(parameter)
    met = list(owner.forward_order) if owner is not None else []
    natural = [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", parameter.name)]
    return (met.index(parameter) if parameter in met else len(met)), natural
