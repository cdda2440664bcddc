"""Run the experiments behind docs/results.md, and fill its pages from their records.

    python study/scripts/evidence.py list
    python study/scripts/evidence.py run --data-dir data            # the target `evidence`
    python study/scripts/evidence.py run parity/resnet50_v2/float16 # all below a name
    python study/scripts/evidence.py repeat                         # one, by chance, from scratch
    python study/scripts/evidence.py document                       # docs/results*.md, README

An experiment with a record of its config is not run again, and an interrupted training run is
resumed by the same command.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import random
import secrets
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NoReturn, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # study/experiments/ is not installed

from mpgluon.errors import MpgluonError
from mpgluon_tools.commands import exit_status
from mpgluon_tools.tables import counted

from recipes.options import positive
from recipes.training import InterruptedRunError
from study.benchmarks.machine import describe_machine, usable_cores
from study.experiments.experiment import Experiment, Group, Place
from study.experiments.page import Document, out_of_date, unsupported, write_document
from study.experiments.photographs import count_categories
from study.experiments.records import (
    Repetition,
    add_repetition,
    current_records,
    first_difference,
    processor_of,
    read_records,
    refuse_mixtures,
    write_record,
)
from study.experiments.runner import now, run_apart, run_here, select

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run a command and return the exit status."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, _as_ctrl_c)

    def work() -> int:
        groups: Sequence[Group] = importlib.import_module(options.groups).GROUPS
        try:
            status: int = options.do(options, groups)
        except InterruptedRunError:
            raise KeyboardInterrupt from None
        return status

    bad_input = (ValueError, OSError, MpgluonError)
    return exit_status(work, "stopped; `run` resumes from here", bad_input)


def _as_ctrl_c(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def parse(arguments: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """Return the parsed command line; a wrong one exits with status 2."""
    places = argparse.ArgumentParser(add_help=False)
    add = places.add_argument
    add("--output", type=Path, default=ROOT / "study" / "results" / "evidence", metavar="DIR",
        help="folder of records (study/results/evidence)")  # fmt: skip
    add("--groups", default="study.experiments.groups", help=argparse.SUPPRESS)  # for tests
    running = argparse.ArgumentParser(add_help=False)
    add = running.add_argument
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR",
        help="folder of Caltech 101 or caltech101-mini (%(default)s)")  # fmt: skip
    add("--work-dir", type=Path, default=Path("runs/evidence"), metavar="DIR",
        help="folder of unfinished runs and logs (%(default)s)")  # fmt: skip

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("list", parents=[places], help="name all experiments")
    one.set_defaults(do=list_all)
    one = commands.add_parser("run", parents=[places, running], help="run those without a record")
    one.add_argument(
        "names", nargs="*", metavar="NAME", help="experiments, or prefixes of their names (all)"
    )
    one.add_argument("--jobs", type=positive, default=usable_cores(), metavar="N",
        help="experiments at a time (%(default)s, the usable cores)")  # fmt: skip
    # The networks are small: two runs of one thread each take less time than one of two threads.
    one.add_argument("--threads", type=positive, default=1, metavar="N",
        help="threads of each; their number changes last bits (%(default)s)")  # fmt: skip
    one.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process
    one.set_defaults(do=run)
    one = commands.add_parser(
        "repeat", parents=[places, running], help="run one again and compare with its record"
    )
    one.add_argument("name", nargs="?", metavar="NAME", help="experiment (chosen at random)")
    one.add_argument("--seed", type=int, metavar="N", help="seed of that choice (random)")
    one.set_defaults(do=repeat)
    one = commands.add_parser("document", parents=[places], help="fill the pages")
    one.add_argument("--root", type=Path, default=ROOT, metavar="DIR",
        help="folder of docs/results.md and README.md")  # fmt: skip
    one.add_argument("--check", action="store_true", help="only say whether it would change")
    one.set_defaults(do=document)
    return parser.parse_args(arguments)


def list_all(options: argparse.Namespace, groups: Sequence[Group]) -> int:
    """Print each experiment's name, and whether it has a record."""
    everything = select(groups, [])
    records = current_records(options.output, everything)
    for one in everything:
        print(f"{'done' if one.name in records else '    '}  {one.name}")
    return 0


def run(options: argparse.Namespace, groups: Sequence[Group]) -> int:
    """Run the experiments without a record; the status is 1 if one failed."""
    chosen = select(groups, options.names)
    if options.here:
        return run_in_this_process(options, chosen)
    done = current_records(options.output, chosen)
    if done:
        print(
            f"{len(done)} with a record: {', '.join([*done][:8])}{', …' if len(done) > 8 else ''}"
        )
    waiting = possible([one for one in chosen if one.name not in done], options)
    if waiting:
        everything, here = select(groups, []), processor_of(describe_machine())
        refuse_mixtures(
            everything, current_records(options.output, everything), options.output,
            waiting=waiting, here=here,
        )  # fmt: skip
    print(f"{len(waiting)} to run; their output goes to {options.work_dir}", flush=True)
    failed, width = [], len(str(len(waiting)))
    runs = run_apart(
        waiting,
        lambda one: command(one, options, options.output, options.work_dir),
        jobs=options.jobs,
        threads=options.threads,
        logs=options.work_dir,
    )
    with closing(runs):
        for number, ended in enumerate(runs, 1):
            name = ended.experiment.name
            print(f"[{number:{width}}/{len(waiting)}] {name}: ", end="")
            if ended.reason is None:
                print(f"{ended.seconds:.0f} s", flush=True)
                continue
            failed.append(name)
            print(f"it {ended.reason}; {options.work_dir / name}.log ends with")
            print("\n".join(f"    {line}" for line in ended.output.splitlines()), flush=True)
    if failed:
        print(f"{len(failed)} failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def possible(chosen: Sequence[Experiment], options: argparse.Namespace) -> list[Experiment]:
    """Return the experiments whose photographs exist, and print which are left out.

    Raises
    ------
    ValueError
        If named experiments cannot run.
    """
    found = count_categories(options.data_dir)
    lacking = [one for one in chosen if one.needs_photographs and one.categories > found]
    if lacking:
        words = (
            f"{', '.join(one.name for one in lacking)}: {options.data_dir} has photographs of "
            f"{found} categories, and {max(one.categories for one in lacking)} are needed; get "
            "them with `python scripts/download_caltech.py`, and give their folder as --data-dir"
        )
        if options.names:
            raise ValueError(f"cannot run {words}")
        print(f"left out {words}")
    return [one for one in chosen if one not in lacking]


def command(
    experiment: Experiment, options: argparse.Namespace, output: Path, work_dir: Path
) -> list[str]:
    """Return the command line that runs an experiment in the process that it starts."""
    places = {"data-dir": options.data_dir, "output": output, "work-dir": work_dir}
    given = [f"--{name}={place}" for name, place in places.items()]
    name = experiment.name
    return [sys.executable, __file__, "run", name, "--here", f"--groups={options.groups}", *given]


def run_in_this_process(options: argparse.Namespace, chosen: Sequence[Experiment]) -> int:
    """Run one experiment, with the threads that the environment names, and write its record."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    (experiment,) = [one for one in chosen if [one.name] == options.names]
    place = Place(options.data_dir, options.work_dir / experiment.name)
    record = run_here(experiment, place, threads=int(os.environ["OMP_NUM_THREADS"]))
    print(f"written: {write_record(record, options.output)}")
    return 0


def repeat(options: argparse.Namespace, groups: Sequence[Group]) -> int:
    """Run one experiment again in fresh folders; the status is 1 if the result differs."""
    seed, experiment = choose(options, groups)
    record = read_records(options.output)[experiment.name]
    print(f"{experiment.name} once more, with {counted(record.threads, 'thread')}", flush=True)
    options.work_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="repeated-", dir=options.work_dir) as folder:
        output, work_dir = Path(folder, "records"), Path(folder, "work")
        runs = run_apart(
            [experiment],
            lambda one: command(one, options, output, work_dir),
            jobs=1,
            threads=record.threads,
            logs=Path(folder, "logs"),
        )
        with closing(runs):
            (ended,) = runs
        if ended.reason is not None:
            print(f"error: it {ended.reason}\n{ended.output}", file=sys.stderr)
            return 2
        again = read_records(output)[experiment.name]
    difference = first_difference(record.outcome, again.outcome)
    add_repetition(Repetition(experiment.name, now(), seed, difference), options.output)
    if difference is None:
        print("every figure and every point of its curves is the same")
        return 0
    print(f"not the same: {difference}", file=sys.stderr)
    return 1


def choose(
    options: argparse.Namespace, groups: Sequence[Group]
) -> tuple[Optional[int], Experiment]:
    """Return the experiment to repeat, and the seed of the choice if it was random."""
    everything = select(groups, [])
    records = current_records(options.output, everything)
    if options.name is not None:
        for one in everything:
            if one.name == options.name and one.name in records:
                return None, one
        raise ValueError(f"there is no record of {options.name!r} to compare with; run it first")
    found = count_categories(options.data_dir)
    candidates = [
        one
        for one in everything
        if one.name in records
        and records[one.name].outcome.figures  # a record of times only cannot be repeated
        and not (one.needs_photographs and one.categories > found)
    ]
    if not candidates:
        raise ValueError(
            f"{options.output} has no record of an experiment that could be repeated with the "
            f"photographs in {options.data_dir}; see --data-dir and --output"
        )
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    print(f"one of {len(candidates)}, chosen with --seed {seed}")
    return seed, random.Random(seed).choice(candidates)


def document(options: argparse.Namespace, _: Sequence[Group]) -> int:
    """Fill the pages, or print which are out of date; the status is 1 for these and false claims.

    A false claim is one that the records do not support; it is printed in both cases.
    """
    pages: Document = sys.modules[options.groups].DOCUMENT
    problems = []
    if options.check:
        problems = [
            f"out of date: {path}; run python study/scripts/evidence.py document"
            for path in out_of_date(pages, options.output, options.root)
        ]
    else:
        for path in write_document(pages, options.output, options.root):
            print(f"written: {path}")
    problems += [
        f"the records do not support: {claim}; see study/experiments/claims.py"
        for claim in unsupported(pages, options.output, options.root)
    ]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
