"""Casting networks: which operator computes in which format, and the arithmetic behind it."""

from mpgluon.cast.block import NORMALIZATION_LAYERS, CastReport, autocast, cast_block, restore

__all__ = ["NORMALIZATION_LAYERS", "CastReport", "autocast", "cast_block", "restore"]
