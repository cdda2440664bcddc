"""Recurrent networks: an LSTM that judges reviews, in each format and seed, and the section on it.

Accuracies are shown in points: hundredths of the test reviews.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Optional

from experiments.experiment import Group, Record, Section
from experiments.reader import Settings
from experiments.recurrent_figure import LOOKS, draw_runs
from experiments.recurrent_runs import BAG, BASE, OTHER_ORDER, ROWS, experiments, run_name
from experiments.runner import command_for
from experiments.statistics import (
    CONFIDENCE,
    Comparison,
    compare,
    detectable_difference,
    holm,
)
from experiments.wording import interval, one_or_range, plus_minus, signed
from mpgluon.tables import Table

__all__ = ["GROUP", "section"]

_LAYERS = {"lstm": "one operator", "cells": "cells", "bag": "none: a bag of words"}
_EXAMPLE = (
    "although the plot was funny , the end was not very good",
    "although the end was not very good , the plot was funny",
)


Runs = Mapping[str, Mapping[int, Record]]
"""Records by row and seed; only rows that have one."""


def section(records: Mapping[str, Record]) -> Section:
    """Return table, statements and picture."""
    runs: dict[str, dict[int, Record]] = {}
    for name, row in ROWS.items():
        for seed in row.seeds:
            if run_name(name, seed) in records:
                runs.setdefault(name, {})[seed] = records[run_name(name, seed)]
    parts = [_protocol(), _table(runs), _verdict(runs), _order(runs)]
    figures: dict[str, Any] = {}
    drawn = {name: runs[name] for name in LOOKS if name in runs}
    if drawn:
        figures["recurrent"] = partial(draw_runs, runs=drawn)
        parts.append(
            "![Training loss, test accuracy and loss scale, a column for each seed and a line for "
            "each format](results/recurrent.png)"
        )
    missing = [one.name for one in experiments() if one.name not in records]
    if missing:
        parts.append(f"Not run yet: {', '.join(missing)}.")
    return Section("\n\n".join(part for part in parts if part), figures)


def _protocol() -> str:
    one = Settings()
    return (
        f"An embedding ({one.embedding}), an LSTM ({one.hidden}) and a dense layer read short film "
        f'reviews made by a small grammar, such as "{_EXAMPLE[0]}" (a bad one) and '
        f'"{_EXAMPLE[1]}" (a good one, of the same words). They train on '
        f"{one.training_reviews:,} reviews, {100 * one.label_noise:g} % of them with the wrong "
        f"label, and are tested on {one.test_reviews:,} others, with right labels, in which "
        f"adjectives also meet negators that they never met in training. Adam, learning rate "
        f"{one.learning_rate:g} falling to 0, batches of {one.batch_size}, {one.epochs} epochs, "
        f"gradients clipped to a norm of {one.max_norm:g} with `amp.clip_global_norm`, and a "
        "dynamic loss scale in float16. A seed decides the first weights and the order of the "
        "reviews, for all formats alike.\n\n"
        "`gluon.rnn.LSTM` is one operator for all words of a review. On a CPU its inputs, weights "
        "and outputs are rounded to 16 bits, and what it hands on from word to word stays in FP32. "
        'Therefore the rows "cells": `LSTMCell.unroll`, the same network with the same first '
        "weights, in which float16 rounds each sum, gate and state at every word (bfloat16 the "
        "matrix products and their sums). "
        f"`{OTHER_ORDER}` is a control: FP32 as in the first row, but for the order in which "
        "numbers are added up."
    )


def _points(runs: Mapping[int, Record]) -> dict[int, float]:
    return {seed: 100 * run.outcome.figures["test_accuracy"] for seed, run in runs.items()}


def _comparison(runs: Runs, name: str) -> Optional[Comparison]:
    """Compare a row's accuracies with FP32's of the same seeds; ``None`` without a pair."""
    ours, base = _points(runs.get(name, {})), _points(runs.get(BASE, {}))
    seeds = sorted(ours.keys() & base.keys())
    if name == BASE or not seeds:
        return None
    return compare([ours[seed] for seed in seeds], [base[seed] for seed in seeds])


def _table(runs: Runs) -> str:
    rows = []
    for name, of_row in runs.items():
        figures = [run.outcome.figures for run in of_row.values()]
        found = None if name == BAG else _comparison(runs, name)
        has_scale = Settings(dtype=ROWS[name].dtype).has_loss_scale
        rows.append([
            ROWS[name].dtype,
            _LAYERS[ROWS[name].layer],
            plus_minus(list(_points(of_row).values()), 1),
            "-" if found is None else f"{signed(found.mean)} ({interval(found)})",
            plus_minus([one["final_loss"] for one in figures], 3),
            f"{one_or_range([one['skipped_steps'] for one in figures])} of {figures[0]['steps']}",
            one_or_range([one["clipped_steps"] for one in figures]),
            one_or_range([one["final_scale"] for one in figures]) if has_scale else "none",
            f"`{command_for(f'recurrent/{name}')}`",
        ])  # fmt: skip
    headings = ["format", "LSTM", "test accuracy (points)",
                f"mean difference to FP32 (points) and its {100 * CONFIDENCE:g} % interval",
                "training loss, last epoch", "skipped steps", "clipped steps",
                "final loss scale", "command"]  # fmt: skip
    return Table(headings, rows).to_markdown() if rows else ""


def _verdict(runs: Runs) -> str:
    """Return what the differences to FP32 amount to, in words that depend on them."""
    rows = [name for name, row in ROWS.items() if row.dtype != "float32"]
    found = {name: one for name in rows if (one := _comparison(runs, name)) and one.pairs > 1}
    if not found:
        return ""
    corrected = dict(zip(found, holm([one.t_test for one in found.values()])))
    apart = [name for name, p in corrected.items() if p < 1 - CONFIDENCE]
    words = "; ".join(f"{name} differs from FP32 by {signed(found[name].mean)}" for name in apart)
    sentences = [
        f"**{words} points**, by paired t-tests after Holm's correction."
        if apart
        else "**No row in 16 bits differs from FP32 by more than chance**: the least p-value of "
        f"the paired t-tests, corrected for {len(found)} comparisons after Holm, is "
        f"{min(corrected.values()):.2g}."
    ]
    least, most = (choose(found, key=lambda name: found[name].spread) for choose in (min, max))
    pairs = min(one.pairs for one in found.values())
    low, high = (detectable_difference(found[name].spread, pairs) for name in (least, most))
    sentences.append(
        f"Differences vary between seeds with standard deviations of {found[least].spread:.2f} "
        f"({least}) to {found[most].spread:.2f} points ({most}), so {pairs} seeds would show a "
        f"true difference of {low:.1f} to {high:.1f} points in four runs of five, before that "
        "correction."
    )
    control = _comparison(runs, OTHER_ORDER)
    if control is not None and control.pairs > 1:
        sentences.append(
            f"FP32 itself, with its sums in another order, differs by {signed(control.mean)} "
            f"points ({interval(control)}), with a standard deviation of {control.spread:.2f}."
        )
    return " ".join(sentences)


def _order(runs: Runs) -> str:
    if BAG not in runs or BASE not in runs:
        return ""
    (bag,), base = _points(runs[BAG]).values(), _points(runs[BASE]).values()
    return (
        f"Without order: the mean of the words' embeddings and two dense layers, trained alike, "
        f"reach {bag:.1f} points. Guessing gets 50, and the worst LSTM in FP32 {min(base):.1f}."
    )


GROUP = Group("recurrent", "Recurrent networks", experiments, section)
