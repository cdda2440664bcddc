"""Rows of the tables that are not one group's: the summary, ablations, origins, repetitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable

from study.experiments.cells import mean_and_interval, number
from study.experiments.experiment import Record
from study.experiments.figures import draw_differences
from study.experiments.records import processor_of

__all__ = ["ROWS", "draw_summary"]


def compared(views: Any) -> list[tuple[str, int, Sequence[Any]]]:
    """Return the title, the seeds and the differences from FP32 of each experiment of formats.

    The differences are FP16's and, where it was trained, BF16's.
    """
    both = ("float16", "bfloat16")
    tuning, parity, sequences = views.fine_tuning, views.parity, views.sequences
    found: Sequence[tuple[str, Any, Sequence[Any]]] = [
        ("ImageNet's weights on Caltech 101", views.imagenet_weights,
         [views.imagenet_weights.compared[fmt] for fmt in both]),
        ("ResNet-50 on Caltech 101", views.caltech101,
         [views.caltech101.compared[fmt] for fmt in both]),
        ("ResNet-20 on CIFAR-10", views.cifar10, [views.cifar10.compared[fmt] for fmt in both]),
        ("fine-tuning from FP32 weights", tuning, [tuning.formats]),
        (f"{len(parity.networks)} networks on 600 photographs", parity,
         [parity.pooled[fmt] for fmt in both]),
        ("an LSTM on film reviews", views.recurrent,
         [views.recurrent.compared[fmt] for fmt in both]),
        ("a translator of number words", sequences,
         [sequences.compared[f"translation/{fmt}"] for fmt in both]),
        ("spoken digits with CTC (wrong ones)", sequences,
         [sequences.compared[f"digits/{fmt}"] for fmt in both]),
    ]  # fmt: skip
    return [(title, len(view.seeds), differences) for title, view, differences in found]


def summary(views: Any) -> list[list[str]]:
    """Return the rows of the table of :func:`compared`."""
    return [
        [title, str(seeds), *[*map(mean_and_interval, differences), "-"][:2]]
        for title, seeds, differences in compared(views)
    ]


def draw_summary(figure: Any, views: Any) -> None:
    """Draw :func:`compared`, below FP16's mean over the experiments on photographs."""
    rows = [(title, differences) for title, _, differences in compared(views)]
    draw_differences(figure, [("four on photographs together", [views.together.float16]), *rows])


# Columns: the title of an ablation, a figure in words, the wrong and the right run, the figure.
_ABLATIONS = (
    ("No master weights", "training loss at the end", "masters", "without", "with", "final_loss"),
    ("No loss scale", "loss at the end", "underflow", "unscaled", "scaled", "final_loss"),
    ("BatchNorm in float16", "training accuracy at the end", "batch_norm", "float16", "float32",
     "final_accuracy"),
    ("The loss in float16", "true loss at the end (nats)", "loss_reduction", "float16", "float32",
     "final_true_loss"),
    ("Labels in float16", "test accuracy on classes above 2048", "labels", "float16", "int32",
     "accuracy_above"),
    ("contrib.amp's late back-off", "steps skipped with a scale that had just failed", "back_off",
     "contrib", "mpgluon", "skipped_at_a_scale_that_just_failed"),
)  # fmt: skip


def ablation_figures(views: Any) -> list[list[str]]:
    """Return a figure of each ablation, of the run with the fault and of the run without it."""
    rows = []
    for title, words, name, wrong, right, figure in _ABLATIONS:
        shown = [number(views.ablations[name][run][figure]) for run in (wrong, right)]
        rows.append([title, words, *shown, f"`ablations/{name}`"])
    return rows


def origins(views: Any) -> list[list[str]]:
    """Return machines, versions and dates of the records, and of how many the source is uncertain.

    Number, processor, versions and dates; records made with uncommitted changes, and records of
    runs that were done, or begun, before the commit that is named.
    """
    made: dict[tuple[str, str], list[Record]] = {}
    for record in views.records.values():
        versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
        made.setdefault((processor_of(record.machine), versions), []).append(record)
    return [
        [
            str(len(records)),
            *origin,
            " to ".join(sorted({min(days), max(days)})),
            *(str(sum(one.source.get(flag, False) for one in records)) for flag in _UNCERTAIN),
        ]
        for origin, records in made.items()
        for days in [[one.date[:10] for one in records]]
    ]


_UNCERTAIN = ("has_changes", "of_an_earlier_run")


def repeated(views: Any) -> list[list[str]]:
    """Return the repetitions: name, how it was chosen, date and outcome."""
    return [
        [
            f"`{one.name}`",
            "by name" if one.seed is None else f"at random, `--seed {one.seed}`",
            one.date[:10],
            "the same" if one.difference is None else one.difference,
        ]
        for one in views.repetitions
    ]


ROWS: Mapping[str, Callable[[Any], list[list[str]]]] = {
    one.__name__: one for one in (summary, ablation_figures, origins, repeated)
}
