"""Recurrent networks: an LSTM that classifies reviews, in each format and with five seeds.

Accuracies are in points: hundredths of the test reviews.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any

from study.experiments import figures
from study.experiments.cells import mean_and_interval, one_or_range, plus_minus
from study.experiments.experiment import Experiment, Group, Outcome, Place, Records
from study.experiments.loop import WINDOW
from study.experiments.reader import ReaderSettings, train
from study.experiments.seeds import ComparedRows
from study.experiments.statistics import PairedComparison, detectable_difference

__all__ = ["BAG", "BASE", "GROUP", "OTHER_ORDER", "ROWS"]

_SEEDS = (0, 1, 2, 3, 4)
BASE, OTHER_ORDER, BAG = "float32", "float32-cells", "float32-bag"
_LAYERS = {"lstm": "one operator", "cells": "cells", "bag": "none: a bag of words"}
ROWS = {  # format and layer, as in ReaderSettings
    BASE: ("float32", "lstm"),
    "float16": ("float16", "lstm"),
    "mixed_float16": ("mixed_float16", "lstm"),
    "bfloat16": ("bfloat16", "lstm"),
    OTHER_ORDER: ("float32", "cells"),
    "float16-cells": ("float16", "cells"),
    "bfloat16-cells": ("bfloat16", "cells"),
    BAG: ("float32", "bag"),
}


def _experiment(row: str, seed: int) -> Experiment:
    dtype, layer = ROWS[row]
    settings = ReaderSettings(dtype=dtype, layer=layer, seed=seed)
    return Experiment(_Recurrent.name(row, seed), asdict(settings), partial(_run, settings))


def _run(settings: ReaderSettings, place: Place) -> Outcome:  # noqa: ARG001 - it needs no files
    return train(settings)


@dataclass(frozen=True)
class _Recurrent(ComparedRows):
    """The runs that exist, and results computed from them; comparisons need all of them."""

    group, seeds, base = "recurrent", _SEEDS, BASE
    settings = ReaderSettings()
    control = OTHER_ORDER

    def table(self) -> list[list[str]]:
        """Return the cells of the table of all rows with a run."""
        rows = []
        for row, (dtype, layer) in ROWS.items():
            found = [run.outcome.figures for run in self.runs(row).values()]
            if not found:
                continue
            paired = row not in (BASE, BAG) and len(self.points(row).keys() & self.points(BASE)) > 1
            rows.append([
                dtype,
                _LAYERS[layer],
                plus_minus([100 * one["test_accuracy"] for one in found], 1),
                mean_and_interval(self.comparison(row)) if paired else "-",
                plus_minus([one["final_loss"] for one in found], 3),
                f"{one_or_range([one['skipped_steps'] for one in found])} of {found[0]['steps']}",
                one_or_range([one["clipped_steps"] for one in found]),
                one_or_range([one["final_scale"] for one in found])
                if ReaderSettings(dtype=dtype).has_loss_scale
                else "none",
                f"`recurrent/{row}`",
            ])  # fmt: skip
        return rows

    def short_table(self) -> list[list[str]]:
        """Return the first cells of `table`, of the formats with one operator for the LSTM."""
        return [row[:4] for row in self.table() if row[1] == _LAYERS["lstm"]]

    @cached_property
    def compared(self) -> dict[str, PairedComparison]:
        """The rows in 16 bits against FP32."""
        rows = [row for row, (dtype, _) in ROWS.items() if dtype != "float32"]
        return {row: self.comparison(row) for row in rows}

    def steadiest(self, *, most: bool = True) -> dict[str, Any]:
        """Return the row whose differences vary least, or most, and what its seeds could show."""
        choose = min if most else max
        row = choose(self.compared, key=lambda name: self.compared[name].spread)
        one = self.compared[row]
        return {
            "row": row,
            "spread": one.spread,
            "pairs": one.pairs,
            "detectable": detectable_difference(one.spread, one.pairs),
        }


def _draw(figure: Any, records: Records) -> None:
    runs = {row: _Recurrent(records).runs(row) for row in ROWS}
    figures.draw_recurrent(figure, runs, WINDOW)


GROUP = Group(
    "recurrent",
    [_experiment(row, seed) for row in ROWS for seed in (_SEEDS if row != BAG else _SEEDS[:1])],
    _Recurrent,
    {"recurrent": _draw},
)
