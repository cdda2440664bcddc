"""What one cast of a network remembers: its policy, and what its parameters stand for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Optional

import mxnet as mx
from mxnet import gluon

from mpgluon.cast.told_formats import Told
from mpgluon.numerics.dtypes import cast
from mpgluon.numerics.policy import Policy

__all__ = ["Cast", "cast_of", "fp32_value", "known", "remember"]


@dataclass
class Cast:
    """One application of a policy to a network: what its forwards share."""

    policy: Policy
    root: gluon.Block
    # Which parameters became float16, and the FP32 values that they stand for where they had any:
    # first those from before the cast, then the optimizer's masters.
    fp32_values: dict[gluon.Parameter, Optional[mx.nd.NDArray]] = field(default_factory=dict)
    # Parameters as the forward pass met them, for messages.
    forward_order: dict[gluon.Parameter, None] = field(default_factory=dict)
    # What blocks that were told their format knew before.
    told: dict[gluon.Block, Told] = field(default_factory=dict)
    # Whether a forward pass of a block has come to its end, and what takes the cast off.
    has_computed: bool = False
    undo: Callable[[], None] = lambda: None


def cast_of(parameter: gluon.Parameter) -> Optional[Cast]:
    """Return the cast of the network that a parameter belongs to."""
    owner: Optional[Cast] = vars(parameter).get("mpgluon_cast")
    return owner


def fp32_value(weight: mx.nd.NDArray, known: Optional[mx.nd.NDArray]) -> mx.nd.NDArray:
    """Return what a float16 weight stands for: known FP32 values, but widened where it was written.

    Parameters
    ----------
    weight : NDArray, float16
    known : NDArray of the same shape, FP32, on any device; or None
        An element counts where it rounds to that of ``weight``.

    Returns
    -------
    NDArray
        On the device of ``weight``; ``known`` itself, brought up to date, if it is there. Does not
        wait.
    """
    wide = cast(weight, "float32")
    if known is None:
        return wide
    known = known.as_in_context(weight.context)
    rounded = cast(cast(known, "float16"), "float32")
    return mx.nd.where(rounded == wide, known, wide, out=known)


def known(parameter: gluon.Parameter) -> Optional[mx.nd.NDArray]:
    """Return the FP32 values that are remembered for a parameter, ``None`` if none are."""
    owner = cast_of(parameter)
    return owner.fp32_values.get(parameter) if owner is not None else None


def remember(parameter: gluon.Parameter, value: mx.nd.NDArray) -> None:
    """Remember the array, not a copy, as the FP32 values of a cast network's parameter."""
    owner = cast_of(parameter)
    if owner is not None:
        owner.fp32_values[parameter] = value
