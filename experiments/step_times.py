"""What a training step takes in each format: the networks of the parity runs, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Optional

from benchmarks.cases import CaseOptions, training
from benchmarks.machine import usable_cores
from benchmarks.race import Conditions, race
from benchmarks.report import duration
from experiments import parity
from experiments.experiment import Experiment, Group, Outcome, Place, Record, Section
from experiments.runner import command_for
from mpgluon.errors import MpgluonError
from mpgluon.tables import Table

__all__ = ["GROUP", "run_name"]

_ROUNDS = 11
# The benchmark's contestants by our names of formats; the first is what others are compared with.
_CONTESTANTS = {
    "float32": "mpgluon float32",
    "float16": "mpgluon float16",
    "mixed_float16": "mpgluon autocast float16",
    "bfloat16": "mpgluon bfloat16",
}


def run_name(network: str) -> str:
    """Return the name of an experiment."""
    return f"step_times/{network}"


def experiments() -> list[Experiment]:
    """Return one race for each network of the parity runs."""
    return [_experiment(network) for network in parity.NETWORKS]


def _experiment(network: parity.Network) -> Experiment:
    config = {
        "model": network.name,
        "image_size": network.image_size,
        "batch_size": parity.COMMON["batch_size"],
        "rounds": _ROUNDS,
    }
    name = run_name(network.name)
    return Experiment(name, config, partial(_run, config), needs_quiet=True)


def _run(config: Mapping[str, Any], place: Place) -> Outcome:  # noqa: ARG001 - it needs no files
    options = CaseOptions(
        model=config["model"],
        batch_sizes=[config["batch_size"]],
        image_size=config["image_size"],
        peers=False,
    )
    (case,) = training(options)
    ours = {one.name: one for one in case.contestants}
    case = replace(case, contestants=[ours[name] for name in _CONTESTANTS.values()])
    threads = usable_cores()
    result = race(case, Conditions(threads=threads, rounds=config["rounds"]))
    if result.failures:
        reasons = (f"{one.name} {one.reason}\n{one.output}" for one in result.failures)
        raise MpgluonError(f"no times of {config['model']}: {'; '.join(reasons)}")
    times: dict[str, float] = {"threads": threads}
    by_name = {one.name: one for one in result.results}
    for name, contestant in _CONTESTANTS.items():
        found = by_name[contestant]
        relative = result.relative(found)
        assert relative is not None  # the baseline has not failed
        times[f"{name}/seconds"] = found.time.median
        times[f"{name}/relative"] = relative.median
        times[f"{name}/relative_lower"] = relative.lower
        times[f"{name}/relative_upper"] = relative.upper
        if found.peak_memory_mib is not None:
            times[f"{name}/peak_memory_mib"] = found.peak_memory_mib
    return Outcome(figures={}, times=times)


def section(records: Mapping[str, Record]) -> Section:
    """Return the table of times."""
    rows, missing = [], []
    for experiment in experiments():
        record = records.get(experiment.name)
        if record is None:
            missing.append(experiment.name)
            continue
        command = command_for(experiment.name)
        rows += [_row(experiment.config, name, record.outcome.times, command)
                 for name in _CONTESTANTS]  # fmt: skip
    parts = [
        "A step is forward, backward and the optimizer's update on a batch that is there already. "
        "The formats of a network take turns, each in a process of its own; ratios are per round "
        f"to {parity.BASE}, medians of {_ROUNDS} rounds and quartiles. The optimizer is SGD with "
        f"momentum, on 1000 classes, with batches of {parity.COMMON['batch_size']} and all "
        "cores of a machine without other work. float16 on a CPU is for its arithmetic, not for "
        "speed: what a GPU with Tensor Cores makes of it is another matter.",
    ]
    if rows:
        headings = ["network", "pixels", "format", "time per step", f"relative to {parity.BASE}",
                    "quartiles", "peak MiB", "command"]  # fmt: skip
        parts.append(Table(headings, rows).to_markdown())
    if missing:
        parts.append(f"Not run yet: {', '.join(missing)}.")
    return Section("\n\n".join(parts))


def _row(
    config: Mapping[str, Any], name: str, times: Mapping[str, float], command: str
) -> list[str]:
    memory: Optional[float] = times.get(f"{name}/peak_memory_mib")
    return [
        config["model"],
        str(config["image_size"]),
        name,
        duration(times[f"{name}/seconds"]),
        f"{times[f'{name}/relative']:.2f}",
        f"{times[f'{name}/relative_lower']:.2f} to {times[f'{name}/relative_upper']:.2f}",
        "-" if memory is None else f"{memory:.0f}",
        f"`{command}`",
    ]


GROUP = Group("step_times", "Time per step", experiments, section)
