"""Plan training on many GPUs: bytes, seconds of the exchange, and at which batch it is hidden.

    python scripts/plan_scaling.py --model resnet50_v1 --gpus 8 64 1024 --link-gbit-per-s 200
    mpirun -np 2 python scripts/plan_scaling.py --measure

The first prints what a model of a ring predicts; docs/scaling.md says how far to trust it. The
second measures sums over MPI, and prints the link to give to the first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for what is not installed

from benchmarks.measured_link import fit_link, measure_sums
from benchmarks.scaling import (
    A100,
    ETHERNETS,
    HDR,
    NDR,
    NVLINK,
    Gpu,
    Link,
    Workload,
    batch_table,
    bytes_table,
    clusters_of,
    exchange_table,
    workload_of,
)
from benchmarks.scaling_document import MODEL, document_tables, fill_tables, save_efficiency
from mpgluon.distributed import MpiProcesses
from mpgluon.tables import Table

SIZES = tuple(2**power for power in (14, 16, 18, 20, 22, 23, 25))


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Return the parsed command line; exits with status 2 on one that is wrong."""
    parser = argparse.ArgumentParser(
        description="Plan training on many GPUs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default=MODEL, help="of MXNet's or gluoncv's zoo")
    add("--image-size", type=_positive, default=224, help="pixels")
    add("--gpus", type=_positive, nargs="+", default=[8, 64, 1024])
    add("--gpus-per-machine", type=_positive, default=8)
    add(
        "--batch-size", type=_positive, nargs="+", default=[32, 256], help="images per GPU and step"
    )
    add(
        "--link-gbit-per-s",
        type=float,
        help="between machines, one way, all network cards of a machine together; without it, "
        "some networks by name",
    )
    add("--latency-us", type=float, default=HDR.latency_us, help="of a hop between machines")
    add("--inside-gbit-per-s", type=float, default=NVLINK.gbit_per_s, help="between GPUs")
    add("--inside-latency-us", type=float, default=NVLINK.latency_us)
    add(
        "--images-per-second",
        nargs="+",
        metavar="FORMAT=N",
        help="what one GPU trains with this model, as in float16=2180 float32=1022; without it, "
        "an A100 by its multiply-adds",
    )
    add("--markdown", action="store_true", help="print tables for a document")
    add("--measure", action="store_true", help="measure sums over mpirun's processes instead")
    add("--rounds", type=_positive, default=15, help="how often each sum is measured")
    add("--document", type=Path, metavar="FILE", help="write docs/scaling.md's tables and figure")
    return parser.parse_args(arguments)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Parse the command line, and print tables."""
    options = parse(arguments)
    try:
        if options.measure:
            return measure(options.rounds, markdown=options.markdown)
        if options.document is not None:
            write_document(options.document)
        else:
            plan(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def plan(options: argparse.Namespace) -> None:
    """Print the tables for a user's cluster."""
    workload = workload_of(options.model, options.image_size)
    links: Sequence[Link] = (*ETHERNETS, HDR, NDR)
    if options.link_gbit_per_s is not None:
        name = f"{options.link_gbit_per_s:g} Gbit/s"
        links = [Link(name, options.link_gbit_per_s, options.latency_us)]
    inside = NVLINK
    if (options.inside_gbit_per_s, options.inside_latency_us) != (
        NVLINK.gbit_per_s,
        NVLINK.latency_us,
    ):
        name = f"{options.inside_gbit_per_s:g} Gbit/s"
        inside = Link(name, options.inside_gbit_per_s, options.inside_latency_us)
    clusters = clusters_of(
        options.gpus,
        links,
        inside=inside,
        gpus_per_machine=options.gpus_per_machine,
        gpu=_gpu(options.images_per_second, workload),
    )
    print(
        f"{workload.name}: {workload.parameters / 1e6:.1f} million parameters, "
        f"{workload.multiply_adds / 1e9:.2f} billion multiply-adds per image; "
        f"{clusters[0].gpu.name}\n"
    )
    for title, table in (
        ("Bytes of a step", bytes_table(workload, options.gpus)),
        ("All gradients in one message", exchange_table(workload, clusters)),
        ("The batch at 95 % efficiency", batch_table(workload, clusters, options.batch_size)),
    ):
        print(f"{title}\n{_shown(table, markdown=options.markdown)}\n")


def _gpu(texts: Optional[Sequence[str]], workload: Workload) -> Gpu:
    if texts is None:
        return A100
    speeds = {}
    for text in texts:
        dtype, _, number = text.partition("=")
        try:
            speeds[dtype] = float(number)
        except ValueError:
            raise ValueError(
                f"--images-per-second takes FORMAT=N, as in float16=2180; received {text!r}"
            ) from None
    return Gpu.from_speed("your GPU", speeds, workload.multiply_adds)


def measure(rounds: int, *, markdown: bool) -> int:
    """Measure sums over mpirun's processes, and let rank 0 print them and the fitted link."""
    with MpiProcesses() as processes:
        if processes.world_size < 2:
            print("error: one process sums nothing; start this with mpirun", file=sys.stderr)
            return 2
        seconds = measure_sums(processes, SIZES, rounds=rounds)
        if not processes.is_first:
            return 0
        link = fit_link(processes.world_size, seconds)
        rows = [[f"{size / 1e6:.3f}", f"{1e3 * time:.3f}"] for size, time in seconds.items()]
        print(_shown(Table(["MB", "median of the sum, ms"], rows), markdown=markdown))
        print(
            f"{processes.world_size} processes, {rounds} rounds; as a ring: "
            f"--link-gbit-per-s {link.gbit_per_s:.3g} --latency-us {link.latency_us:.3g}"
        )
    return 0


def write_document(path: Path) -> None:
    """Put the tables into a document, and the figure beside it."""
    text = fill_tables(path.read_text(encoding="utf-8"), document_tables())
    path.write_text(text, encoding="utf-8")
    save_efficiency(path.with_suffix(".png"))
    print(f"{path} and {path.with_suffix('.png')} are up to date")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, received {text}")
    return number


def _shown(table: Table, *, markdown: bool) -> str:
    return table.to_markdown() if markdown else str(table)


if __name__ == "__main__":
    sys.exit(main())
