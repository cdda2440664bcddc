"""What computes in which format: casting networks, and the arithmetic behind it."""

from mpgluon.precision.autocast import autocast
from mpgluon.precision.casting import NORMALIZATION_LAYERS, CastReport, cast_block, restore

__all__ = ["NORMALIZATION_LAYERS", "CastReport", "autocast", "cast_block", "restore"]
