"""The factors by which a step multiplies gradients: 1/S and a clip coefficient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from mpgluon.errors import TrainerStateError

__all__ = ["Factors"]

# Normal FP32 numbers: MXNet's operators receive a factor as text, and read no subnormal.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**128


@dataclass(frozen=True)
class Factors:
    """The factors of one step's gradients, in addition to the user's own."""

    divisor: float = 1.0
    coefficient: float = 1.0
    # Two counts of the Trainer's updates; ``None`` if the step was skipped.
    updates_before: Optional[tuple[int, int]] = None

    def fit(self, rescale: float, *, can_shrink: bool) -> bool:
        """Whether MXNet's operators can read the product of all factors.

        If not, the step is skipped like one that overflows, and the loss scale shrinks.

        Parameters
        ----------
        rescale : float
            The user's factor.
        can_shrink : bool
            Whether the loss scale can.

        Raises
        ------
        TrainerStateError
            If it cannot shrink.
        """
        factor = rescale / self.divisor * (self.coefficient or 1.0)
        if self.divisor == 1 or _SMALLEST <= abs(factor) < _LARGEST:
            return True
        if abs(factor) < 1 and can_shrink:
            return False
        raise TrainerStateError(
            f"the loss scale {self.divisor:g} cannot be used: the step would multiply gradients by "
            f"{factor:g}, which is not a normal FP32 number; choose one between 2**-100 and 2**100"
        )
