"""Autocast: FP32 parameters, 16-bit computation."""

from __future__ import annotations

from typing import Union

from mxnet import gluon

from mpgluon.cast.block import CastReport, KeepFP32, apply_policy, dtype_of_argument
from mpgluon.numerics.policy import Policy

__all__ = ["autocast"]


def autocast(
    net: gluon.Block, dtype: Union[str, type, Policy] = "float16", *, keep_fp32: KeepFP32 = ()
) -> CastReport:
    """Make a network compute in 16 bits while its parameters stay FP32, in place.

    Weights are rounded each time they are used, so the optimizer needs no master weights:
    they are the weights. ``amp.restore`` takes it off again.

    Parameters
    ----------
    net : gluon.Block
        With or without initialized parameters, hybridized or not.
    dtype : str, NumPy dtype or Policy
        ``"float16"``; ``"bfloat16"``, on a CPU only, native where the processor has it and else
        emulated; or a policy.
    keep_fp32 : iterable of block types and block instances
        Blocks that compute in FP32, with everything inside them. Normalization needs no
        mention: its sums are FP32 under every policy.

    Returns
    -------
    CastReport

    Raises
    ------
    ValueError, PrecisionError
        As for :func:`mpgluon.cast_block`.
    """
    if isinstance(dtype, Policy):
        return apply_policy(net, dtype, keep_fp32)
    name = dtype_of_argument(dtype)
    if name not in ("float16", "bfloat16"):
        raise ValueError(f'autocast takes "float16" or "bfloat16", received {dtype!r}')
    return apply_policy(net, Policy.parse(f"mixed_{name}"), keep_fp32)
