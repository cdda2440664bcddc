"""Gluon's ``cast`` on a cast network: a restore, or an error that names it.

MXNet's method rounds parameters, or widens rounded ones, and knows no FP32 values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Callable

from mpgluon.cast.fp32 import format_of
from mpgluon.cast.network_cast import NetworkCast
from mpgluon.errors import PrecisionError
from mpgluon.formats.float_format import FLOAT16, FLOAT32

import numpy as np
import numpy.typing as npt
from mxnet import gluon

__all__ = ["guard", "unguard"]

Restore = Callable[[gluon.Block], None]

_logger = logging.getLogger(__name__)


def guard(
    blocks: Iterable[gluon.Block],
    parameters: Iterable[gluon.Parameter],
    network_cast: NetworkCast,
    restore: Restore,
) -> None:
    """Replace the ``cast`` of a cast network's blocks and parameters, until :func:`unguard`."""
    for block in blocks:
        vars(block)["cast"] = partial(_cast_block, block, network_cast, restore)
    for parameter in parameters:
        parameter.cast = partial(_cast_parameter, parameter, network_cast)


def unguard(parts: Iterable[gluon.Block | gluon.Parameter]) -> None:
    """Give blocks and parameters their own ``cast`` back."""
    for part in parts:
        vars(part).pop("cast", None)


def _cast_block(
    block: gluon.Block, network_cast: NetworkCast, restore: Restore, dtype: npt.DTypeLike
) -> None:
    """Restore a block, then cast it as Gluon does; a part of a network can become FP32 only."""
    root, policy = network_cast.root, network_cast.policy
    wide = (np.float32, np.float64) if block is root else (np.float32,)
    if dtype == "bfloat16" or np.dtype(dtype) not in wide:
        raise PrecisionError(
            f"{block.name}.cast({dtype!r}): {root.name} is already cast to {policy}; leave out "
            f"this call, or call mpgluon.restore on {root.name} first"
        )
    restore(block)
    block.cast(dtype)
    _logger.warning(
        "%s.cast(%r) took off its cast to %s and kept the FP32 values of its parameters, as "
        "mpgluon.restore does; to train it further, make a new Trainer",
        *(block.name, dtype, policy),
    )


def _cast_parameter(
    parameter: gluon.Parameter, network_cast: NetworkCast, dtype: npt.DTypeLike
) -> None:
    """Refuse another dtype: a parameter alone cannot be restored."""
    fmt, root = format_of(parameter), network_cast.root.name
    if np.dtype(dtype) != np.dtype(parameter.dtype) or fmt not in (FLOAT16, FLOAT32):
        raise PrecisionError(
            f"{parameter.name}.cast({dtype!r}) would lose its FP32 values: it belongs to {root}, "
            f"which is cast to {network_cast.policy}; call mpgluon.restore on {root} first, after "
            "which its parameters are FP32"
        )
