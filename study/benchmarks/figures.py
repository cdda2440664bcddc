"""Figures of a benchmark: ratios as bars or dots, and cost against arithmetic; as PNG files.

Matplotlib is imported only when one is drawn. Each format has the look of
:data:`mpgluon_tools.plots.FORMAT_LOOKS`. Figures can be read without colour: bars have their names
and numbers, and formats differ in marks and line styles.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, mode
from typing import Any, Optional

from mpgluon_tools.plots import FORMAT_LOOKS
from mpgluon_tools.timing import Quartiles

import numpy as np

from study.benchmarks.growth import growth
from study.benchmarks.memory import largest_batch, peaks_by_batch
from study.benchmarks.race import CaseResult
from study.benchmarks.report import compared, duration, rounded
from study.benchmarks.tuning import gains

__all__ = ["draw_growth", "draw_memory", "draw_networks", "draw_ratios", "draw_tuning",
           "save_figure"]  # fmt: skip

_FILE: dict[str, Any] = {"dpi": 160, "bbox_inches": "tight", "pad_inches": 0.1}
_WIDTH = 6.0  # inches: words of the usual size can be read on a page of 420 pixels
# The limit of a float16 step: docs/performance.md.
_TARGET = 1.35
# Right end of a panel's numbers, in units of its width.
_RATIO_AT, _TIME_AT = 1.17, 1.42
_SPEED_AT, _GAIN_AT = 1.22, 1.47  # the same of a log of tuning
_TITLE_AT = -0.6  # left end of its title, above the contestants' names
_COLUMN = 0.24  # the width of narrower columns of numbers
_WHISKERS: dict[str, Any] = {"color": "black", "capsize": 3}
_RIM: dict[str, Any] = {"color": "white", "capsize": 4, "linewidth": 3.5, "capthick": 3}  # on black
_FORMAT = re.compile(r"\b(autocast float16|float32|float16|bfloat16)\b")  # in a contestant's name


def save_figure(path: Path, cases: Sequence[CaseResult], *, title: str) -> None:
    """Write the figure of :func:`draw_ratios`, or of what else suits the cases, to a PNG file.

    It is about 1,000 pixels wide.
    """
    from matplotlib.figure import Figure

    if cases[0].name == "scale":
        sweeps = len({case.settings["sweep"] for case in cases if case.results})
        size, draw = (_WIDTH, 1.0 + 3.4 * sweeps), draw_growth
    elif cases[0].name == "memory":
        size, draw = (_WIDTH, 4.8), draw_memory
    elif cases[0].name.startswith("zoo"):
        size, draw = (_WIDTH, 2.5 + 0.36 * len(cases)), draw_networks
    elif cases[0].name == "tuning":
        rows = sum(len(case.results) + 1.5 for case in cases)
        size, draw = (_WIDTH, 1.2 + 0.34 * rows), draw_tuning
    else:
        rows = sum(len(case.results) + len(case.failures) + 1.5 for case in cases)
        size, draw = (_WIDTH, 1.2 + 0.28 * rows), draw_ratios
    figure = Figure(figsize=size, layout="constrained")
    draw(figure, cases)
    figure.suptitle(title)
    figure.savefig(path, **_FILE)


def draw_ratios(figure: Any, cases: Sequence[CaseResult]) -> list[Any]:
    """Draw the time of each contestant relative to the first of its case; one panel for each case.

    Bars begin at 1 and go to the median of the ratios, on a logarithmic axis; whiskers are their
    quartiles. Bars have the colour of their format, if they have one; bars of slower contestants
    are hatched. Each has its ratio and seconds as text. The figure is an empty one with a
    constrained layout.
    """
    heights = [len(case.results) + len(case.failures) for case in cases]
    panels = figure.subplots(
        len(cases), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    for axes, case in zip(panels, cases):
        _draw_case(axes, case)
    _write_beside(panels[0], _RATIO_AT, -1, "ratio")
    _write_beside(panels[0], _TIME_AT, -1, "time")
    ratios = [case.relative(result) for case in cases for result in case.results]
    low = min([0.5, *(ratio.lower for ratio in ratios if ratio is not None)])
    high = max([2.0, *(ratio.upper for ratio in ratios if ratio is not None)])
    ends = math.floor(math.log2(low)), math.ceil(math.log2(high))
    powers = range(ends[0], ends[1] + 1, 1 if ends[1] - ends[0] < 8 else 2)
    panels[-1].set_xlim(low / 1.2, high * 1.2)
    panels[-1].set_xticks(
        [2.0**power for power in powers],
        [f"1/{2**-power}" if power < 0 else f"{2**power}" for power in powers],
    )
    panels[-1].set_xlabel(
        "time of a run, relative to the first of each group\n"
        "(left is faster); whiskers: quartiles of the rounds"
    )
    return list(panels)


def _draw_case(axes: Any, case: CaseResult) -> None:
    axes.set_xscale("log", base=2)
    axes.axvline(1, color="black", linewidth=1, zorder=3)  # above the rims
    for place, result in enumerate(case.results):
        ratio = case.relative(result)
        if ratio is not None:
            color = _look(result.name)["color"]
            slower = {"facecolor": "white", "hatch": "///"} if ratio.median >= 1 else {}
            look = {"facecolor": color, "edgecolor": color, **slower}
            axes.barh(place, ratio.median - 1, left=1, height=0.7, **look)
            spread = [[ratio.median - ratio.lower], [ratio.upper - ratio.median]]
            for line in (_RIM, _WHISKERS):
                axes.errorbar(ratio.median, place, xerr=spread, linestyle="none", **line)
            _write_beside(axes, _RATIO_AT, place, f"{ratio.median:.2f}")
        _write_beside(axes, _TIME_AT, place, duration(result.time.median))
    for place, _ in enumerate(case.failures, len(case.results)):
        _write_beside(axes, _TIME_AT, place, "no result")
    names = [result.name for result in case.results]
    names += [failure.name for failure in case.failures]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="0.85")
    axes.set_axisbelow(True)
    axes.set_title(case.title, loc="left", x=_TITLE_AT, fontsize="medium")


def _look(name: str) -> Mapping[str, Any]:
    """Return the look of the format in a contestant's name, grey if there is none."""
    found = _FORMAT.search(name)
    if found is None:
        return {"color": "0.5"}
    return FORMAT_LOOKS[found[0].replace("autocast ", "mixed_")]


def _write_beside(axes: Any, right: float, place: float, words: str) -> None:
    """Write to the right of a row, up to a place in units of the panel's width."""
    where = axes.get_yaxis_transform()
    axes.text(right, place, words, ha="right", va="center", transform=where)


def draw_networks(figure: Any, cases: Sequence[CaseResult]) -> Any:
    """Draw the ratios of all networks to their baselines as dots with quartiles; return the panel.

    Networks are sorted by the ratio of the first contestant after the baseline; below them are the
    geometric means. Each has its median and the baseline's time as text. The figure is an empty
    one with a constrained layout.
    """
    axes = figure.subplots()
    found = compared(cases)
    first = next(iter(found.values()), {})
    order = sorted(range(len(cases)), key=lambda at: first[at].median if at in first else 0.0)
    for line, style in ((1.0, "-"), (_TARGET, "--")):
        axes.axvline(line, color="0.4", linewidth=1, linestyle=style, zorder=1)
    mean_at = len(cases) + 0.5
    axes.axhline(len(cases) - 0.25, color="0.4", linewidth=1)
    for column, (name, ratios) in enumerate(found.items()):
        mean = geometric_mean(ratio.median for ratio in ratios.values())
        rows = [row for row, at in enumerate(order) if at in ratios] + [mean_at]
        shown = [ratios[at] for at in order if at in ratios] + [Quartiles(mean, mean, mean)]
        low, middle, high = np.array(shown).T
        look = {**_look(name), "linestyle": "none", "capsize": 2, "markersize": 5}
        beside = 0.36 * (column - (len(found) - 1) / 2)
        places = np.array(rows) + beside
        axes.errorbar(middle, places, xerr=[middle - low, high - middle], label=name, **look)
        right = 1 + _COLUMN * (column + 1)
        _write_beside(axes, right, -1.2, _heading(name))
        for row, ratio in zip(rows, middle):
            _write_beside(axes, right, row, f"{ratio:.2f}")
    right = 1 + _COLUMN * (len(found) + 1.1)
    _write_beside(axes, right, -1.2, _heading(cases[0].baseline))
    for row, at in enumerate(order):
        base = [one.time for one in cases[at].results if one.name == cases[at].baseline]
        _write_beside(axes, right, row, duration(base[0].median) if base else "no result")
    sizes = [tuple(case.settings[name] for name in ("batch_size", "image_size")) for case in cases]
    usual = mode(sizes)
    names = [
        cases[at].settings["model"] + "\nbatch {}, {} px".format(*sizes[at]) * (sizes[at] != usual)
        for at in order
    ]
    title = "training step, batch {}, {} px\nunless a row has others".format(*usual)
    axes.set_title(title, loc="right", x=0.8, fontsize="medium")
    axes.set_yticks([*range(len(names)), mean_at], [*names, "geometric mean"])
    axes.set_ylim(mean_at + 0.7, -0.7)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    if found:
        figure.legend(loc="outside lower center", ncols=len(found), frameon=False)
    axes.set_xlabel(
        f"time of a training step over that of {cases[0].baseline}\n(left is faster); "
        f"dashed: {_TARGET}; whiskers: quartiles"
    )
    return axes


def _heading(name: str) -> str:
    """Return a contestant's name in a narrow column."""
    return name.removeprefix("mpgluon ").replace(" ", "\n")


def draw_tuning(figure: Any, cases: Sequence[CaseResult]) -> list[Any]:
    """Draw images a second after each measure, on top of those above it; one panel for each case.

    Bars have the colour of the format, whiskers are quartiles. Each bar has its speed as text, and
    the measure's gain. The figure is an empty one with a constrained layout.
    """
    heights = [len(case.results) for case in cases]
    panels = figure.subplots(
        len(cases), 1, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0]  # fmt: skip
    for axes, case in zip(panels, cases):
        found = gains(case)
        look = _look("float32")
        for place, one in enumerate(found):
            look = _look(one.name) if _FORMAT.search(one.name) else look
            speed = one.images_per_second
            axes.barh(place, speed.median, height=0.7, color=look["color"])
            spread = [[speed.median - speed.lower], [speed.upper - speed.median]]
            for line in (_RIM, _WHISKERS):
                axes.errorbar(speed.median, place, xerr=spread, linestyle="none", **line)
            _write_beside(axes, _SPEED_AT, place, rounded(speed.median))
            _write_beside(axes, _GAIN_AT, place, one.words.partition(" ")[0])
        _write_beside(axes, _SPEED_AT, -1, "images/s")
        _write_beside(axes, _GAIN_AT, -1, "times")
        axes.set_yticks(range(len(found)), [one.name for one in found])
        axes.set_ylim(len(found) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(left=0)
        axes.grid(axis="x", color="0.85")
        axes.set_axisbelow(True)
        words = "{model}, batch {batch_size}, {image_size} px".format_map(case.settings)
        title = f"training from JPEG files, {words}"
        axes.set_title(title, loc="left", x=-0.72, pad=20, fontsize="medium")  # above the headings
    panels[-1].set_xlabel(
        "images a second with the measure and those above it\nwhiskers: quartiles"
    )
    return list(panels)


def draw_memory(figure: Any, cases: Sequence[CaseResult]) -> Any:
    """Draw the peak memory of each contestant against the batch size; return the panel.

    The limit of memory, if there is one, is a line, and the legend has the largest batches within
    it. The figure is an empty one with a constrained layout.
    """
    axes = figure.subplots()
    limit = cases[0].settings["memory_limit_mib"]
    for name, peaks in peaks_by_batch(cases).items():
        largest = None if limit is None else largest_batch(peaks, limit)
        within = "" if largest is None else f": {largest} images within the limit"
        mib = [peak.mib for peak in peaks.values()]
        axes.plot(list(peaks), mib, label=name + within, markerfacecolor="none", **_look(name))
    if limit is not None:
        axes.axhline(limit, color="0.4", linewidth=1, linestyle="--", zorder=1)
        where = axes.get_yaxis_transform()
        axes.text(0.01, limit, f"limit: {limit:.0f} MiB", va="bottom", transform=where)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch size")
    axes.set_ylabel("peak memory of the process (MiB)")
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    figure.legend(frameon=False, loc="outside lower center")
    title = "training step of {model}, {image_size} px".format_map(cases[0].settings)
    axes.set_title(title, loc="left", fontsize="medium")
    return axes


def draw_growth(figure: Any, cases: Sequence[CaseResult]) -> list[Any]:
    """Draw time and memory of a training step against its multiply-adds, both logarithmic.

    A row for each sweep; a mark for each point, and the line of the power that fits best. A thin
    line through the last point of the first format grows as the arithmetic does. Returns the panels
    of time from top to bottom, then the panels of memory.
    """
    sweeps: dict[str, list[CaseResult]] = {}
    for case in cases:
        if case.results:
            sweeps.setdefault(case.settings["sweep"], []).append(case)
    grid = figure.subplots(len(sweeps), 2, sharex="row", sharey="col", squeeze=False)
    for (time, memory), (sweep, members) in zip(grid, sweeps.items()):
        for case in members:
            found, label = growth(case), case.settings["dtype"]
            look = {**FORMAT_LOOKS[label], "markerfacecolor": "none"}
            amounts = [amount / 1e9 for amount in found.multiply_adds]
            _draw_growth(time, amounts, found.seconds, found.time_exponent, label, look)
            if found.memory_mib is not None:
                _draw_growth(memory, amounts, found.memory_mib, found.memory_exponent, label, look)
        largest = max(members, key=lambda case: len(case.results))
        amounts = [amount / 1e9 for amount in growth(largest).multiply_adds]
        places, labels = _joined(amounts, [result.name for result in largest.results])
        for axes in (time, memory):
            _draw_proportion(axes)
            names = axes.secondary_xaxis("top")
            names.set_xticks(places, labels, rotation=90)
            names.minorticks_off()
        time.set_title(f"{sweep}: {members[0].settings['fixed']}", loc="left", fontsize="medium")
        time.set_ylabel("seconds per step")
        memory.set_ylabel("peak memory (MiB)")
    for axes in grid[-1]:
        axes.set_xlabel("$10^9$ multiply-adds\nof a forward pass")
    return [*grid[:, 0], *grid[:, 1]]


def _joined(amounts: Sequence[float], names: Sequence[str]) -> tuple[list[float], list[str]]:
    """Return places on a logarithmic axis and their labels, one for neighbours that would touch."""
    least = (max(amounts) / min(amounts)) ** 0.07
    places: list[float] = []
    labels: list[str] = []
    for amount, name in sorted(zip(amounts, names)):
        if places and amount < places[-1] * least:
            places[-1], labels[-1] = math.sqrt(places[-1] * amount), f"{labels[-1]}, {name}"
        else:
            places.append(amount)
            labels.append(name)
    return places, labels


def _draw_growth(
    axes: Any,
    amounts: Sequence[float],
    costs: Sequence[float],
    exponent: Optional[float],
    label: str,
    look: Mapping[str, Any],
) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    if exponent is None:
        axes.plot(amounts, costs, label=label, **{**look, "linestyle": "none"})
    else:
        ends = np.array([min(amounts), max(amounts)])
        # The line of least squares goes through the mean of the logarithms.
        middle, height = np.exp(np.mean(np.log(amounts))), np.exp(np.mean(np.log(costs)))
        axes.plot(amounts, costs, **{**look, "linestyle": "none"})
        axes.plot(ends, height * (ends / middle) ** exponent, **{**look, "marker": None})
        # For the legend alone: mark and line together.
        axes.plot([], [], label=f"{label}: power {exponent:.2f}", **look)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)


def _draw_proportion(axes: Any) -> None:
    """Draw a line of costs that grow as the arithmetic does, as far as the panel shows it."""
    if not axes.lines:
        return
    amounts, costs = axes.lines[0].get_data()
    ends = np.array(axes.get_xlim())
    look = {"color": "0.75", "linewidth": 1, "zorder": 1, "label": "as the arithmetic"}
    axes.plot(ends, costs[-1] * ends / amounts[-1], scalex=False, scaley=False, **look)
    axes.legend(frameon=False, handlelength=1.6, borderpad=0)
