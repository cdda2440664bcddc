"""The tables and the figure of docs/scaling.md, made from the model and put where they belong.

A table's place in a document is between ``<!-- table: NAME -->`` and ``<!-- end of table -->``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.scaling import (
    ENOUGH,
    ETHERNETS,
    HDR,
    NDR,
    Cluster,
    Workload,
    batch_table,
    bytes_table,
    clusters_of,
    exchange_table,
    predict,
    workload_of,
)
from benchmarks.summation import sum_table
from mpgluon.tables import Table

__all__ = ["MODEL", "document_tables", "draw_efficiency", "fill_tables", "save_efficiency"]

MODEL, GPUS = "resnet50_v1", (8, 64, 1024)
_LINKS = (*ETHERNETS, HDR, NDR, replace(HDR, name="8 x HDR InfiniBand", gbit_per_s=8 * 200))
_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_LOOKS: tuple[dict[str, Any], ...] = (
    {"color": "0.6", "linestyle": "-", "marker": "s"},
    {"color": "0.4", "linestyle": "--", "marker": "^"},
    {"color": "0.2", "linestyle": "-.", "marker": "x"},
    {"color": "black", "linestyle": ":", "marker": "o"},
    {"color": "black", "linestyle": "-", "marker": "D"},
)


def document_tables() -> dict[str, Table]:
    """Return the tables by the names of their places."""
    workload = workload_of(MODEL)
    clusters = _clusters()
    return {
        "bytes": bytes_table(workload, GPUS),
        "exchange": exchange_table(workload, clusters),
        "batches": batch_table(workload, clusters),
        "sums": sum_table(),
    }


def _clusters() -> list[Cluster]:
    one_each = clusters_of(GPUS[:1], ETHERNETS, gpus_per_machine=1)
    in_one, *others = clusters_of(GPUS, _LINKS)
    return [in_one, *one_each, *others]


def fill_tables(text: str, tables: Mapping[str, Table]) -> str:
    """Return a document with each table in its place.

    Raises
    ------
    ValueError
        If the places are not those of the tables, each once.
    """
    places = [name for _, name, _ in _PLACE.findall(text)]
    if sorted(places) != sorted(tables):
        raise ValueError(
            f"the document has places for {', '.join(places) or 'no tables'}, and the tables are "
            f"{', '.join(tables)}; mark each place with <!-- table: NAME --> and "
            "<!-- end of table -->"
        )
    return _PLACE.sub(lambda place: f"{place[1]}{tables[place[2]].to_markdown()}\n{place[3]}", text)


def save_efficiency(path: Path) -> None:
    """Write the figure, 1320 pixels wide: efficiency against batch size, for 64 and 1,024 GPUs."""
    from matplotlib.figure import Figure

    workload = workload_of(MODEL)
    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, gpus in zip(panels, GPUS[1:]):
        draw_efficiency(axes, workload, clusters_of([gpus], _LINKS))
        axes.set_title(f"{gpus:,} GPUs", fontsize="medium")
    panels[1].set_ylabel("")
    panels[0].legend(loc="lower right", title="between machines of 8 GPUs")
    figure.suptitle(f"{MODEL} in float16 on A100, gradients sent in 16 bits: what the model allows")
    figure.savefig(path, dpi=120)


def draw_efficiency(axes: Any, workload: Workload, clusters: Sequence[Cluster]) -> Any:
    """Draw efficiency against the batch per GPU, a line for each of at most five clusters.

    Parameters
    ----------
    axes : Axes
    workload : Workload
    clusters : sequence of Cluster

    Returns
    -------
    Axes
    """
    batches = [2**power for power in range(11)]
    for cluster, look in zip(clusters, _LOOKS):
        steps = [predict(replace(workload, batch_size=batch), cluster) for batch in batches]
        efficiencies = [100 * step.efficiency for step in steps]
        axes.plot(
            batches,
            efficiencies,
            label=cluster.slowest.name,
            markersize=5,
            markerfacecolor="w",
            **look,
        )
    axes.axhline(100 * ENOUGH, color="0.7", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_ylim(0, 103)
    axes.set_xlabel("images per GPU and step")
    axes.set_ylabel("efficiency (%)")
    axes.grid(color="0.92")
    return axes
