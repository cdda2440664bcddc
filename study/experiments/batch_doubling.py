"""A batch of twice the size: FP32 at a batch, FP16 at the same, and both at larger ones.

The learning rate grows in proportion to the batch. All runs see the photographs equally often, so
that a batch of twice the size takes half the steps. Accuracies are in points.

References
----------
Apache MXNet, "Mixed precision training using float16", whose example is ResNet-50 on ImageNet with
batches of 1024 and 2048.
Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.1, on the learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from recipes.training import TrainingConfig
from study.benchmarks.cases import CaseOptions
from study.benchmarks.machine import usable_cores
from study.benchmarks.memory import largest_batch, memory, peaks_by_batch, with_largest_batches
from study.benchmarks.race import Case
from study.experiments import figures
from study.experiments.cells import mean_and_interval, one_or_range, plus_minus
from study.experiments.experiment import Experiment, Group, Outcome, Place, Records
from study.experiments.photographs import mini_tree
from study.experiments.races import complete_race
from study.experiments.seeds import ComparedRows
from study.experiments.statistics import PairedComparison
from study.experiments.training_runs import config_of, train_or_find

__all__ = ["BASE", "BATCH", "GROUP", "RECIPE", "ROWS", "BatchDoubling"]

_GROUP = "batch_doubling"
BATCH = 40  # images
SEEDS = (0, 1, 2)
RECIPE = TrainingConfig(
    model="cifar_resnet20_v1",  # a quarter of a million weights: activations take the memory
    image_size=32,
    train_per_class=40,
    min_crop_area=0.5,
    batch_size=BATCH,
    reference_batch_size=BATCH,
    epochs=16,
    warmup_epochs=3,
    learning_rate=0.05,
    workers=0,
)
# Format and batch.
ROWS = {
    f"{dtype}-{batch}": (dtype, batch)
    for dtype, batch in (
        ("float32", BATCH),
        ("float16", BATCH),
        ("float16", 3 * BATCH // 2),
        ("float16", 2 * BATCH),
        ("float32", 2 * BATCH),  # a control: the batch without the format
    )
}
BASE = next(iter(ROWS))


def _run(config: TrainingConfig, place: Place) -> Outcome:
    return train_or_find(config, mini_tree(place), place)


_MEMORY, _TIMES = f"{_GROUP}/memory", f"{_GROUP}/times"
# The benchmark's contestants by our names of formats.
_CONTESTANTS = {"float32": "Gluon float32", "float16": "mpgluon float16"}
_ROUNDS = 11
_STEP: dict[str, Any] = {"model": RECIPE.model, "image_size": RECIPE.image_size}


def _cases(batches: Sequence[int]) -> list[Case]:
    """Return a training step in both formats for each batch size."""
    cases = memory(CaseOptions(**_STEP, batch_sizes=batches))
    names = _CONTESTANTS.values()
    return [
        replace(case, contestants=[one for one in case.contestants if one.name in names])
        for case in cases
    ]


def _measure_memory(place: Place) -> Outcome:  # noqa: ARG001 - it needs no files
    """Measure the peaks of all rows, and search the largest FP16 batch in FP32's memory."""
    batches = sorted({batch for _, batch in ROWS.values()})
    measured = [complete_race(case, threads=1, rounds=1) for case in _cases(batches)]
    fp32, fp16 = _CONTESTANTS.values()
    limit = peaks_by_batch(measured)[fp32][BATCH].mib
    of_fp16 = [
        replace(one, results=[result for result in one.results if result.name == fp16])
        for one in measured
    ]
    options = CaseOptions(**_STEP, batch_sizes=batches, memory_limit_mib=limit)
    searched = with_largest_batches(of_fp16, options, partial(complete_race, threads=1, rounds=1))
    peaks = {**peaks_by_batch(measured), **peaks_by_batch(searched)}
    times: dict[str, float] = {
        f"{dtype}-{batch}/{name}": getattr(peak, name)
        for dtype, contestant in _CONTESTANTS.items()
        for batch, peak in peaks[contestant].items()
        for name in ("mib", "own_mib")
    }
    fitting = largest_batch(peaks[fp16], limit)
    assert fitting is not None  # the search has ended
    return Outcome(figures={}, times={**times, "largest_batch": fitting})


def _measure_times(place: Place) -> Outcome:  # noqa: ARG001 - it needs no files
    """Measure a step of each row; the rows take turns."""
    contestants = {
        (one.options["dtype"], one.options["batch_size"]): one
        for case in _cases(sorted({batch for _, batch in ROWS.values()}))
        for one in case.contestants
    }
    rows = [replace(contestants[key], name=row) for row, key in ROWS.items()]
    threads = usable_cores()
    found = complete_race(Case("training", "training step", rows), threads=threads, rounds=_ROUNDS)
    times: dict[str, float] = {"threads": threads}
    for one in found.results:
        times[f"{one.name}/seconds"] = one.time.median
        times[f"{one.name}/seconds_lower"] = one.time.lower
        times[f"{one.name}/seconds_upper"] = one.time.upper
    return Outcome(figures={}, times=times)


@dataclass(frozen=True)
class BatchDoubling(ComparedRows):
    """The records that exist, and results computed from them.

    Comparisons need all runs; `times` may be missing, which is measured on an idle machine.
    """

    group, seeds, base = _GROUP, SEEDS, BASE
    batch = BATCH

    def table(self) -> list[list[str]]:
        """Return the cells of the table of all rows with a run."""
        rows = []
        for row, (dtype, batch) in ROWS.items():
            found = [one.figures for one in self.outcomes(row).values()]
            if found:
                paired = row != BASE and len(self.points(row).keys() & self.points(BASE)) > 1
                rows.append([
                    dtype,
                    str(batch),
                    f"{RECIPE.learning_rate * batch / BATCH:g}",
                    str(found[0]["steps"]),
                    plus_minus(list(self.points(row).values()), 1),
                    mean_and_interval(self.comparison(row), 1) if paired else "-",
                    self._measured(_MEMORY, f"{row}/mib", ".0f"),
                    self.epoch(row),
                ])  # fmt: skip
        return rows

    def long_table(self) -> list[list[str]]:
        """Return the cells of the table of losses, loss scales, memory and commands."""
        rows = []
        for row, (dtype, batch) in ROWS.items():
            found = [one.figures for one in self.outcomes(row).values()]
            if found:
                rows.append([
                    dtype,
                    str(batch),
                    plus_minus([one["train_loss"] for one in found], 2),
                    f"{one_or_range([one['skipped_steps'] for one in found])} of "
                    f"{found[0]['steps']}",
                    one_or_range([one["final_loss_scale"] for one in found])
                    if dtype == "float16"
                    else "none",
                    self._measured(_MEMORY, f"{row}/own_mib", ".0f"),
                    self._measured(_TIMES, f"{row}/seconds", ".3f"),
                    f"`{_GROUP}/{row}`",
                ])  # fmt: skip
        return rows

    @property
    def measured(self) -> Mapping[str, float]:
        """The peaks of memory by row, and the largest FP16 batch in FP32's memory."""
        return self.records[_MEMORY].outcome.times

    def more_memory(self, batch: int) -> float:
        """Return the memory of FP16 at a batch over FP32's at the base's, minus 1."""
        return self.measured[f"float16-{batch}/mib"] / self.measured[f"{BASE}/mib"] - 1

    def epoch(self, row: str) -> str:
        """Return the seconds of an epoch's steps; a dash without a measurement."""
        steps = [one.figures["steps"] / RECIPE.epochs for one in self.outcomes(row).values()]
        return self._measured(_TIMES, f"{row}/seconds", ".2f", times=steps[0])

    def _measured(self, name: str, what: str, form: str, times: float = 1.0) -> str:
        record = self.records.get(name)
        return "-" if record is None else f"{times * record.outcome.times[what]:{form}}"

    @cached_property
    def compared(self) -> dict[str, PairedComparison]:
        """FP16 against FP32 at the batch, at twice the batch, and across the two, in points."""
        doubled = f"float16-{2 * BATCH}"
        return {
            "same batch": self.comparison(f"float16-{BATCH}"),
            "same batch, doubled": self.comparison(doubled, f"float32-{2 * BATCH}"),
            "doubled": self.comparison(doubled),
        }

    @cached_property
    def control(self) -> PairedComparison:
        """FP32 at twice the batch against FP32: the effect of the batch without the format."""
        return self.comparison(f"float32-{2 * BATCH}")


def _draw(figure: Any, records: Records) -> None:
    view = BatchDoubling(records)
    peaks: dict[str, dict[int, float]] = {}
    for name, value in view.measured.items():
        if name.endswith("/mib"):
            dtype, batch = name.removesuffix("/mib").split("-")
            peaks.setdefault(dtype, {})[int(batch)] = value
    points = {key: list(view.points(row).values()) for row, key in ROWS.items()}
    figures.draw_batch_doubling(figure, peaks, points, BATCH)


GROUP = Group(
    _GROUP,
    [
        *(
            Experiment(
                BatchDoubling.name(row, seed),
                {
                    "photographs": "caltech101-mini",
                    **config_of(
                        config := replace(RECIPE, dtype=dtype, batch_size=batch, seed=seed)
                    ),
                },
                partial(_run, config),
                needs_photographs=True,
            )
            for seed in SEEDS
            for row, (dtype, batch) in ROWS.items()
        ),
        Experiment(_MEMORY, {**_STEP, "rows": list(ROWS)}, _measure_memory),
        Experiment(
            _TIMES,
            {**_STEP, "rows": list(ROWS), "rounds": _ROUNDS},
            _measure_times,
            needs_quiet=True,
        ),
    ],
    BatchDoubling,
    {"batch-doubling": _draw},
)
