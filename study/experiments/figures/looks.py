"""Looks of the rows of experiments, and lines that several figures have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from mpgluon_tools.plots import FORMAT_LOOKS

import numpy as np

__all__ = ["BELOW", "LOOKS", "WIDTH", "finite", "line_of", "step_curve"]

WIDTH = 6.2  # inches of every picture
LOOKS: dict[str, Mapping[str, Any]] = {
    **FORMAT_LOOKS,
    "static_float16": {"color": "#009E73", "marker": "v", "linestyle": (0, (5, 1, 1, 1, 1, 1))},
    # how updates of bfloat16 weights are rounded
    "nearest": {"color": "0.45", "marker": "x"},
    "stochastic": {"color": "#CC79A7", "marker": "D"},
    "kahan": {"color": "#E69F00", "marker": "P"},
    # what shares a scale in eight bits
    "tensor": FORMAT_LOOKS["mixed_float8"],
    "mx": {"color": "#CC79A7", "marker": "D"},
    "none": {"color": "0.45", "marker": "x"},
    # whose Tensor Core
    "volta": {"color": "#CC79A7", "marker": "D"},
    "ampere": {"color": "#E69F00", "marker": "P"},
    "hopper": {"color": "#009E73", "marker": "v"},
}
BELOW: dict[str, Any] = {"loc": "outside lower center", "frameon": False, "columnspacing": 1}


def line_of(row: str) -> dict[str, Any]:
    """Return the look of a row's line, without its marks."""
    return {key: value for key, value in LOOKS[row].items() if key != "marker"}


def finite(values: Sequence[Optional[float]]) -> Any:
    """Return an array with NaN, a gap in a line, for values that are not finite."""
    return np.array([math.nan if value is None else value for value in values])


def step_curve(axes: Any, changes: Sequence[Any], steps: int, **look: Any) -> None:
    """Draw a loss scale that is given by its changes, up to the end of the last step."""
    places, scales = zip(*changes)
    axes.step([*places, steps + 1], [*scales, scales[-1]], where="post", **look)
    axes.set_yscale("log", base=2)
    axes.set_ylabel("loss scale S")
