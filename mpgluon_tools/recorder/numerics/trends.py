"""Warnings of a recording before it fails, each with the step at which it could be seen.

The rules look at the steps up to one step only, so that a run that goes on could have been told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from mpgluon_tools.recorder.numerics.files import NumericsStep, Recording, Tensor, TensorName

import numpy as np

__all__ = ["WHY", "Trend", "Trends", "lines_of", "trends_of"]

WHY = {
    "growing activation": "an activation beyond the largest number becomes infinite",
    "vanishing gradient": "gradients below the smallest number become zero",
    "lost updates": "a weight that no update changes does not learn",
    "sinking loss scale": "at a small scale gradients become zero, and skipped steps train nothing",
    "no step made": "skipped steps train nothing, and a smaller loss scale does not help",
}
"""Why each kind of trend matters."""

_DOUBLES = 100  # steps at most
_GROWS = 400  # steps that a growth is fitted to, and in which it must be twofold twice
_FEWEST = 5  # recorded steps among them
_AHEAD = 1000  # steps: growth that overflows later is not a warning
_NEAR = 4.0  # how near to the smallest number the median of a gradient may come
_LOST = 0.5  # share of the updates
_FEWEST_NUMBERS = 30  # of a tensor that a share or a median is computed of
_WINDOW, _SINKS, _SKIPS = 100, 8.0, 3  # steps in which a loss scale sinks, and skipped ones


@dataclass(frozen=True)
class Trend:
    """Something that is about to fail.

    Attributes
    ----------
    step : int
        The first step at which it could be seen.
    kind : str
        Of ``WHY``.
    name : str
        The layer or parameter; empty for the loss scale.
    sentence : str
    fix : str
        The advice.
    """

    step: int
    kind: str
    name: str
    sentence: str
    fix: str


class Trends:
    """The rules, which are given step after step.

    A trend is returned once for each kind and layer.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()
        self._largest: dict[TensorName, list[tuple[int, float]]] = {}
        self._scales: list[tuple[int, float, bool]] = []

    def add_line(self, line: dict[str, Any]) -> list[Trend]:
        """Return the trends that the line of a step shows first."""
        return list(self._new(self._of_scale(line)))

    def add_step(self, step: NumericsStep) -> list[Trend]:
        """Return the trends that the numbers of a recorded step show first."""
        found = [
            *(self._of_activation(step.number, tensor) for tensor in step.of("activation")),
            *(
                _of_gradient(step.number, tensor)
                for tensor in step.of("activation gradient", "gradient")
                if not step.line.get("skipped")
            ),
            *_of_updates(step),
        ]
        return list(self._new(found))

    def _new(self, trends: Iterable[Optional[Trend]]) -> Iterator[Trend]:
        for trend in trends:
            if trend is not None and (trend.kind, trend.name) not in self._seen:
                self._seen.add((trend.kind, trend.name))
                yield trend

    def _of_activation(self, step: int, tensor: Tensor) -> Optional[Trend]:
        """Tell whether the largest value doubles again and again, and is going to overflow."""
        largest, limit = tensor.statistics.largest, tensor.float_format.max
        points = self._largest.setdefault(tensor.id, [])
        if not largest > 0:
            return None
        points.append((step, math.log2(largest)))
        while len(points) > _FEWEST and points[0][0] < step - _GROWS:
            points.pop(0)
        is_half_way = largest**2 > limit  # in exponents; smaller ones grow as training begins
        if not is_half_way or len(points) < _FEWEST or not _grows_throughout(points):
            return None
        rate = _doublings_per_step(points)
        if rate * _DOUBLES < 1:
            return None
        left = (math.log2(limit) - math.log2(largest)) / rate
        if left > _AHEAD:
            return None
        return Trend(
            step,
            "growing activation",
            tensor.id.name,
            f"the largest activation of {tensor.id.name} ({tensor.block}), {largest:.3g}, doubles "
            f"every {1 / rate:.0f} steps: at this rate it exceeds {tensor.format}'s {limit:g} at "
            f"about step {step + left:.0f}",
            "lower the learning rate, clip gradients, or normalize before this layer; bfloat16 has "
            "the range of FP32",
        )

    def _of_scale(self, line: dict[str, Any]) -> Iterator[Optional[Trend]]:
        """Tell whether the loss scale sinks after it had found its level, or has found none."""
        scale, skipped = float(line.get("loss_scale") or 1.0), bool(line.get("skipped"))
        self._scales.append((line["step"], scale, skipped))
        window = [one for one in self._scales if one[0] > line["step"] - _WINDOW]
        self._scales = window
        good = [index for index, one in enumerate(window) if not one[2]]
        if not good:
            if sum(scale <= 1 for _, scale, _ in window) >= _SKIPS:
                yield Trend(
                    line["step"],
                    "no step made",
                    "",
                    f"all {len(window)} steps were skipped, the last ones with a loss scale of "
                    f"{scale:g}: the loss, or a gradient that is not scaled, is not finite",
                    "look for the first layer with mpgluon diagnose, or, in a batch, for NaN",
                )
            return
        settled = window[good[0] :]  # the search for the first scale is behind
        highest = max(scale for _, scale, _ in settled)
        skips = sum(skipped for _, _, skipped in settled)
        if skips >= _SKIPS and scale <= highest / _SINKS:
            yield Trend(
                line["step"],
                "sinking loss scale",
                "",
                f"the loss scale has sunk from {highest:g} to {scale:g} within {len(settled)} "
                f"steps, {skips} of them skipped",
                "the flags of the skipped steps name the layer, and a FlightRecorder keeps such a "
                "step for mpgluon replay",
            )


def lines_of(trends: Sequence[Trend]) -> list[str]:
    """Return trends in words: of several layers with the same at the same step the first one."""
    alike: dict[tuple[int, str], list[Trend]] = {}
    for trend in trends:
        alike.setdefault((trend.step, trend.kind), []).append(trend)
    lines = []
    for first, *others in alike.values():
        names = ", ".join(other.name for other in others[:3])
        also = f" (so too {names}{f' and {len(others) - 3} more' * (len(others) > 3)})"
        lines.append(f"step {first.step}: {first.sentence}{also * bool(others)}; {first.fix}")
    return lines


def trends_of(recording: Recording) -> list[Trend]:
    """Return the warnings of a recording, by the step at which each could be seen first."""
    trends = Trends()
    found = [trend for line in recording.lines for trend in trends.add_line(line)]
    found += [trend for step in recording for trend in trends.add_step(step)]
    return sorted(found, key=lambda trend: trend.step)


def _doublings_per_step(points: Sequence[tuple[int, float]]) -> float:
    steps, logarithms = np.array(points).T
    return float(np.polyfit(steps, logarithms, 1)[0])


def _grows_throughout(points: Sequence[tuple[int, float]]) -> bool:
    """Whether the values have doubled twice, once in each half or nearly so."""
    middle = len(points) // 2
    halves = points[: middle + 1], points[middle:]
    doublings = [half[-1][1] - half[0][1] for half in halves]
    return sum(doublings) >= 2 and min(doublings) >= 0.75


def _of_gradient(step: int, tensor: Tensor) -> Optional[Trend]:
    """Tell whether half of the gradients are near the smallest number of their format."""
    counts = tensor.statistics.counts
    total, fmt = int(counts.sum()), tensor.float_format
    if total < _FEWEST_NUMBERS or fmt.exponent_bits >= 8:
        return None
    share = tensor.share_below(fmt.smallest_subnormal * _NEAR)
    if share < 0.5:
        return None
    return Trend(
        step,
        "vanishing gradient",
        tensor.id.name,
        f"half of the {tensor.id}'s numbers are below {fmt.smallest_subnormal * _NEAR:.2g}, and "
        f"{tensor.format} has none below {fmt.smallest_subnormal:.2g}",
        "the loss scale is too small for them: take a dynamic one, or keep the layer in FP32",
    )


def _of_updates(step: NumericsStep) -> Iterator[Trend]:
    """Yield the parameters whose updates are below half a unit of the weight and are lost."""
    is_exact = step.about.get("update_rounding") != "nearest"  # on average, or in the long run
    if is_exact or not step.line.get("learning_rate"):
        return
    for name, share in step.lost_updates().items():
        fmt = step.tensors[TensorName("update", name)].format
        if share >= _LOST:
            yield Trend(
                step.number,
                "lost updates",
                name,
                f"{100 * share:.0f} % of the updates of {name} are lost: they are below half a "
                f"unit in the last place of its {fmt} weights, which stay as they were",
                "FP32 masters (multi_precision=True), stochastic rounding or Kahan's compensation "
                "keep them"
                if fmt != "float32"
                else "the learning rate is too small for these weights",
            )
