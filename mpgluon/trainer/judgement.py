"""One look at a Trainer's gradients and masters, with one wait for the devices.

It changes nothing; :mod:`mpgluon.trainer.step` acts on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Optional

from mpgluon.cast.arithmetic import policy_arithmetic
from mpgluon.cast.network_cast import cast_of
from mpgluon.kernels.reductions import all_finite, global_norm, numbers_of, sums_of_squares
from mpgluon.trainer.factors import Factors
from mpgluon.trainer.gradients import Gradients
from mpgluon.updates import gluon_trainer
from mpgluon.updates.masters import ComparedMaster, compare_masters

import mxnet as mx
from mxnet import gluon
from mxnet.ndarray import NDArray

__all__ = ["Look", "are_finite", "look", "look_at_step"]


class Look(NamedTuple):
    """Results of a look at gradients and masters."""

    norm: Optional[float]  # of all gradients; not finite if one of them is not
    stale_masters: Sequence[ComparedMaster] = ()  # their weights were written by something else

    @property
    def is_finite(self) -> bool:
        """Whether no gradient that was looked at is infinite or NaN."""
        return self.norm is None or math.isfinite(self.norm)


def look_at_step(
    trainer: gluon.Trainer,
    trained: Sequence[gluon.Parameter],
    gradients: Gradients,
    factors: Factors,
    *,
    look_for_inf: bool,
) -> Look:
    """Look at the masters of a step, and at its gradients where infinities matter.

    After ``clip_global_norm``, which has looked at both, its result is returned.
    """
    clip = gradients.now.clip
    if clip is not None:
        return Look(clip.norm)
    fresh = gradients.fresh(trained) if look_for_inf else []
    rescale = gluon_trainer.optimizer_of(trainer).rescale_grad
    return look(trainer, trained, fresh, rescale / factors.divisor)


def are_finite(trainer: gluon.Trainer, gradients: Gradients) -> bool:
    """Whether these gradients allow the step of a Trainer that steps together with this one."""
    if gradients.now.clip is not None:
        return math.isfinite(gradients.now.clip.norm)
    trained = [p for p in gluon_trainer.parameters_of(trainer) if p.grad_req != "null"]
    fresh = gradients.fresh(trained)
    return not fresh or all_finite(fresh)


def look(
    trainer: gluon.Trainer,
    parameters: Sequence[gluon.Parameter],
    gradients: Iterable[NDArray],
    factor: float,
    *,
    for_clipping: bool = False,
) -> Look:
    """Look at gradients, and at the masters of parameters.

    Parameters
    ----------
    trainer : gluon.Trainer
    parameters : sequence of gluon.Parameter
        Those that it trains.
    gradients : iterable of NDArray
        On all devices.
    factor : float
        Factor of the norm.
    for_clipping : bool
        Whether weights will depend on the norm: without native BF16, its bits are then the same
        with native operators and without.

    Returns
    -------
    Look
        The norm on one device, the same on all after a reduction; the largest without
        one; ``None`` without gradients.
    """
    per_device: dict[mx.Context, list[NDArray]] = {}
    for gradient in gradients:
        per_device.setdefault(gradient.context, []).append(gradient)
    compared = compare_masters(trainer, parameters)
    in_any_order = not for_clipping or _is_native_bfloat16(parameters)
    sums = [sums_of_squares(a, in_any_order=in_any_order) for a in per_device.values()]
    numbers = numbers_of([*sums, *(one.difference for one in compared)])
    norms = []
    for arrays in per_device.values():
        norms.append(_norm(arrays, math.fsum(numbers[: len(arrays)])) * factor)
        del numbers[: len(arrays)]
    # ``max`` alone would pass over a NaN.
    norm = max(norms, key=lambda one: (math.isnan(one), one), default=None)
    return Look(norm, [one for one, difference in zip(compared, numbers) if difference != 0])


def _is_native_bfloat16(parameters: Sequence[gluon.Parameter]) -> bool:
    """Whether a CPU computes in native bfloat16, whose last bits are oneDNN's own anyway."""
    owner = cast_of(parameters[0]) if parameters else None
    return owner is not None and policy_arithmetic(owner.policy, "cpu").kind == "native"


def _norm(gradients: Sequence[NDArray], sum_of_squares: float) -> float:
    """Return the norm; looks at the gradients again only if squares have left float32's range."""
    if 2.0**-70 < sum_of_squares < math.inf:
        return math.sqrt(sum_of_squares)
    if math.isnan(sum_of_squares) or (math.isinf(sum_of_squares) and not all_finite(gradients)):
        return sum_of_squares
    return global_norm(gradients)
