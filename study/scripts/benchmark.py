"""Time libraries and formats side by side: in turn, each in a process of its own.

    python study/scripts/benchmark.py all --output study/results      # the target `benchmark`
    python study/scripts/benchmark.py training inference --model resnet18_v1
    python study/scripts/benchmark.py scale --output study/results    # time, memory against size
    python study/scripts/benchmark.py zoo --output study/results      # networks in float16
    python study/scripts/benchmark.py memory --memory-limit 8GiB      # the largest batch too
    python study/scripts/benchmark.py tuning --output study/results   # measures on top of others

"all" takes about a quarter of an hour on two cores with all peers. The others are run by name, one
at a time, and have records of their own (zoo takes about 25 minutes).

Ratios are per round to the first contestant, so what slows down a whole round cancels. With
--output a record (JSON) and a plot (PNG) are written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for folders that are not installed

from mpgluon.base.files import disk_error
from mpgluon.errors import MpgluonError
from mpgluon_tools.commands import exit_status
from mpgluon_tools.commands.networks import one_device
from mpgluon_tools.tables import counted
from mpgluon_tools.zoo import refuse_unknown_network

from recipes.data.images import list_images
from recipes.options import positive
from study.benchmarks.cases import CASES, DTYPES, CaseOptions
from study.benchmarks.figures import save_figure
from study.benchmarks.growth import measure, sweeps
from study.benchmarks.machine import file_stem, usable_cores
from study.benchmarks.memory import memory, parse_memory, with_largest_batches
from study.benchmarks.race import Case, CaseResult, Conditions, race
from study.benchmarks.record import BenchmarkRecord, begin_record, write_record
from study.benchmarks.report import case_report, heading, memory_table, networks_table
from study.benchmarks.tuning import tuning
from study.benchmarks.zoo import networks, networks_predicting, zoo, zoo_small

ROOT = Path(__file__).resolve().parents[2]
# The names of their environments.
PEERS = {"PyTorch": "torch", "OpenVINO": "openvino"}
# Cases that are run by name, and the rounds of those that do not take 11.
LONG_CASES = {
    "zoo": zoo,
    "zoo-small": zoo_small,
    "networks": networks,
    "networks-predicting": networks_predicting,
    "memory": memory,
    "scale": sweeps,
    "tuning": tuning,
}
ROUNDS: dict[Optional[str], int] = {"networks": 5, "memory": 1, "scale": 5, "tuning": 5}
# Whose contestants run one after the other, so that each has the memory to itself.
ALONE = ("memory", "scale")
BESIDE_PYTORCH = ("networks", "networks-predicting")
TABLES = {
    **dict.fromkeys(("zoo", "zoo-small", *BESIDE_PYTORCH), networks_table),
    "memory": memory_table,
}


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Parse the command line, time, print, and write; return the exit status."""
    options = parse(arguments)
    bad_input = (ValueError, ImportError, MpgluonError)
    return exit_status(lambda: run(options), "stopped; nothing is written", bad_input)


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Return the parsed command line; exits with status 2 on one that is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="+", choices=["all", *CASES, *LONG_CASES], metavar="CASE",
        help=f"{', '.join(CASES)}; all of these; or, by itself, {', '.join(LONG_CASES)}",
    )  # fmt: skip
    add = parser.add_argument
    add("--dtype", nargs="+", choices=DTYPES,
        help="formats (all; zoo, memory, recurrent and attention float32 and float16)")  # fmt: skip
    add("--model", default="resnet50_v1", help="a network of either model zoo (%(default)s)")
    add("--models", nargs="+", metavar="MODEL", help="networks of zoo and zoo-small (a list)")
    add("--batch-size", nargs="+", type=positive,
        help="(8; inference 1 and 8; recurrent 25; attention 16; memory 8, 16, 32; tuning 32; "
        "zoo-small 20; for CIFAR's networks in the zoo 32)")  # fmt: skip
    add("--image-size", type=positive, help="pixels (224; in the zoo the network's own)")
    add("--device", default="cpu", help="cpu or gpu:0 (%(default)s)")
    add("--rounds", type=positive, help="runs of each contestant (11; scale 5, memory 1)")
    add("--warm-up", type=int, default=2, help="runs before those, not counted (%(default)s)")
    add("--threads", type=positive, help="threads of each contestant (all usable cores)")
    add("--limit", type=float, default=300, metavar="SECONDS",
        help="limit for a contestant's start and each run (%(default)s)")  # fmt: skip
    add("--peers", action=argparse.BooleanOptionalAction, default=True,
        help="mxnet.contrib.amp, Gluon's DataLoader and the libraries below take part")  # fmt: skip
    for library, name in PEERS.items():
        words = f"an interpreter with {library} (.venv-peers/bin/python if there is one)"
        add(f"--{name}-python", type=Path, metavar="PATH", help=words)
    add("--images", metavar="DIR",
        help="a folder of images per class for the pipeline (rendered ones in data/)")  # fmt: skip
    add("--workers", type=positive, default=2, help="processes that decode images (%(default)s)")
    add("--memory-limit", type=parse_memory, metavar="SIZE",
        help="such as 8GiB: memory finds the largest batch whose peak is within it")  # fmt: skip
    add("--output", type=Path, metavar="PATH",
        help="a .json file, or a folder in which the machine names it")  # fmt: skip
    options = parser.parse_args(arguments)
    for name in LONG_CASES:
        if name in options.cases and len(options.cases) > 1:
            parser.error(f"{name} is measured by itself, and has a record of its own")
    for name in PEERS.values():
        python = getattr(options, f"{name}_python")
        if python is not None and not python.exists():
            parser.error(f"--{name}-python: there is no {python}")
    return options


def run(options: argparse.Namespace) -> int:
    """Time the cases; the status is 1 if a contestant has no result."""
    one_device(options.device)
    for model in (options.model, *(options.models or ())):
        refuse_unknown_network(model)
    by_itself = options.cases[0] if options.cases[0] in LONG_CASES else None
    conditions = Conditions(
        threads=options.threads or usable_cores(),
        rounds=options.rounds or ROUNDS.get(by_itself, 11),
        warm_up=options.warm_up,
        limit_s=options.limit,
    )
    choices = CaseOptions(
        model=options.model,
        models=options.models,
        batch_sizes=options.batch_size,
        image_size=options.image_size,
        device=options.device,
        dtypes=options.dtype,
        peers=options.peers,
        **({} if by_itself and by_itself not in BESIDE_PYTORCH else find_peers(options)),
        images=options.images,
        workers=options.workers,
        memory_limit_mib=options.memory_limit,
    )
    names = list(CASES) if "all" in options.cases else list(dict.fromkeys(options.cases))
    cases = [case for name in names for case in {**CASES, **LONG_CASES}[name](choices)]

    def run_one(case: Case) -> CaseResult:
        time_one = measure if by_itself in ALONE else race
        return time_one(case, conditions, progress=sys.stderr.isatty())

    if options.images is not None:
        list_images(options.images)  # a folder without images is refused before anything is timed
    if options.output is not None:
        make_folder(options.output)
    results: Iterable[CaseResult] = map(run_one, cases)
    if by_itself == "memory":
        results = with_largest_batches(results, choices, run_one)
    record = begin_record(conditions)
    print(heading(record))
    for result in results:
        record = record.with_case(result)
        print()
        print(case_report(result), flush=True)
    if by_itself in TABLES:
        print(f"\n{TABLES[by_itself](record.cases)}")
    if options.output is not None:
        write(record, options, suffix=f"-{by_itself}" if by_itself else "")
    return 1 if record.failures else 0


def find_peers(options: argparse.Namespace) -> dict[str, str]:
    """Return the peers' interpreters by option; print which do not take part, and why."""
    found: dict[str, str] = {}
    for library, name in PEERS.items() if options.peers else ():
        given = getattr(options, f"{name}_python")
        python = ROOT / ".venv-peers" / "bin" / "python" if given is None else given
        if not python.exists():
            reason = f"no .venv-peers/bin/python, and no --{name}-python"
            print(f"{library} does not take part: {reason}")
            continue
        found[f"{name}_python"] = str(python)
    return found


def make_folder(output: Path) -> None:
    """Make the record's folder before anything is timed, so that a bad path fails at once."""
    folder = output.parent if output.suffix == ".json" else output
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, folder, "start again") from error


def write(record: BenchmarkRecord, options: argparse.Namespace, *, suffix: str) -> None:
    """Write the record, and the plot to the same folder."""
    path: Path = options.output
    if path.suffix != ".json":
        path /= f"{file_stem(record.machine, options.device)}{suffix}.json"
    write_record(record, path)
    measured = [case for case in record.cases if case.results]
    plot = path.with_suffix(".png")
    processor = f"{record.machine['processor']} ({record.machine['instruction_set']})"
    title = f"{processor}, {counted(record.conditions.threads, 'thread')}"
    plots = []
    if measured:
        save_figure(plot, measured, title=title)
        plots.append(plot)
    training = [case for case in measured if case.name == "training"]
    if training and len(training) < len(measured):  # the picture for docs/index.md
        plots.append(path.with_name(f"{path.stem}-training.png"))
        save_figure(plots[-1], training, title=title)
    print(f"\nwritten: {' and '.join(map(str, [path, *plots]))}")


if __name__ == "__main__":
    sys.exit(main())
