"""Fine-tuning: weights trained on 81 categories of Caltech 101 start a network for the other 20."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Callable

from mpgluon.base.files import exclusive
from mpgluon_tools.plots import FORMAT_LOOKS

from recipes.data import caltech101 as photographs
from recipes.training import TrainingConfig
from study.experiments import caltech101, figures
from study.experiments.cells import mean_and_interval, one_or_range, plus_minus
from study.experiments.experiment import Experiment, Group, Outcome, Place, Records
from study.experiments.photographs import link_categories, whole_tree
from study.experiments.seeds import SeededRows
from study.experiments.statistics import PairedComparison, detectable_difference
from study.experiments.training_runs import PER_CLASS, train_or_find

__all__ = ["FORMATS", "GROUP", "NEW_CATEGORIES", "STARTS"]

_GROUP = "fine_tuning"
_WEIGHTS_CONFIG = replace(caltech101.RECIPE, seed=caltech101.SEEDS[0])
_RECIPE = replace(caltech101.RECIPE, epochs=8)
FORMATS = ("float32", "float16")
STARTS = ("scratch", "pretrained")
# Every fifth in the order of the alphabet. Faces and Faces_easy, which share photographs, are both
# among the others.
NEW_CATEGORIES = (
    "accordion", "bass", "brontosaurus", "car_side", "cougar_body", "crocodile_head", "dragonfly",
    "ewer", "gerenuk", "hedgehog", "kangaroo", "lobster", "metronome", "pagoda", "pyramid",
    "schooner", "soccer_ball", "strawberry", "watch", "wrench",
)  # fmt: skip


_WEIGHTS = f"{_GROUP}/weights"


def _experiment(name: str, config: TrainingConfig, run: Callable[..., Outcome]) -> Experiment:
    return caltech101.experiment(name, config, run, new_categories=list(NEW_CATEGORIES))


def _train_weights(config: TrainingConfig, place: Place) -> Outcome:
    """Train on the other categories."""
    tree = whole_tree(place)
    old = [name for name in photographs.list_images(tree).classes if name not in NEW_CATEGORIES]
    tree = link_categories(tree, old, place.work_dir / "categories")
    return train_or_find(config, tree, place, per_class=True)


def _train(config: TrainingConfig, place: Place) -> Outcome:
    """Train on the new categories; with ``config.pretrained``, from weights that are there."""
    tree = link_categories(whole_tree(place), NEW_CATEGORIES, place.work_dir / "categories")
    if config.pretrained is not None:
        folder = place.work_dir.parents[2] / "weights"  # of the experiment with that name
        with exclusive(folder.parent / "weights.lock"):
            _train_weights(_WEIGHTS_CONFIG, replace(place, work_dir=folder))
        config = replace(config, pretrained=str(folder / "final.params"))
    return train_or_find(config, tree, place, per_class=True)


@dataclass(frozen=True)
class _FineTuning(SeededRows):
    """The runs that exist, and results computed from them; a row is ``format/start``.

    Comparisons need all runs.
    """

    group, seeds = _GROUP, caltech101.SEEDS

    def table(self) -> list[list[str]]:
        """Return the cells of the table of accuracies, in points."""
        rows = []
        for start, dtype in product(STARTS, FORMATS):
            row = f"{dtype}/{start}"
            found = [one.figures for one in self.outcomes(row).values()]
            if found:
                rows.append([
                    start,
                    dtype,
                    plus_minus(list(self.points(row, PER_CLASS).values()), 1),
                    plus_minus(list(self.points(row).values()), 1),
                    f"{one_or_range([one['skipped_steps'] for one in found])} of "
                    f"{found[0]['steps']}",
                    f"`{self.group}/{row}`",
                ])  # fmt: skip
        return rows

    def long_table(self) -> list[list[str]]:
        """Return the cells of the table of losses, loss scales and minutes."""
        rows = []
        for start, dtype in product(STARTS, FORMATS):
            found = list(self.outcomes(f"{dtype}/{start}").values())
            if found:
                rows.append([
                    start,
                    dtype,
                    plus_minus([one.figures["train_loss"] for one in found], 2),
                    one_or_range([one.figures["final_loss_scale"] for one in found]),
                    plus_minus([one.times["training_seconds"] / 60 for one in found], 1),
                ])  # fmt: skip
        return rows

    @property
    def weights_accuracy(self) -> float:
        """The mean of the old categories' accuracies that the weights reach, in points."""
        return float(100 * self.records[_WEIGHTS].outcome.figures[PER_CLASS])

    def comparison_table(self) -> list[list[str]]:
        """Return the cells of the table of differences."""
        pairs = (
            ("float16, pretrained", "float32, pretrained", self.formats),
            *(
                (f"{dtype}, pretrained", f"{dtype}, from scratch", self.gain(dtype))
                for dtype in FORMATS
            ),
        )
        return [
            [one, other, mean_and_interval(found), f"{found.t_test:.2g}"]
            for one, other, found in pairs
        ]

    @property
    def formats(self) -> PairedComparison:
        """Fine-tuning in float16 against fine-tuning in FP32."""
        return self.comparison("float16/pretrained", "float32/pretrained", PER_CLASS)

    def gain(self, dtype: str) -> PairedComparison:
        """Return the gain of a start from trained weights over a start from scratch."""
        return self.comparison(f"{dtype}/pretrained", f"{dtype}/scratch", PER_CLASS)

    @property
    def helps(self) -> bool:
        """Whether trained weights help by more than chance, in each format."""
        return all((one := self.gain(dtype)).differs and one.mean > 0 for dtype in FORMATS)

    def detectable(self) -> float:
        """Return the difference of formats that these seeds find four times in five."""
        return detectable_difference(self.formats.spread, self.formats.pairs)


def _draw(figure: Any, records: Records) -> None:
    view = _FineTuning(records)
    rows = {}
    for start, dtype in product(STARTS, FORMATS):
        look: dict[str, Any] = {**FORMAT_LOOKS[dtype]}
        if start == "scratch":
            look.update(linewidth=0.9, markerfacecolor="none")
        outcomes = list(view.outcomes(f"{dtype}/{start}").values())
        rows[f"{dtype}, {'from scratch' if start == 'scratch' else start}"] = (look, outcomes)
    figures.draw_learning(figure, rows)


GROUP = Group(
    _GROUP,
    [
        _experiment(_WEIGHTS, _WEIGHTS_CONFIG, _train_weights),
        *(
            _experiment(
                _FineTuning.name(f"{dtype}/{start}", seed),
                replace(
                    _RECIPE,
                    dtype=dtype,
                    seed=seed,
                    pretrained=_WEIGHTS if start == "pretrained" else None,
                ),
                _train,
            )
            for start, seed, dtype in product(STARTS, caltech101.SEEDS, FORMATS)
        ),
    ],
    _FineTuning,
    {"fine-tuning": _draw},
)
