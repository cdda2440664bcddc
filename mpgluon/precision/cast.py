"""What one cast of a network remembers: its policy, and what its parameters stand for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

import mxnet as mx
from mxnet import gluon

from mpgluon.policy import Policy

__all__ = ["Cast", "cast_of"]


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


def cast_of(parameter: gluon.Parameter) -> Optional[Cast]:
    """Return the cast of the network that a parameter belongs to."""
    owner: Optional[Cast] = vars(parameter).get("mpgluon_cast")
    return owner
