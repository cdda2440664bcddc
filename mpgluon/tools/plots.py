"""Plots of the records of a training."""

import mpgluon_tools.plots as _home
from mpgluon_tools.plots import *  # noqa: F403

__all__ = _home.__all__
