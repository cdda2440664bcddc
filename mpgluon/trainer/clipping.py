"""Gradients between ``backward`` and the step: their true norm, and their true values."""

from __future__ import annotations

from mpgluon.errors import PrecisionError, TrainerStateError
from mpgluon.kernels.dtypes import cast, dtype_name
from mpgluon.trainer.gradients import Clip
from mpgluon.trainer.judgement import look
from mpgluon.trainer.step import TrainerState
from mpgluon.updates import gluon_trainer

from mxnet.ndarray import NDArray

__all__ = ["clip", "unscale", "unscaled_gradients"]


def clip(state: TrainerState, max_norm: float, batch_size: float) -> float:
    """Return the true norm, and let the step that follows shrink gradients to ``max_norm``."""
    if state.gradients.now.clip is not None:
        raise TrainerStateError(
            "clip_global_norm was called twice before a step; the first call is already "
            "folded into the step that follows: call trainer.step before clipping again"
        )
    parameters = gluon_trainer.trained(gluon_trainer.parameters_of(state.trainer))
    if not state.gradients.fresh(parameters):
        raise TrainerStateError(
            "there is no gradient to clip: none was written since the last step; call "
            "clip_global_norm between backward and trainer.step"
        )
    gluon_trainer.begin(state.trainer)
    if gluon_trainer.updates_in_kvstore(state.trainer):
        raise TrainerStateError(
            "this Trainer updates weights inside its kvstore, where gradients cannot be "
            "clipped by their common norm; create it with update_on_kvstore=False"
        )
    state.gradients.sum_ahead()
    rescale = gluon_trainer.scale_of(state.trainer) / batch_size
    gradients = state.gradients.fresh(parameters)
    factor = rescale / state.gradients.now.divisor
    outcome = look(state.trainer, parameters, gradients, factor, for_clipping=True)
    for one in outcome.stale_masters:
        one.follow()
    norm = outcome.norm
    assert norm is not None
    coefficient = max_norm / norm if norm > max_norm else 1.0
    state.gradients.change(clip=Clip(norm, coefficient, rescale))
    return norm


def unscale(state: TrainerState) -> None:
    """Divide FP32 gradients by their scale in place."""
    if state.gradients.now.unscaled:
        raise TrainerStateError(
            "the gradients were unscaled already since the last step; call unscale once"
        )
    if state.gradients.now.scale is None:
        raise TrainerStateError(
            "no loss was scaled since the last step, so there is nothing to unscale; call it "
            "between backward and trainer.step"
        )
    gradients = state.gradients.fresh(
        gluon_trainer.trained(gluon_trainer.parameters_of(state.trainer))
    )
    divisor = state.gradients.now.divisor
    narrow = [gradient for gradient in gradients if dtype_name(gradient) == "float16"]
    if narrow:
        raise PrecisionError(
            f"{len(narrow)} of {len(gradients)} gradients are float16, which divided by "
            f"{divisor:g} would lose what the loss scale has saved; use "
            "amp.clip_global_norm to clip, amp.unscaled_gradients for FP32 copies, or "
            "amp.autocast, which keeps parameters and gradients in FP32"
        )
    for gradient in gradients:
        gradient *= 1 / divisor
    state.gradients.change(unscaled=True)


def unscaled_gradients(state: TrainerState) -> dict[str, NDArray]:
    """Return FP32 copies of the gradients in true units, by the names of the parameters."""
    gluon_trainer.begin(state.trainer)
    parameters = gluon_trainer.trained(gluon_trainer.parameters_of(state.trainer))
    # Without a new one they are the latest step's.
    stepped = not state.gradients.fresh(parameters)
    divisor = state.latest.divisor if stepped else state.gradients.now.divisor
    are_sums = state.gradients.now.reduced or not gluon_trainer.reduces_gradients(state.trainer)
    if not (stepped or are_sums):
        state.gradients.empty_stale()
    copies = {}
    for parameter in parameters:
        gradients = parameter.list_grad()[: 1 if stepped or are_sums else None]
        gradients = [gradient.as_nd_ndarray() for gradient in gradients]
        wide = [cast(gradient.tostype("default"), "float32") for gradient in gradients]
        rest = (one.as_in_context(wide[0].context) for one in wide[1:])
        copies[parameter.name] = sum(rest, start=wide[0]) * (1 / divisor)
    return copies
