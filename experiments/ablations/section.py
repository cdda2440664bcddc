"""The ablations as a group: their experiments, and the section that their records make."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from experiments.ablations import (
    back_off,
    batch_norm,
    labels,
    loss_reduction,
    masters,
    underflow,
)
from experiments.ablations.ablation import Ablation, Variants, figure_of
from experiments.experiment import Experiment, Group, Outcome, Place, Record, Section
from mpgluon.tables import Table

__all__ = ["ABLATIONS", "GROUP"]

ABLATIONS: tuple[Ablation, ...] = (
    masters.ABLATION,
    underflow.ABLATION,
    batch_norm.ABLATION,
    loss_reduction.ABLATION,
    labels.ABLATION,
    back_off.ABLATION,
)

_HEAD = (
    "Each measure of mixed precision is left out in one run, which otherwise equals the one beside "
    "it: the same data in the same order and the same first weights. The last row compares two "
    "libraries instead, whose masters begin differently. All have one seed, and small differences "
    "mean nothing. What is called float16 has a Tensor Core's arithmetic, on a CPU, where nothing "
    "else is said."
)


def _name(ablation: Ablation, variant: str) -> str:
    return f"ablations/{ablation.name}/{variant}"


def _command(ablation: Ablation) -> str:
    return f"`python scripts/evidence.py run ablations/{ablation.name}`"


def _run(ablation: Ablation, variant: str, _: Place) -> Outcome:
    return ablation.run(variant, **ablation.settings)


def _experiments() -> list[Experiment]:
    return [
        Experiment(
            name=_name(ablation, variant),
            config={"variant": variant, **ablation.settings},
            run=partial(_run, ablation, variant),
        )
        for ablation in ABLATIONS
        for variant in ablation.variants
    ]


def _section(records: Mapping[str, Record]) -> Section:
    parts: list[str] = []
    rows: list[list[str]] = []
    figures: dict[str, Any] = {}
    for ablation in ABLATIONS:
        found: Variants = {
            variant: records[_name(ablation, variant)]
            for variant in ablation.variants
            if _name(ablation, variant) in records
        }
        missing = [variant for variant in ablation.variants if variant not in found]
        parts.append(f"### {ablation.title}")
        if missing:
            parts.append(f"Not run yet: {', '.join(missing)}. {_command(ablation)} runs all of it.")
            continue
        picture = f"ablation-{ablation.name.replace('_', '-')}"
        figures[picture] = partial(_draw, ablation, found)
        wrong, right = (
            figure_of(found[variant], ablation.figure)
            for variant in (ablation.wrong, ablation.right)
        )
        rows.append([ablation.title, ablation.unit, wrong, right, _command(ablation)])
        parts += [ablation.text(found), f"![{ablation.title}](results/{picture}.png)"]
    headings = ["ablation", "figure", "wrong", "right", "command"]
    table = [Table(headings, rows).to_markdown()] if rows else []
    return Section("\n\n".join([_HEAD, *table, *parts]), figures)


def _draw(ablation: Ablation, records: Variants, figure: Any) -> None:
    figure.set_figheight(4)
    ablation.draw(figure, records)


GROUP = Group("ablations", "Ablations", experiments=_experiments, section=_section)
