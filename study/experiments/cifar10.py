"""A ResNet-20 on CIFAR-10 in every format, and papers' results of such networks.

The images are from ``scripts/unpack_cifar10.py``. FP32, FP16 and BF16 have three seeds, the
other rows one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from mpgluon.errors import DataError

from recipes.data.cifar10 import is_complete
from recipes.training import TrainingConfig
from study.experiments import figures
from study.experiments.cells import mean_and_interval, one_or_range, plus_minus, signed
from study.experiments.experiment import Experiment, Group, Outcome, Place, Records
from study.experiments.seeds import ComparedRows
from study.experiments.statistics import PairedComparison, compare, detectable_difference
from study.experiments.training_runs import config_of, train_or_find

__all__ = ["BASE", "GROUP", "RECIPE", "ROWS", "images_of"]

_GROUP = "cifar10"
_FOLDER = "cifar10"
SEEDS = (0, 1, 2)
_SHOWN = 2.0  # points below FP32 in the picture
RECIPE = TrainingConfig(
    model="cifar_resnet20_v1",
    dataset="folder",
    shifts=True,
    image_size=32,
    batch_size=64,
    epochs=30,
    warmup_epochs=2,
    learning_rate=0.1,
    weight_decay=5e-4,
    optimizer="nag",
    workers=1,
)


def _products(values: str, gradients: str, scaling: str, steps: int = 0) -> dict[str, Any]:
    """Return a policy with products of eight bits, and bfloat16 between them."""
    return {
        "dtype": f"params=float32,compute={values},gradient={gradients},between=bfloat16,"
        f"scaling={scaling},amax_history={steps}"
    }


_E4M3, _E5M2 = "float8_e4m3", "float8_e5m2"
_WEIGHTS = {"dtype": "params=bfloat16,compute=bfloat16"}  # without FP32 masters
_BASES: Mapping[str, Mapping[str, Any]] = {
    name: {"dtype": name} for name in ("float32", "float16", "bfloat16")
}
_OTHERS: Mapping[str, Mapping[str, Any]] = {
    "float16-unscaled": {"dtype": "float16", "loss_scale": "none"},
    **{
        f"weights-{rounding}": {**_WEIGHTS, "update_rounding": rounding}
        for rounding in ("nearest", "stochastic", "kahan")
    },
    "e4m3-tensor": _products(_E4M3, _E5M2, "tensor"),
    "e4m3-delayed": _products(_E4M3, _E5M2, "tensor", 16),
    "e4m3-mx": _products(_E4M3, _E5M2, "mx"),
    "e4m3-none": _products(_E4M3, _E5M2, "none"),
    "e5m2-none": _products(_E5M2, _E5M2, "none"),
    "e5m2-loss-scale": {**_products(_E5M2, _E5M2, "none"), "loss_scale": "dynamic"},
    "e5m2-mean": {
        **_products(_E5M2, _E5M2, "none"),
        "loss_scale": str(1 / RECIPE.batch_size),
    },
}
ROWS: Mapping[str, Mapping[str, Any]] = {**_BASES, **_OTHERS}
"""The fields of the training config that make each row."""


def images_of(place: Place) -> Path:
    """Return the folder of CIFAR-10, in the folder of photographs or in the repository's ``data``.

    Raises
    ------
    DataError
        If there is none, or it is not complete.
    """
    places = (place.data_dir / _FOLDER, Path(__file__).parents[2] / "data" / _FOLDER)
    for folder in places:
        if is_complete(folder):
            return folder
    raise DataError(
        f"neither {places[0]} nor {places[1]} has all images of CIFAR-10; data/README.md says how "
        "to get them"
    )


def _run(config: TrainingConfig, place: Place) -> Outcome:
    return train_or_find(config, images_of(place), place)


def _experiment(row: str, seed: int) -> Experiment:
    # One run keeps the checkpoint of each epoch, for `study.experiments.exponents`.
    keep = RECIPE.epochs if (row, seed) == ("float32", SEEDS[0]) else RECIPE.keep_checkpoints
    config = replace(RECIPE, seed=seed, keep_checkpoints=keep, **ROWS[row])
    more = {"update_rounding": config.update_rounding, "shifts": config.shifts}
    return Experiment(
        _Cifar10.name(row, seed),
        {"photographs": "CIFAR-10", **more, **config_of(config)},
        partial(_run, config),
    )


_NAMES = {
    "float32": "FP32",
    "float16": "FP16, dynamic loss scale",
    "bfloat16": "BF16",
    "float16-unscaled": "FP16 without loss scaling",
    "weights-nearest": "BF16 weights without masters, updates rounded to nearest",
    "weights-stochastic": "BF16 weights without masters, rounded stochastically",
    "weights-kahan": "BF16 weights without masters, Kahan's compensation",
    "e4m3-tensor": "products of E4M3, gradients E5M2, a scale per tensor",
    "e4m3-delayed": "products of E4M3, gradients E5M2, the scale of the last 16 steps",
    "e4m3-mx": "products of E4M3, gradients E5M2, a scale for 32 numbers (MX)",
    "e4m3-none": "products of E4M3, gradients E5M2, without scales",
    "e5m2-none": "products of E5M2 without scales",
    "e5m2-loss-scale": "products of E5M2, dynamic loss scale",
    "e5m2-mean": "products of E5M2 without scales, gradients of the mean loss, not of the sum",
}
_PUBLISHED = (
    ("He et al. 2016, table 6", "this network in FP32: 91.25 points after 64,000 steps",
     ("float32",), f"{RECIPE.epochs} epochs with a cosine schedule, not 164 with three rates"),
    ("Zamirai et al. 2020, abstract",
     "weights of BF16 lose accuracy if updates are rounded to nearest, and with the other two are "
     "0.1 points below to 0.2 above 32 bits; seven tasks",
     ("weights-nearest", "weights-stochastic", "weights-kahan"),
     "other networks; with one seed, some tenths of a point are chance"),
    ("Wang et al. 2018, abstract",
     "products of 8 bits (5 and 2) with sums of 16 bits in chunks keep the accuracy",
     ("e5m2-loss-scale",), "here sums and updates are FP32"),
    ("Cambier et al. 2020, introduction",
     "training in 8 bits needs loss scaling, if tensors are not shifted and squeezed",
     ("e5m2-none", "e5m2-loss-scale", "e5m2-mean"),
     f"the sum of the losses of {RECIPE.batch_size} images, usual in Gluon, has gradients "
     f"{RECIPE.batch_size} times as large as their mean; batch normalization is FP32"),
    ("Noune et al. 2022, abstract", "formats of 8 bits with scales keep the accuracy",
     ("e4m3-tensor", "e4m3-mx"), "other networks"),
)  # fmt: skip


@dataclass(frozen=True)
class _Cifar10(ComparedRows):
    """The runs that exist, and results computed from them."""

    group, seeds = _GROUP, SEEDS

    def table(self) -> list[list[str]]:
        """Return the cells of the table of all rows with a run."""
        rows = []
        for row, name in _NAMES.items():
            found = [one.figures for one in self.outcomes(row).values()]
            if found:
                rows.append([
                    name,
                    self._accuracy(row),
                    self.difference(row),
                    plus_minus([one["train_loss"] for one in found], 3),
                    f"{one_or_range([one['skipped_steps'] for one in found])} of "
                    f"{found[0]['steps']:,}",
                    f"`{self.group}/{row}`",
                ])  # fmt: skip
        return rows

    def published_table(self) -> list[list[str]]:
        """Return the cells of the table of published results, with the rows that exist."""
        rows = []
        for paper, finding, ours, difference in _PUBLISHED:
            run = [row for row in ours if self.runs(row)]
            if run:
                words = [f"{_NAMES[row]}: {self._accuracy(row)}{self._minus(row)}" for row in run]
                rows.append([paper, finding, "; ".join(words), difference])
        return rows

    def difference(self, row: str) -> str:
        """Return the difference from FP32 in points, with its interval if there are two pairs."""
        ours, base = self.points(row), self.points(self.base)
        pairs = [ours[seed] - base[seed] for seed in ours if seed in base]
        if row == self.base or not pairs:
            return "-"
        if len(pairs) > 1:
            return mean_and_interval(compare(pairs))
        return signed(pairs[0]) + ("" if len(ours) == 1 else " (one pair)")

    def _accuracy(self, row: str) -> str:
        return plus_minus(list(self.points(row).values()), 2)

    def _minus(self, row: str) -> str:
        found = self.difference(row)
        return "" if found == "-" else f", FP32 {found}"

    @cached_property
    def compared(self) -> dict[str, PairedComparison]:
        """The rows with all seeds against FP32."""
        return {row: self.comparison(row) for row in _BASES if row != self.base}

    def detectable(self, row: str) -> float:
        """Return the difference to FP32 that a t-test of these seeds finds four times in five."""
        return detectable_difference(self.compared[row].spread, self.compared[row].pairs)


def _draw(figure: Any, records: Records) -> None:
    view = _Cifar10(records)
    points = {name: list(view.points(row).values()) for row, name in _NAMES.items()}
    lowest = min(points[_NAMES["float32"]]) - _SHOWN
    label = "test accuracy (points); the band: the runs in FP32"
    figures.draw_rows(figure, points, label, lowest=lowest)


_RUNS = [
    *(_experiment(row, seed) for seed in SEEDS for row in _BASES),
    *(_experiment(row, SEEDS[0]) for row in _OTHERS),
]
BASE = _RUNS[0]
"""The run in float32 whose checkpoints of all epochs are kept."""

GROUP = Group(
    _GROUP,
    _RUNS,
    _Cifar10,
    {"cifar10": _draw},
)
