"""The runs of the LSTM that reads reviews: rows of formats and layers, each with several seeds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

from experiments.experiment import Experiment, Outcome, Place
from experiments.reader import Settings, train

__all__ = ["BAG", "BASE", "OTHER_ORDER", "ROWS", "Row", "experiments", "run_name"]

_SEEDS = (0, 1, 2, 3, 4)
BASE, OTHER_ORDER, BAG = "float32", "float32-cells", "float32-bag"


@dataclass(frozen=True)
class Row:
    """Runs that differ in their seed alone.

    Attributes
    ----------
    dtype, layer : str
        As in :class:`experiments.reader.Settings`.
    seeds : tuple of int
    """

    dtype: str
    layer: str
    seeds: tuple[int, ...] = _SEEDS


ROWS = {
    BASE: Row("float32", "lstm"),
    "float16": Row("float16", "lstm"),
    "mixed_float16": Row("mixed_float16", "lstm"),
    "bfloat16": Row("bfloat16", "lstm"),
    OTHER_ORDER: Row("float32", "cells"),
    "float16-cells": Row("float16", "cells"),
    "bfloat16-cells": Row("bfloat16", "cells"),
    BAG: Row("float32", "bag", _SEEDS[:1]),
}


def run_name(row: str, seed: int) -> str:
    """Return the name of an experiment."""
    return f"recurrent/{row}/seed-{seed}"


def experiments() -> list[Experiment]:
    """Return a run for each row and seed."""
    return [_experiment(name, seed) for name, row in ROWS.items() for seed in row.seeds]


def _experiment(name: str, seed: int) -> Experiment:
    settings = Settings(dtype=ROWS[name].dtype, layer=ROWS[name].layer, seed=seed)
    return Experiment(run_name(name, seed), asdict(settings), partial(_run, settings))


def _run(settings: Settings, place: Place) -> Outcome:  # noqa: ARG001 - it needs no files
    return train(settings)
