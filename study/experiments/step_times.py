"""The time of a training step in each format, for the networks of the parity runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from study.benchmarks.cases import CaseOptions, training
from study.benchmarks.machine import usable_cores
from study.benchmarks.report import duration
from study.experiments import figures, parity
from study.experiments.experiment import Experiment, Group, Outcome, Place, Records
from study.experiments.races import complete_race, times_of

__all__ = ["GROUP", "measure"]

_ROUNDS = 11
# The benchmark's contestants by our names of formats; the first is what others are compared with.
_CONTESTANTS = {
    "float32": "Gluon float32",
    "float16": "mpgluon float16",
    "mixed_float16": "mpgluon autocast float16",
    "bfloat16": "mpgluon bfloat16",
}
_PREPARED = "mpgluon float32"


def _experiment(network: parity.Network) -> Experiment:
    config = {
        "model": network.name,
        "image_size": network.image_size,
        "batch_size": parity.COMMON["batch_size"],
        "rounds": _ROUNDS,
    }
    return Experiment(
        f"step_times/{network.name}", config, partial(measure, config), needs_quiet=True
    )


def measure(config: Mapping[str, Any], place: Place) -> Outcome:  # noqa: ARG001 - it needs no files
    """Return the times and peaks of memory of a training step in each format.

    Parameters
    ----------
    config : mapping
        ``model``, ``image_size``, ``batch_size`` and ``rounds``; ``policies`` to measure as well,
        and whether to measure FP32 as :func:`mpgluon.prepare` leaves it: ``prepared``.
    """
    contestants = dict(_CONTESTANTS)
    if config.get("prepared"):
        contestants["prepared"] = _PREPARED
    options = CaseOptions(
        model=config["model"],
        batch_sizes=[config["batch_size"]],
        image_size=config["image_size"],
        peers=False,
    )
    (case,) = training(options)
    ours = {one.name: one for one in case.contestants}
    for policy in config.get("policies", ()):
        in_fp32 = ours[_PREPARED]
        contestants[policy] = f"mpgluon {policy}"
        ours[contestants[policy]] = replace(
            in_fp32, name=contestants[policy], options={**in_fp32.options, "policy": policy}
        )
    case = replace(case, contestants=[ours[name] for name in contestants.values()])
    threads = usable_cores()
    result = complete_race(case, threads=threads, rounds=config["rounds"])
    times: dict[str, float] = {"threads": threads}
    by_name = {one.name: one for one in result.results}
    for name, contestant in contestants.items():
        times.update(times_of(result, by_name[contestant], name))
    return Outcome(figures={}, times=times)


def _view(records: Records) -> dict[str, Any]:
    rows, short_rows, float16 = [], [], []
    made = set()
    for one in GROUP.experiments:
        if one.name not in records:
            continue
        times = records[one.name].outcome.times
        made.add((records[one.name].versions["mpgluon"], records[one.name].date[:10]))
        float16 += [times["float16/relative"], times["mixed_float16/relative"]]
        short_rows.append([
            one.config["model"],
            str(one.config["image_size"]),
            f"{times['float32/seconds']:.3f}",
            *(f"{times[f'{name}/relative']:.2f}" for name in _CONTESTANTS if name != "float32"),
        ])  # fmt: skip
        for name in _CONTESTANTS:
            memory = times.get(f"{name}/peak_memory_mib")
            rows.append([
                one.config["model"],
                str(one.config["image_size"]),
                name,
                duration(times[f"{name}/seconds"]),
                f"{times[f'{name}/relative']:.2f}",
                f"{times[f'{name}/relative_lower']:.2f} to {times[f'{name}/relative_upper']:.2f}",
                "-" if memory is None else f"{memory:.0f}",
                f"`{one.name}`",
            ])  # fmt: skip
    return {
        "rows": rows,
        "short_rows": short_rows,
        "made": " and ".join(f"mpgluon {version} on {day}" for version, day in sorted(made)),
        "float16": (min(float16), max(float16)) if float16 else None,
    }


def _draw(figure: Any, records: Records) -> None:
    measured = {
        one.config["model"]: records[one.name].outcome.times
        for one in GROUP.experiments
        if one.name in records
    }
    figures.draw_step_times(figure, measured, list(_CONTESTANTS))


GROUP = Group(
    "step_times", [_experiment(one) for one in parity.NETWORKS], _view, {"step-times": _draw}
)
