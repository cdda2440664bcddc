"""What computes in which format: casting networks, and the arithmetic behind it."""

from mpgluon.cast.block import NORMALIZATION_LAYERS, CastReport, autocast, cast_block, restore

__all__ = ["NORMALIZATION_LAYERS", "CastReport", "autocast", "cast_block", "restore"]
