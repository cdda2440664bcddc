"""Ablations: mixed precision with one measure left out, beside runs that keep it."""

from experiments.ablations.section import ABLATIONS, GROUP

__all__ = ["ABLATIONS", "GROUP"]
