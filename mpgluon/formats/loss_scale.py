"""Loss scales: state machines that decide the factor S by which the next loss is multiplied.

They hold plain Python numbers and no arrays: :mod:`mpgluon.kernels.reductions` finds out whether
gradients are finite, and :mod:`mpgluon.amp` connects both with a Gluon Trainer.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from numbers import Integral, Real
from typing import Any, Optional, Union

from mpgluon.formats.float_format import FLOAT16

__all__ = [
    "LARGEST_SCALE",
    "NUMBERS",
    "DynamicLossScale",
    "LossScale",
    "MeasuredLossScale",
    "NoLossScale",
    "StaticLossScale",
    "as_loss_scale",
    "whole_number",
]


NUMBERS: tuple[type, ...] = (int, float, Real)
"""Python's numbers and NumPy's, of which only float64 is a subclass of Python's."""

_WORDS = '"dynamic", "measured", "none"'
# 1 / S must be a normal FP32 number: MXNet's operators read it as text, and no subnormal.
LARGEST_SCALE = 2.0**126
_POWERS_OF_TWO = {"scale", "min_scale", "max_scale", "growth_factor", "backoff_factor"}


def _power_of_two(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise TypeError(f"{name} must be a number, received {value!r}")
    exponent = math.frexp(min(value, sys.float_info.max))[1] - 1 if value > 0 else 0
    if value != 2.0**exponent:
        raise ValueError(
            f"{name} must be a power of two, so that scaling rounds nothing; received {value!r}"
        )
    return float(value)


# The bounds of whole numbers in a state.
_COUNTS = {
    "growth_interval": (1, 2**63 - 1),
    "growth_tracker": (0, 2**63 - 1),
    "margin": (1, 30),
    "backoff": (0, 2**63 - 1),
}


def whole_number(name: str, value: Any, least: int = 1, unit: str = "") -> int:
    """Return an argument, Python's or NumPy's, as an int.

    Raises
    ------
    TypeError, ValueError
        If it is another kind of value, or less than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, received {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}{unit}, received {value}")
    return int(value)


class LossScale(ABC):
    """A factor for the loss and the rule by which it changes.

    Attributes
    ----------
    scale : float
        The factor S, a power of two; multiplying by it is exact but for overflow and underflow.
    """

    __slots__ = ("__dict__", "__weakref__", "sharing")
    sharing: Any  # the Trainers that use it, for mpgluon.trainer.shared_scale; never saved
    scale: float

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for ``copy`` and ``pickle``; no Trainer uses a copy yet."""
        return vars(self)

    @abstractmethod
    def update(self, grads_finite: bool) -> None:
        """Advance by one step whose gradients were all finite, or not."""

    def advance(self, grads_finite: bool, largest: Optional[float]) -> None:  # noqa: ARG002
        """Advance by a step, in which ``largest`` was the largest gradient times S, if measured."""
        self.update(grads_finite)

    @property
    def measures(self) -> bool:
        """Whether the largest gradient is wanted, which native operators measure."""
        return False

    @property
    def skips_overflow(self) -> bool:
        """Whether a step with gradients that are not finite is skipped."""
        return True

    @property
    def can_shrink(self) -> bool:
        """Whether an overflow makes S smaller; if not, the next step will overflow as well."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a later step depends on, as plain numbers and strings."""
        return {"kind": type(self).__name__, **vars(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that :meth:`state_dict` returned.

        Raises
        ------
        ValueError
            If the state is of another kind of loss scale, lacks a field, or holds a scale or
            factor that is not a power of two, or a negative count; nothing is changed.
        """
        expected = self.state_dict()
        if state.get("kind") != expected["kind"]:
            raise ValueError(
                f"this state belongs to {state.get('kind')!r} and cannot be loaded into a "
                f"{expected['kind']}; create the loss scale that was used when it was saved"
            )
        if set(state) != set(expected):
            missing, unknown = set(expected) - set(state), set(state) - set(expected)
            raise ValueError(
                f"a state of {expected['kind']} has exactly the fields {sorted(expected)}; "
                f"missing: {sorted(missing)}, unknown: {sorted(unknown)}"
            )
        for name in expected.keys() & _POWERS_OF_TWO:
            try:
                _power_of_two(name, state[name])
            except TypeError as error:
                raise ValueError(str(error)) from None
        for name in expected.keys() & _COUNTS.keys():
            least, most = _COUNTS[name]
            if type(state[name]) is not int or not least <= state[name] <= most:
                raise ValueError(
                    f"{name} must be an integer from {least} to {most}, received {state[name]!r}"
                )
        for name in expected.keys() & {"largest", "largest_before"}:
            if not isinstance(state[name], float) or not 0 <= state[name] < math.inf:
                raise ValueError(f"{name} must be a number from 0, received {state[name]!r}")
        if type(state.get("searches", True)) is not bool:
            raise ValueError(f"searches must be true or false, received {state['searches']!r}")
        vars(self).update({key: value for key, value in state.items() if key != "kind"})

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"


class NoLossScale(LossScale):
    """S is 1 and no step is ever skipped, as in plain FP32 training."""

    def __init__(self) -> None:
        self.scale = 1.0

    @property
    def skips_overflow(self) -> bool:
        """False: an infinite gradient reaches the weights, as in plain Gluon."""
        return False

    def update(self, grads_finite: bool) -> None:
        """Change nothing."""


class StaticLossScale(LossScale):
    """S stays as it is; a step with gradients that are not finite is still skipped.

    Parameters
    ----------
    scale : float
        A power of two, usually 1 or more: 8 to 32768 have been used with success. Below 1 for
        gradients that exceed 65504 by themselves.

    Raises
    ------
    ValueError
        If ``scale`` is not a power of two.

    References
    ----------
    Micikevicius et al., "Mixed Precision Training", ICLR 2018, 3.2.
    """

    def __init__(self, scale: float) -> None:
        self.scale = _power_of_two("a static loss scale", scale)

    def update(self, grads_finite: bool) -> None:
        """Change nothing."""


class DynamicLossScale(LossScale):
    """S grows while gradients stay finite and shrinks at once when they do not.

    Parameters
    ----------
    init_scale : float
        The first S. It may be too large, such as 2**32: the first steps are then skipped until it
        fits.
    growth_factor, backoff_factor : float
        The factors by which S is multiplied after ``growth_interval`` finite steps in a row, and
        after a step that was not finite.
    growth_interval : int
        Finite steps in a row before S grows. It must be shorter than the run, or S never grows.
    min_scale, max_scale : float
        S never leaves this range; ``max_scale=None`` is 2**24, or ``init_scale`` if that is larger.
        Below 1 it makes gradients smaller, which a loss summed over many
        pixels needs: the gradients of its weights exceed 65504, and no S of 1 or more fits; try
        ``min_scale=2.0**-10``. A ``max_scale`` above 2**126 counts as 2**126: no step can
        divide by more.

    Raises
    ------
    ValueError, TypeError
        If a factor is not a power of two, on the wrong side of 1, or the range does not
        contain ``init_scale``; if an argument is not a number.

    References
    ----------
    NVIDIA, "Training With Mixed Precision", section "Choosing A Scaling Factor"; the names are
    from PyTorch's ``GradScaler``.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        max_scale: Optional[float] = None,
    ) -> None:
        self.scale = _power_of_two("init_scale", init_scale)
        self.growth_factor = _power_of_two("growth_factor", growth_factor)
        self.backoff_factor = _power_of_two("backoff_factor", backoff_factor)
        self.min_scale = _power_of_two("min_scale", min_scale)
        if max_scale is None:
            max_scale = max(2.0**24, self.scale)
        self.max_scale = min(_power_of_two("max_scale", max_scale), LARGEST_SCALE)
        if self.growth_factor <= 1:
            raise ValueError(f"growth_factor must be larger than 1, received {growth_factor!r}")
        if self.backoff_factor >= 1:
            raise ValueError(f"backoff_factor must be smaller than 1, received {backoff_factor!r}")
        if not self.min_scale <= self.scale <= self.max_scale:
            raise ValueError(
                f"init_scale must lie between min_scale {min_scale} and max_scale "
                f"{self.max_scale}, "
                f"received {init_scale}"
            )
        self.growth_interval = whole_number("growth_interval", growth_interval, unit=" step")
        self.growth_tracker = 0

    @property
    def can_shrink(self) -> bool:
        """Whether S is above ``min_scale``."""
        return self.scale > self.min_scale

    def update(self, grads_finite: bool) -> None:
        """Advance by one step; grow on the ``growth_interval``-th finite step in a row.

        If the interval was lowered below the steps that count already, the next one grows S.
        """
        if not grads_finite:
            self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            self.growth_tracker = 0
            return
        self.growth_tracker += 1
        if self.growth_tracker >= self.growth_interval:  # above it if that was lowered on the way
            self.scale = min(self.scale * self.growth_factor, self.max_scale, LARGEST_SCALE)
            self.growth_tracker = 0


class MeasuredLossScale(LossScale):
    """S follows the largest number of recent backward passes, so that no step is lost to find it.

    On a CPU with native operators every backward pass notes the largest number that it rounds to
    float16. Gradients are linear in S: after the first step S leaves ``margin`` powers of two to
    65504, and before a gradient grows beyond that S shrinks. A step that overflows nevertheless is
    skipped, and the next S fits.

    After a step that no measured number explains, such as one with a NaN among its images or an
    overflow in a sum over devices, S is halved too, but not below 1 by these alone; every
    ``interval`` steps one such halving is undone.

    Where nothing is measured (on a GPU, in several processes, without a cast, in formats of 8 or 6
    bits) S doubles after each step until one overflows, which is skipped; from then on it is a
    :class:`DynamicLossScale`.

    Parameters
    ----------
    init_scale : float
        The first S; small, so that the first step does not overflow.
    margin : int
        How many times the largest recent gradient may double before a step overflows, 1 to 30.
    interval : int
        Steps that are recent: from so many to twice as many. Where nothing is measured, finite
        steps in a row before S grows.
    min_scale, max_scale : float
        S never leaves this range.

    Raises
    ------
    ValueError, TypeError
        If a number is out of range, or a scale no power of two.

    References
    ----------
    The scaling factors of FP8 in NVIDIA's Transformer Engine, from a history of largest numbers.
    """

    def __init__(
        self,
        init_scale: float = 1.0,
        margin: int = 3,
        interval: int = 500,
        min_scale: float = 2.0**-24,
        max_scale: float = 2.0**24,
    ) -> None:
        self.scale = _power_of_two("init_scale", init_scale)
        self.min_scale = _power_of_two("min_scale", min_scale)
        self.max_scale = _power_of_two("max_scale", max_scale)
        self.margin = whole_number("margin", margin)
        if margin > _COUNTS["margin"][1]:
            raise ValueError(f"margin must be at most {_COUNTS['margin'][1]}, received {margin}")
        self.growth_interval = whole_number("interval", interval, unit=" step")
        if not self.min_scale <= self.scale <= self.max_scale <= LARGEST_SCALE:
            raise ValueError(
                f"init_scale must lie between min_scale {min_scale} and max_scale {max_scale}, "
                f"which is at most 2**126; received {init_scale}"
            )
        self.growth_tracker = 0
        self.largest = self.largest_before = 0.0  # of true gradients, in two intervals
        self.backoff = 0  # halvings that no measured number explains
        self.searches = True

    @property
    def can_shrink(self) -> bool:
        """Whether S is above ``min_scale``, and above 1 or a smaller S that fits the numbers."""
        return self.scale > max(self.min_scale, self._floor)

    @property
    def _fitting(self) -> float:
        """The S that leaves the margin to the largest recent gradient."""
        recent = max(self.largest, self.largest_before)
        limit = FLOAT16.max / 2.0**self.margin
        return 2.0 ** (math.frexp(limit / recent)[1] - 1) if recent else math.inf

    @property
    def _floor(self) -> float:
        return min(1.0, self._fitting)

    @property
    def measures(self) -> bool:
        """True."""
        return True

    def update(self, grads_finite: bool) -> None:
        """Advance by one step in which nothing was measured."""
        self.advance(grads_finite, None)

    def advance(self, grads_finite: bool, largest: Optional[float]) -> None:
        """Advance by one step; ``largest``, if it is known, has the factor S."""
        if largest is None:
            scale = self._searched(grads_finite)
        else:
            scale = self._fitted(grads_finite, largest)
        self.scale = min(max(scale, self.min_scale), self.max_scale)

    def _searched(self, grads_finite: bool) -> float:
        self.searches = self.searches and grads_finite
        self.growth_tracker = self.growth_tracker + 1 if grads_finite else 0
        if not grads_finite:
            return self.scale / 2 if self.can_shrink else self.scale
        if not self.searches and self.growth_tracker < self.growth_interval:
            return self.scale
        self.growth_tracker = 0
        return 2 * self.scale

    def _fitted(self, grads_finite: bool, largest: float) -> float:
        halves = not grads_finite and largest <= FLOAT16.max and self.can_shrink
        self.backoff += halves
        self.largest = max(self.largest, largest / self.scale)
        fitting, floor = self._fitting, self._floor
        self.growth_tracker += 1
        if self.growth_tracker >= self.growth_interval:
            self.largest, self.largest_before, self.growth_tracker = 0.0, self.largest, 0
            self.backoff = max(self.backoff - 1, 0)
        if fitting == math.inf:
            return self.scale / 2 if halves else self.scale
        return max(math.ldexp(fitting, -self.backoff), floor)


def as_loss_scale(value: Union[str, float, LossScale]) -> LossScale:
    """Return the loss scale that a short form stands for.

    Parameters
    ----------
    value : str, float or LossScale
        ``"dynamic"``, ``"measured"``, ``"none"``, a power of two (also as text, as on a command
        line), or an object that is returned as it is.

    Raises
    ------
    ValueError
        If a text is none of these or a number is not a power of two.
    TypeError
        If ``value`` is of another kind.
    """
    if isinstance(value, LossScale):
        return value
    if value == "dynamic":
        return DynamicLossScale()
    if value == "measured":
        return MeasuredLossScale()
    if value == "none":
        return NoLossScale()
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(
                f"a loss scale is {_WORDS} or a power of two, received {value!r}"
            ) from None
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise TypeError(
            f"a loss scale is {_WORDS}, a power of two or a LossScale, received {value!r}"
        )
    return StaticLossScale(value)
