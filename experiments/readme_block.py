"""README.md's block: one network's parity runs in a table, and all runs in a sentence."""

from __future__ import annotations

from collections.abc import Mapping

from experiments import parity
from experiments.experiment import Record
from experiments.parity import BASE, FORMATS, NETWORKS, SEEDS
from experiments.parity_results import Parity, step_time
from experiments.runner import command_for
from experiments.statistics import CONFIDENCE
from experiments.wording import interval, one_or_range, plus_minus, signed
from mpgluon.tables import Table

__all__ = ["readme_block"]

_NETWORK = "resnet50_v2"


def readme_block(records: Mapping[str, Record]) -> str:
    """Return the table, its command and the sentence for README.md."""
    found = Parity(records)
    rows = []
    for name in FORMATS:
        runs = list(found.runs(_NETWORK, name).values())
        if not runs:
            continue
        figures = [run.outcome.figures for run in runs]
        rows.append([
            name,
            plus_minus([100 * one["test_accuracy"] for one in figures], 1),
            f"{one_or_range([one['skipped_steps'] for one in figures])} of {figures[0]['steps']}",
            step_time(records, _NETWORK, name)[1],
        ])  # fmt: skip
    parts = []
    if rows:
        headings = [_NETWORK, "test accuracy (points)", "skipped steps", f"step time, {BASE} = 1"]
        parts.append(Table(headings, rows).to_markdown())
        command = command_for(f"parity/{_NETWORK}")
        parts.append(f"```\n{command} --output my-results    # the same runs, on your machine\n```")
    if found.pooled:
        parts.append(_in_one_sentence(found))
    everything = [one.name for one in parity.experiments()]
    left = len(everything) - sum(name in records for name in everything)
    if left:
        parts.append(
            f"{left} of {len(everything)} runs are not done yet; docs/results.md names them."
        )
    return "\n\n".join(parts)


def _in_one_sentence(found: Parity) -> str:
    pairs = max(one.pairs for one in found.pooled.values())
    networks = sum(bool(found.points(one.name, BASE)) for one in NETWORKS)
    words = "; ".join(
        f"{name} {signed(one.mean)} ({interval(one)})"
        for name, one in found.pooled.items()
        if name in FORMATS
    )
    verdict = "none differs from it by more than"
    different = [name for name in found.different if name in FORMATS]
    if different:
        differ = f"differ{'s' * (len(different) == 1)}"
        verdict = f"{' and '.join(different)} {differ} from it by more than"
    return (
        f"Over {networks} networks and {len(SEEDS)} seeds ({pairs} pairs, taken as independent), "
        f"the mean differences to {BASE} in points, with {100 * CONFIDENCE:g} % intervals, are "
        f"{words}: {verdict} chance."
    )
