"""What the page says of the parity runs: tables, pictures and a verdict.

Accuracies are shown in points: hundredths of the test images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from experiments import parity, parity_figures
from experiments.experiment import Group, Record, Section
from experiments.parity import (
    BASE,
    CONTROL,
    FIRST_SEEDS,
    FORMATS,
    NETWORKS,
    ROWS,
    SEEDS,
)
from experiments.parity_results import OTHERS, Parity, step_time
from experiments.runner import command_for
from experiments.statistics import CONFIDENCE, detectable_difference, mean_and_spread
from experiments.wording import interval, one_or_range, plus_minus, signed
from mpgluon.tables import Table

__all__ = ["GROUP", "section"]

_SHOWN = "resnet50_v2"  # whose curves are drawn


def section(records: Mapping[str, Record]) -> Section:
    """Return tables, verdict and pictures."""
    found = Parity(records)
    parts = [_protocol(found), _results_table(found)]
    figures: dict[str, Any] = {}
    if found.pooled:
        parts += [_verdict(found), _pooled_table(found), _skipped_steps(found), _power(found)]
        parts.append(_network_table(found))
    if any(found.points(one.name, BASE) for one in NETWORKS):
        figures["parity-accuracy"] = lambda figure: parity_figures.draw_accuracies(figure, found)
        parts.append(
            "![Test accuracy of each run, by network and format](results/parity-accuracy.png)"
        )
    for name, draw, words in (
        ("parity-curves", parity_figures.draw_curves, "Training loss and test accuracy"),
        ("parity-loss-scale", parity_figures.draw_loss_scales, "Loss scale, step by step"),
    ):
        if found.runs(_SHOWN, BASE) and found.runs(_SHOWN, "float16"):
            figures[name] = lambda figure, draw=draw: draw(figure, found, _SHOWN)
            parts.append(f"![{words}, {_SHOWN}](results/{name}.png)")
    if found.missing:
        parts.append(f"Not run yet: {', '.join(found.missing)}.")
    return Section("\n\n".join(part for part in parts if part), figures)


def _protocol(found: Parity) -> str:
    common = parity.COMMON
    words = (
        "Networks are trained from scratch on caltech101-mini: the first 60 photographs of ten "
        f"categories of Caltech 101, {common['train_per_class']} of each for training and the "
        "rest for testing. Many neighbouring files are near-duplicates, so these accuracies are "
        "no result on Caltech 101. The formats of a network have everything in common: "
        f"hyperparameters ({common['optimizer']}, batches of {common['batch_size']}, weight decay "
        f"{common['weight_decay']:g}, crops of at least {100 * common['min_crop_area']:g} % of a "
        "photograph; pixels, peak learning rate and epochs in the table), and for "
        f"each of the seeds {', '.join(map(str, SEEDS))} the split, the initial weights and the "
        "order of the images. `float16` is the cast network with FP32 master weights and a "
        "dynamic loss scale, `mixed_float16` keeps FP32 parameters, `bfloat16` too and needs no "
        f"loss scale; `{CONTROL}` is `float16` with a fixed loss scale of "
        f"{ROWS[CONTROL]['loss_scale']}, for the seeds {', '.join(map(str, FIRST_SEEDS))} only. A "
        "row is the mean over its seeds, ± one standard deviation. Seconds per step are not of "
        "these runs: they are copied from [Time per step](#time-per-step)."
    )
    runs = [found.records[one.name] for one in parity.experiments() if one.name in found.records]
    if runs:
        hours = sum(run.outcome.times["training_seconds"] for run in runs) / 3600
        threads = sorted({run.threads for run in runs})
        words += (
            f" The {len(runs)} runs took {hours:.1f} hours of training, each with "
            f"{' or '.join(map(str, threads))} thread{'s' * (threads != [1])} on a processor that "
            "had other work too."
        )
    return words


def _results_table(found: Parity) -> str:
    rows = []
    for network in NETWORKS:
        for name in ROWS:
            runs = list(found.runs(network.name, name).values())
            if not runs:
                continue
            figures = [run.outcome.figures for run in runs]
            rows.append([
                f"{network.name}, {network.image_size} px, {network.learning_rate:g}, "
                f"{network.epochs} epochs",
                name,
                plus_minus([100 * one["test_accuracy"] for one in figures], 1),
                plus_minus([one["train_loss"] for one in figures], 3),
                one_or_range([one["skipped_steps"] for one in figures]),
                str(figures[0]["steps"]),
                one_or_range([one["final_loss_scale"] for one in figures]),
                *step_time(found.records, network.name, name),
                f"`{command_for(f'parity/{network.name}/{name}')}`",
            ])  # fmt: skip
    if not rows:
        return ""
    headings = ["network", "format", "test accuracy (points)", "final training loss", "skipped",
                "of steps", "final loss scale", "s per step", "relative", "command"]  # fmt: skip
    return Table(headings, rows).to_markdown()


def _verdict(found: Parity) -> str:
    """Return what the tests say, in words that depend on them."""
    if not found.different:
        least = min(found.corrected.values())
        words = (
            f"**No format differs from {BASE} by more than chance** over all networks and seeds: "
            f"the least p-value of the paired t-tests, corrected for {found.tests} comparisons "
            f"after Holm, is {least:.2g}."
        )
    else:
        words = "; ".join(
            f"**{name} differs from {BASE} by {signed(found.pooled[name].mean)} points** "
            f"(corrected p = {found.corrected[name]:.2g})"
            for name in found.different
        )
        words += (
            ", by the paired t-tests over all networks and seeds, corrected for "
            f"{found.tests} comparisons after Holm."
        )
    words = f"{words} {_bounds(found)}"
    if found.equal_float16:
        words += (
            " The runs of `float16` and `mixed_float16` have the same losses, accuracies and loss "
            "scales to the last bit: a master weight rounded to 16 bits after each update, or an "
            "FP32 parameter before each use, is the same number here. They count as one "
            "comparison."
        )
    return words


def _bounds(found: Parity) -> str:
    known = {
        name: one.lower
        for name, one in found.pooled.items()
        if name in FORMATS and math.isfinite(one.lower)
    }
    if not known:
        return "A single pair says nothing of chance."
    worst = min(known, key=lambda name: known[name])
    words = (
        "With pairs taken as independent, the intervals below leave room for a mean loss of "
        f"accuracy of {max(0.0, -known[worst]):.2f} points ({worst})."
    )
    seeds = {name: one for name in ("float16", "bfloat16") if (one := found.by_seed(name))}
    if len(seeds) == 2 and min(one.pairs for one in seeds.values()) > 1:
        intervals = " and ".join(f"{name}'s {interval(one)}" for name, one in seeds.items())
        words += (
            " All networks of a seed share its split; with one mean over the networks for each "
            f"of {seeds['float16'].pairs} seeds, the interval is {intervals}."
        )
    if not math.isnan(found.base_spread):
        words += (
            f" {BASE} alone varies between seeds with a standard deviation of "
            f"{found.base_spread:.2f} points."
        )
    return words


def _pooled_table(found: Parity) -> str:
    rows = [
        [
            name,
            str(one.pairs),
            signed(one.mean),
            interval(one),
            f"{one.t_test:.2g}",
            f"{found.corrected[name]:.2g}",
            f"{one.wilcoxon:.2g}",
        ]
        for name, one in found.pooled.items()
    ]
    headings = ["format", "pairs", f"mean difference to {BASE} (points)",
                f"{100 * CONFIDENCE:g} % interval", "t-test p", "after Holm",
                "Wilcoxon p"]  # fmt: skip
    return Table(headings, rows).to_markdown()


def _skipped_steps(found: Parity) -> str:
    """Return what the steps cost that a dynamic scale skips: the control beside float16."""
    beside = found.comparison(CONTROL, base="float16")
    first = found.comparison("float16", seeds=FIRST_SEEDS)
    if beside is None or beside.pairs == 1 or first is None:
        return ""
    shares = {row: _share_of_skipped(found, row) for row in ("float16", CONTROL)}
    if beside.t_test >= 1 - CONFIDENCE:
        outcome = (
            f"no more than chance: no cost was found, and one of {max(0.0, beside.upper):.2f} "
            "points is not excluded"
        )
    else:
        outcome = "more than chance, " + (
            "so they cost accuracy in runs as short as these" if beside.mean > 0
            else "and not in the direction of a loss"
        )  # fmt: skip
    later = [seed for seed in SEEDS if seed not in FIRST_SEEDS]
    new = found.comparison("float16", seeds=later)
    alone = ""
    if new is not None and new.pairs > 1:
        alone = (
            "; the tables here include those, so that their p-values and intervals are not those "
            f"of a plan made in advance. The new seeds alone give {signed(new.mean)} points "
            f"({interval(new)})"
        )
    return (
        "**Do skipped steps cost accuracy?** A dynamic scale begins at 2^16, and doubles after "
        "each tenth of a run without overflow: that costs runs as short as these "
        f"{shares['float16']} of their steps; `{CONTROL}` skips {shares[CONTROL]}. It differs from "
        f"`float16` by {signed(beside.mean)} points ({interval(beside)}; p = "
        f"{beside.t_test:.2g}), {outcome}. The control, and the seeds "
        f"{' and '.join(map(str, later))}, were added after the seeds before them had left "
        f"`float16` at {signed(first.mean)} points ({interval(first)}; p = {first.t_test:.2g} "
        "before a correction), and having those seeds only favours the control"
        f"{alone}."
    )


def _share_of_skipped(found: Parity, row: str) -> str:
    figures = [r.outcome.figures for n in NETWORKS for r in found.runs(n.name, row).values()]
    skipped, steps = (sum(one[name] for one in figures) for name in ("skipped_steps", "steps"))
    return f"{100 * skipped / steps:.1f} %" if skipped else "none"


def _power(found: Parity) -> str:
    runs = [run for network in NETWORKS for run in found.runs(network.name, BASE).values()]
    images = {run.outcome.figures["test_images"] for run in runs}
    worth = ", ".join(f"{100 / count:g} points (1 of {count})" for count in sorted(images))
    words = (
        f"One test image is worth {worth}. A pair is a network and a seed: same split, same "
        "initial weights, same order. All networks see the same splits, so pairs of one seed are "
        "not quite independent, and the intervals above somewhat too narrow."
    )
    per_network = [
        one for network in NETWORKS for name in OTHERS
        if (one := found.comparison(name, network.name)) and one.pairs > 1
    ]  # fmt: skip
    if not per_network:
        return words
    # The spread of differences within a network and format, over all of them.
    squares = sum((one.pairs - 1) * one.spread**2 for one in per_network)
    spread = math.sqrt(squares / sum(one.pairs - 1 for one in per_network))
    most = max(one.pairs for one in per_network)
    alone = detectable_difference(spread, most)
    pooled = max(one.pairs for one in found.pooled.values())
    together = detectable_difference(spread, pooled)
    return (
        f"{words} Within a network, differences vary with a standard deviation of {spread:.2f} "
        f"points. With {most} seeds a single network's t-test would find a true difference of "
        f"{alone:.1f} points four times in five, and misses most that are smaller; {pooled} pairs "
        f"would find {together:.1f} points. So the rows below are for looking at, and the table "
        "above is the test."
    )


def _network_table(found: Parity) -> str:
    rows = []
    for network in NETWORKS:
        cells = []
        for name in OTHERS:
            one = found.comparison(name, network.name)
            cells.append("-" if one is None else f"{signed(one.mean, 1)} ({interval(one, 1)})")
        spread = mean_and_spread(list(found.points(network.name, BASE).values()) or [math.nan])[1]
        if any(cell != "-" for cell in cells):
            rows.append([network.name, *cells, "-" if math.isnan(spread) else f"{spread:.1f}"])
    headings = ["network", *OTHERS, f"{BASE} between seeds"]
    table = Table(headings, rows).to_markdown()
    return (
        f"Mean difference to {BASE} in points over the seeds that both have, and its "
        f"{100 * CONFIDENCE:g} % interval, not corrected for being many:\n\n{table}"
    )


GROUP = Group("parity", "The same accuracy in every format", parity.experiments, section)
