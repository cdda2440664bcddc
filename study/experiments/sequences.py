"""Sequences to sequences: number words translated with attention, spoken digits read with CTC.

Scores are in points: hundredths of the test's translations, or of its digits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, Callable

from study.experiments import figures, listener, translator
from study.experiments.cells import mean_and_interval, one_or_range, plus_minus
from study.experiments.experiment import Experiment, Group, Outcome, Place, Records
from study.experiments.listener import ListenerSettings
from study.experiments.loop import WINDOW, LoopSettings
from study.experiments.seeds import ComparedRows
from study.experiments.statistics import PairedComparison, detectable_difference
from study.experiments.translator import TranslatorSettings

__all__ = ["FORMATS", "GROUP", "TASKS"]

_SEEDS = (0, 1, 2, 3, 4)
_BASE = "float32"
FORMATS = (_BASE, "float16", "bfloat16")


@dataclass(frozen=True)
class _Task:
    """A network's task and its scores.

    Attributes
    ----------
    title : str
    settings : LoopSettings
        The settings of the first seed in FP32.
    train : callable
    scores : mapping of str to str
        Figures of the outcome, in [0, 1], by their names in a table; the first one is compared.
    """

    title: str
    settings: LoopSettings
    train: Callable[[Any], Outcome]
    scores: Mapping[str, str]

    @property
    def score(self) -> str:
        """The figure that is compared."""
        return next(iter(self.scores.values()))


TASKS = {
    "translation": _Task(
        "number words from English into German",
        TranslatorSettings(),
        translator.train,
        {
            "right translations": "sequence_accuracy",
            "right morphemes": "token_accuracy",
            "BLEU": "bleu",
        },
    ),
    "digits": _Task(
        "spoken digits with CTC",
        ListenerSettings(),
        listener.train,
        {"wrong digits": "label_error_rate", "right recordings": "sequence_accuracy"},
    ),
}
_WITHOUT_ATTENTION = "translation/float32-without-attention"


def _experiment(row: str, task: _Task, settings: LoopSettings) -> Experiment:
    name = _Sequences.name(row, settings.seed)
    return Experiment(name, asdict(settings), partial(_run, task, settings))


def _run(task: _Task, settings: LoopSettings, place: Place) -> Outcome:  # noqa: ARG001 - no files
    return task.train(settings)


@dataclass(frozen=True)
class _Sequences(ComparedRows):
    """The runs that exist, and results computed from them; a row is ``task/format``."""

    group, seeds, base = "sequences", _SEEDS, _BASE

    def table(self, task: str) -> list[list[str]]:
        """Return the cells of the table of a task's rows with a run."""
        rows = []
        for row in (f"{task}/{dtype}" for dtype in FORMATS):
            found = [one.figures for one in self.outcomes(row).values()]
            if found:
                rows.append([
                    *self._compared_cells(task, row),
                    *(
                        plus_minus(list(self.points(row, figure).values()), 2)
                        for figure in list(TASKS[task].scores.values())[1:]
                    ),
                    plus_minus([one["final_loss"] for one in found], 3),
                    f"{one_or_range([one['skipped_steps'] for one in found])} of "
                    f"{found[0]['steps']}",
                    one_or_range([one["final_scale"] for one in found])
                    if replace(TASKS[task].settings, dtype=row.split("/")[1]).has_loss_scale
                    else "none",
                    f"`{self.group}/{row}`",
                ])  # fmt: skip
        return rows

    def short_table(self) -> list[list[str]]:
        """Return the cells of the table of the scores that are compared, of both tasks."""
        return [
            [task, next(iter(about.scores)), *self._compared_cells(task, f"{task}/{dtype}")]
            for task, about in TASKS.items()
            for dtype in FORMATS
            if self.runs(f"{task}/{dtype}")
        ]

    def _compared_cells(self, task: str, row: str) -> list[str]:
        base, score, dtype = f"{task}/{_BASE}", TASKS[task].score, row.split("/")[1]
        ours, theirs = (self.points(one, score) for one in (row, base))
        paired = dtype != _BASE and len(ours.keys() & theirs.keys()) > 1
        return [
            dtype,
            plus_minus(list(ours.values()), 2),
            mean_and_interval(self.comparison(row, base, score)) if paired else "-",
        ]

    @cached_property
    def compared(self) -> Mapping[str, PairedComparison]:
        """The rows in 16 bits against FP32."""
        return {
            f"{task}/{dtype}": self.comparison(f"{task}/{dtype}", f"{task}/{_BASE}", about.score)
            for task, about in TASKS.items()
            for dtype in FORMATS
            if dtype != _BASE
        }

    def detectable(self, row: str) -> float:
        """Return the difference to FP32 that a t-test of these seeds finds four times in five."""
        return detectable_difference(self.compared[row].spread, self.compared[row].pairs)

    @property
    def without_attention(self) -> Mapping[str, Any]:
        """The figures of the translator that sees the mean of the words."""
        (outcome,) = self.outcomes(_WITHOUT_ATTENTION).values()
        return outcome.figures


def _draw(figure: Any, records: Records) -> None:
    view = _Sequences(records)
    panels = {
        f"{task}:\n{next(iter(about.scores))} (points)": (
            about.score,
            {row: list(view.outcomes(f"{task}/{row}").values()) for row in FORMATS},
        )
        for task, about in TASKS.items()
    }
    figures.draw_sequences(figure, panels, WINDOW)


def _experiments() -> Sequence[Experiment]:
    rows = [
        _experiment(f"{name}/{dtype}", task, replace(task.settings, dtype=dtype, seed=seed))
        for name, task in TASKS.items()
        for seed in _SEEDS
        for dtype in FORMATS
    ]
    task = TASKS["translation"]
    blind = replace(TranslatorSettings(), attention=False)
    return [*rows, _experiment(_WITHOUT_ATTENTION, task, blind)]


GROUP = Group("sequences", _experiments(), _Sequences, {"sequences": _draw})
