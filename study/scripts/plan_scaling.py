"""Plan training on many GPUs: bytes, seconds of the exchange, and the batch that hides it.

    python study/scripts/plan_scaling.py --model resnet50_v1 --gpus 8 64 1024 --link-gbit-per-s 200
    mpirun -np 2 python study/scripts/plan_scaling.py --measure       # a link to give to the first
    python study/scripts/plan_scaling.py --document docs/scaling.md  # its tables and figure

The model: a ring through all GPUs carries one way, through its slowest link, 2 (n - 1) / n of the
gradients' bytes in 2 (n - 1) hops (Patarasuk, Yuan, 2009). The gradients travel in k equal
messages, the first during backward, which is two thirds of the computation, at an even pace.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for folders that are not installed

from mpgluon_tools.commands import exit_status
from mpgluon_tools.commands.arguments import width
from mpgluon_tools.diagnostics import alignment_report
from mpgluon_tools.tables import Table

import mxnet as mx

from recipes.options import positive
from recipes.training.networks import build_network
from study.benchmarks.measured_link import measured_link
from study.benchmarks.summation import sum_table

MESSAGES = (1, 2, 4, 8, 16, 32, 64)  # into how many the gradients may be divided
ENOUGH, LARGEST_BATCH = 0.95, 4096  # the efficiency at which the exchange counts as hidden
# Line rates in Gbit/s, one way, and microseconds of a hop with which NCCL plans a ring, whose
# sources are in docs/scaling.md. The last network has a card for each of a machine's eight GPUs.
NVLINK, NVLINK_GBIT_PER_S, NVLINK_LATENCY_US, LATENCY_US = "NVLink 3", 8 * 300.0, 3.4, 9.6
NETWORKS = {"25 GbE": 25.0, "100 GbE": 100.0, "HDR InfiniBand": 200.0, "NDR InfiniBand": 400.0}
NETWORKS["8 x HDR InfiniBand"] = 8 * 200.0
# Images per second of ResNet-50 v1.5, and its multiply-adds for one image; float32 is TF32.
A100, A100_MULTIPLY_ADDS = {"float16": 2180.0, "float32": 1022.0}, 4.089e9
EXCHANGE_COLUMNS = (
    "MB sent: by each GPU to the next, in a step. ms: of the exchange, hidden behind nothing."
)
BATCH_COLUMNS = (
    "batch: the smallest per GPU that reaches it, in FP32, and in 16 bits with gradients sent\n"
    "as FP32 or in 16 bits. efficiency, hidden: with a batch of 32 or 256 in 16 bits, the share\n"
    "of computation in a step's time, and of the exchange that backward hides. messages: into\n"
    "how many the gradients are best divided."
)
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
COLORS, LINES, MARKERS = ("0.6", "0.4", "0.2", "k", "k"), ("-", "--", "-.", ":", "-"), "s^xoD"


class Ring(NamedTuple):
    """A ring through GPUs: its slowest link, and the seconds of all its hops."""

    gpus: int
    link: str
    where: str
    gbit_per_s: float
    latency_s: float

    def sent(self, size: float) -> float:
        """Return how many bytes each GPU sends to the next when all together sum so many."""
        return 2 * (self.gpus - 1) / self.gpus * size

    def seconds(self, size: float) -> float:
        """Return how long it takes to sum a message of so many bytes over all GPUs."""
        return self.latency_s + 8e-9 * self.sent(size) / self.gbit_per_s


def rings(
    gpus: Sequence[int], networks: Mapping[str, float], latency_us: float, per_machine: int
) -> list[Ring]:
    """Return a ring for each number of GPUs and network; one machine's GPUs need no network."""
    if not (min(networks.values()) > 0 and latency_us >= 0):
        raise ValueError(
            "a link's Gbit/s must be positive and its latency at least 0, received "
            f"{', '.join(f'{speed:g} Gbit/s' for speed in networks.values())} and {latency_us:g} us"
        )
    found = []
    for count in gpus:
        machines = -(-count // per_machine)
        if machines > 1 and count % per_machine:
            raise ValueError(f"{count} GPUs do not fill machines of {per_machine}; give a multiple")
        between, hops = 2 * (machines - 1), 2 * (count - 1)
        latency_s = 1e-6 * (between * latency_us + (hops - between) * NVLINK_LATENCY_US)
        where = f", {per_machine} per machine" if between else " in one machine"
        for link, rate in (networks if between else {NVLINK: NVLINK_GBIT_PER_S}).items():
            inside = [(NVLINK_GBIT_PER_S, NVLINK)] if hops > between else []
            slowest, name = min([(rate, link), *inside])
            found.append(Ring(count, name, where, slowest, latency_s))
    return found


class Workload(NamedTuple):
    """A network's gradients, and one GPU's seconds of training per image, by format."""

    gradients: int
    seconds: Mapping[str, float]

    def step(self, ring: Ring, batch: int, dtype: str, sent_bytes: int) -> tuple[float, float, int]:
        """Return efficiency, the hidden share of the exchange, and the best number of messages.

        The i-th of k messages can leave when i/k of backward is done and the one before it has
        arrived. If each takes m seconds, the last arrives max(m, k m - b (k - 1) / k) seconds after
        a backward of b seconds.
        """
        computation, steps = batch * self.seconds[dtype], []
        for count in MESSAGES:
            each = ring.seconds(self.gradients * sent_bytes / count)
            exposed = max(each, count * each - 2 / 3 * computation * (count - 1) / count)
            hidden = 1 - exposed / (count * each) if each else 1.0
            steps.append((computation / (computation + exposed), hidden, count))
        return max(steps, key=lambda step: step[0])

    def batch_for(self, ring: Ring, dtype: str, sent_bytes: int) -> str:
        """Return the smallest batch per GPU that hides the exchange."""
        for batch in range(1, LARGEST_BATCH + 1):
            if self.step(ring, batch, dtype, sent_bytes)[0] >= ENOUGH:
                return str(batch)
        return f"> {LARGEST_BATCH}"


def workload_of(model: str, speeds: Optional[Mapping[str, float]]) -> Workload:
    """Count a zoo's network; without images per second they come from the A100's arithmetic."""
    net = build_network(model, classes=1000, image_size=224, devices=[mx.cpu()])
    gradients = [one for one in net.collect_params().values() if one.grad_req != "null"]
    relative = 1.0  # work for an image, compared with the network of the speeds
    if speeds is None:
        relative = alignment_report(net, (1, 3, 224, 224)).multiply_adds / A100_MULTIPLY_ADDS
    seconds = {dtype: relative / speed for dtype, speed in (speeds or A100).items()}
    return Workload(sum(prod(one.shape) for one in gradients), seconds)


def exchange_table(work: Workload, found: Sequence[Ring]) -> Table:
    """Return bytes and milliseconds of all gradients in one message, hidden behind nothing."""
    rows = []
    for ring in found:
        sizes = (4 * work.gradients, 2 * work.gradients)
        sent = [f"{ring.sent(size) / 1e6:.1f}" for size in sizes]
        times = [1e3 * ring.seconds(size) for size in (*sizes, 0)]
        in_words = [f"{ms:.{1 if ms >= 10 else 2}f}" for ms in times]
        rows.append([f"{ring.gpus:,}", ring.link + ring.where, *sent, *in_words])
    headings = ["GPUs", "slowest link", "MB sent, FP32", "MB sent, 16 bits"]
    return Table([*headings, "FP32, ms", "16 bits, ms", "of which latency, ms"], rows)


def batch_table(work: Workload, found: Sequence[Ring]) -> Table:
    """Return the batches that hide the exchange; and two batches in 16 bits."""
    ways = (("float32", 4), ("float16", 4), ("float16", 2))  # and the bytes of a gradient sent
    rows = []
    for ring in found:
        row = [f"{ring.gpus:,}", ring.link + ring.where]
        row += [work.batch_for(ring, *way) for way in ways]
        for batch in (32, 256):
            efficiency, hidden, messages = work.step(ring, batch, "float16", 2)
            row += [f"{efficiency:.0%}", f"{hidden:.0%}"]
        rows.append([*row, str(messages)])
    headings = ["GPUs", "slowest link", "batch, FP32", "batch, 16 bits sent as FP32"]
    headings += ["batch, 16 bits", "efficiency, 32", "hidden, 32", "efficiency, 256"]
    return Table([*headings, "hidden, 256", "messages"], rows)


def save_efficiency(path: Path, model: str, work: Workload, found: Sequence[Ring]) -> None:
    """Draw efficiency against the batch per GPU, a panel for each number of GPUs in machines."""
    from matplotlib.figure import Figure

    batches = [2**power for power in range(11)]
    counts = sorted({ring.gpus for ring in found if ring.link != NVLINK})
    figure = Figure(figsize=(6.2, 1 + 3 * len(counts)), layout="constrained")
    panels = figure.subplots(len(counts), 1, sharex=True, squeeze=False)[:, 0]
    for axes, gpus in zip(panels, counts):
        for number, ring in enumerate(one for one in found if one.gpus == gpus):
            shares = [100 * work.step(ring, batch, "float16", 2)[0] for batch in batches]
            look = {"color": COLORS[number], "linestyle": LINES[number], "marker": MARKERS[number]}
            axes.plot(batches, shares, label=ring.link, markersize=5, markerfacecolor="w", **look)
        axes.axhline(100 * ENOUGH, color="0.7", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set(ylim=(0, 103), ylabel="efficiency (%)")
        axes.grid(color="0.92")
        axes.set_title(f"{gpus:,} GPUs", fontsize="medium")
    panels[-1].set_xlabel("images per GPU and step")
    panels[0].legend(loc="lower right", title="between machines")
    title = f"{model} in float16, gradients sent in 16 bits: what the model allows"
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=160)


def plan(options: argparse.Namespace) -> None:
    """Print the tables, or put them between the marks of a document, with a figure next to it."""
    networks = NETWORKS
    if options.link_gbit_per_s is not None:
        networks = {f"{options.link_gbit_per_s:g} Gbit/s": options.link_gbit_per_s}
    found = rings(options.gpus, networks, options.latency_us, options.gpus_per_machine)
    speeds = options.images_per_second and speeds_of(options.images_per_second)
    work = workload_of(options.model, speeds)
    tables = {"exchange": exchange_table(work, found), "batches": batch_table(work, found)}
    document = options.document
    if document is None:
        print(f"{options.model}, {work.gradients / 1e6:.1f} million gradients")
        exchange, batches = (table.fitted(width()) for table in tables.values())
        print(f"\nAll gradients in one message\n{EXCHANGE_COLUMNS}\n\n{exchange}")
        print(f"\nThe batch at 95 % efficiency\n{BATCH_COLUMNS}\n\n{batches}")
        return
    text = document.read_text(encoding="utf-8")
    marks, needed = sorted(name for _, name, _ in PLACE.findall(text)), sorted([*tables, "sums"])
    if marks != needed:
        raise ValueError(f"{document} needs marks for {needed}, received {marks}")
    tables["sums"] = sum_table()
    text = PLACE.sub(lambda place: f"{place[1]}{tables[place[2]].to_markdown()}\n{place[3]}", text)
    document.write_text(text, encoding="utf-8")
    save_efficiency(document.with_suffix(".png"), options.model, work, found)


def speeds_of(texts: Sequence[str]) -> dict[str, float]:
    """Return images per second by format."""
    try:
        speeds = {name: float(number) for name, _, number in (one.partition("=") for one in texts)}
    except ValueError:
        speeds = {}
    if speeds.keys() != A100.keys() or not min(speeds.values()) > 0:
        raise ValueError(
            "--images-per-second takes a positive number for both formats, as in float16=2180 "
            f"float32=1022; received {' '.join(texts)}"
        )
    return speeds


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Parse the command line; plan, or measure a link."""
    parser = argparse.ArgumentParser(description="Plan training on many GPUs; see docs/scaling.md.")
    add = parser.add_argument
    add("--model", default="resnet50_v1", help="a network of either model zoo (%(default)s)")
    add("--gpus", type=positive, nargs="+", default=[8, 64, 1024], help="%(default)s")
    add("--gpus-per-machine", type=positive, default=8, help="%(default)s")
    add("--link-gbit-per-s", type=float, help="a machine's link, one way (some by name)")
    add("--latency-us", type=float, default=LATENCY_US, help="latency of a hop (%(default)s)")
    add("--images-per-second", nargs="+", metavar="FORMAT=N", help="speed of one GPU (an A100)")
    add("--measure", action="store_true", help="measure sums over mpirun's processes instead")
    add("--rounds", type=positive, default=15, help="rounds of --measure (%(default)s)")
    add("--document", type=Path, metavar="FILE", help="fill in its tables and draw its figure")
    options = parser.parse_args(arguments)

    def work() -> None:
        if options.measure:
            print(measured_link(options.rounds), end="")
        else:
            plan(options)

    return exit_status(work, errors=(ValueError, OSError))


if __name__ == "__main__":
    sys.exit(main())
