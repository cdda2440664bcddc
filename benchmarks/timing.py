"""Timing several functions in turn, as :mod:`mpgluon.tools.timing` does it."""

from mpgluon.tools.timing import Quartiles, interleave, quartiles, ratios, turns

__all__ = ["Quartiles", "interleave", "quartiles", "ratios", "turns"]
