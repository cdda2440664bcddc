"""Time a training step in FP32, FP16 and BF16, and measure its memory.

    mpgluon bench mymodule:make_net --image-size 32 --batch-size 64
    mpgluon bench resnet50_v2 --image-size 64
    mpgluon bench resnet50_v2 --profile --dtype bfloat16

Speedups are over plain MXNet in FP32; "float32, prepared" has the own operators of mpgluon.prepare,
with the same bits. All take turns, round by round, so that a busy machine slows all of them alike;
still, let nothing else run. Memory is the peak of a process of its own, on Linux and a CPU.

With --profile, tables of the operators of a step and of oneDNN's primitives in place of these.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Optional

from mpgluon_tools.commands.arguments import (
    add_classes,
    add_image_size,
    add_input_shape,
    add_network,
    positive,
    refuse_given,
    width,
)
from mpgluon_tools.progress import progress_line

if TYPE_CHECKING:
    from mpgluon_tools.step_profile import StepProfile

__all__ = ["EPILOG", "add_arguments", "profile_of_process", "run"]

EPILOG = ""
_STATUS = Path("/proc/self/status")
_POLICIES = {
    "float32": "float32",
    "prepared": "float32",
    "float16": "float16",
    "bfloat16": "mixed_bfloat16",
}
_NAMES = {
    "float32": "float32",
    "prepared": "float32, prepared",
    "float16": "float16, cast",
    "bfloat16": "bfloat16, autocast",
}
_MEMORY_STEPS = 3
_MOST_SKIPS = 40  # while a dynamic loss scale falls from 2^16
_BUSY = 0.5  # of the cores, by the load average of a minute


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_network(parser, returns=" or (network, batch)")
    add_classes(parser)
    add_image_size(parser)
    add_input_shape(parser, "in place of --image-size and --batch-size")
    parser.add_argument("--batch-size", type=positive, default=8, help="(default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or gpu:0 (default: %(default)s)")
    parser.add_argument(
        "--rounds",
        type=positive,
        default=15,
        help="steps of each format, after two that are not timed (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=60,
        help="after which no further round begins (default: %(default)s)",
    )
    parser.add_argument("--no-memory", action="store_true", help="measure times only")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="show where the time of a step goes, by operator and by primitive of oneDNN; --rounds "
        "steps of each format, of which the fastest counts, on a CPU",
    )
    parser.add_argument(
        "--dtype",
        choices=_POLICIES,
        action="append",
        help="of --profile, once for each format (default: all); prepared is float32 with the own "
        "operators of mpgluon.prepare",
    )
    for hidden in ("--memory-of", "--profile-of"):
        parser.add_argument(hidden, choices=_POLICIES, help=argparse.SUPPRESS)


def run(options: argparse.Namespace, import_all_of_mpgluon: Callable[[], None]) -> int:
    """Time and measure, and print a table."""
    load = os.getloadavg()[0]  # of the minute before this command
    import_all_of_mpgluon()
    if options.profile_of:
        from mpgluon_tools.step_profile import profile_process

        profile_process(lambda: _training_step(options, options.profile_of), steps=options.rounds)
        return 0
    if options.profile:
        others = ("device", "seconds", "no_memory")
        refuse_given(options, others, "--profile runs --rounds steps on the CPU")
        _print_profiles(options)
        print(_conditions(load))
        return 0
    refuse_given(options, ("dtype",), "the table of times has every format")
    from mpgluon_tools.tables import Table, counted
    from mpgluon_tools.timing import interleave, quartiles, ratios

    if options.memory_of:
        _training_step(options, options.memory_of)
        print(f"{_peak_mib() or 0:.0f}")
        return 0
    with progress_line() as show:
        steps: dict[str, Callable[[], int]] = {}
        for dtype in _POLICIES:
            show(f"the network in {dtype}")
            steps[dtype] = _training_step(options, dtype, warm_up=1)
        seconds = interleave(
            steps, rounds=options.rounds, limit_s=options.seconds, warm_up=1, progress=show
        )
        peaks = {}
        if not options.no_memory and options.device == "cpu" and _peak_mib() is not None:
            for dtype in steps:
                show(f"memory of a step in {dtype}, in a process of its own")
                peaks[dtype] = _peak_of_process(options, dtype)
    samples = steps["float32"]()
    rows = []
    for dtype, times in seconds.items():
        lower, median, upper = quartiles(times)
        speedup = quartiles(ratios(seconds["float32"], times)).median
        rows.append(
            (
                _NAMES[dtype],
                f"{1e3 * median:.1f}",
                f"{1e3 * lower:.1f} to {1e3 * upper:.1f}",
                f"{speedup:.2f}",
                f"{samples / median:.1f}",
                peaks.get(dtype, "-"),
            )
        )
    headings = ("format", "ms, median", "quartiles", "speedup", "samples/s", "peak MiB")
    rounds = counted(len(seconds["float32"]), "round")
    print(f"{options.network}: a training step with a batch of {samples}, {rounds} in turn\n")
    print(Table(headings, rows).fitted(width()))
    print(_conditions(load))
    return 0


def _training_step(
    options: argparse.Namespace, dtype: str, *, warm_up: int = _MEMORY_STEPS
) -> Callable[[], int]:
    """Return a function that trains one step and returns the batch size; it was called a few times.

    The weights and the batch are the same in each format. Steps that a loss scale skips update
    nothing, so that they take less time, and less memory before the first update: they come before.
    """
    import mpgluon
    from mpgluon import amp
    from mpgluon_tools.commands.networks import batch_of, one_device, open_network

    import mxnet as mx
    import numpy as np
    from mxnet import autograd

    device = one_device(options.device)
    mx.random.seed(0)
    np.random.seed(0)
    opened = open_network(options, device)
    net, (batch, _) = opened.net, batch_of(opened, options, device)
    if all(one.grad_req == "null" for one in net.collect_params().values()):
        raise ValueError(f"{net.name} has no trainable parameters, so it has no training step")
    net(*batch.arguments)  # which completes shapes
    optimizer = {"learning_rate": 1e-4, "momentum": 0.9}
    trainer = mpgluon.prepare(net, _POLICIES[dtype], "sgd", optimizer)
    if dtype == "float32":
        mpgluon.restore(net)  # its graph is MXNet's
    net.hybridize(static_alloc=True, static_shape=True)
    samples = len(batch.arguments[0])

    def step() -> int:
        with autograd.record():
            loss = batch.loss_fn(net(*batch.arguments), batch.labels)
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        trainer.step(samples)
        mx.nd.waitall()
        return samples

    for _ in range(warm_up):
        step()
    for _ in range(_MOST_SKIPS):
        if not amp.step_was_skipped(trainer):
            break
        step()
    return step


def _peak_mib() -> Optional[float]:
    """Return the largest resident memory of this process so far; None where Linux does not say."""
    if not _STATUS.exists():
        return None
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 2**10  # from KiB


def _peak_of_process(options: argparse.Namespace, dtype: str) -> str:
    """Return the peak of a process that trains a few steps, interpreter and libraries included."""
    done = _process(options, f"--memory-of={dtype}")
    if done.returncode:
        print(f"the memory of {dtype} could not be measured: {_reason(done)}", file=sys.stderr)
        return "-"
    return done.stdout.split()[-1]


def _process(
    options: argparse.Namespace, *more: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run this command for the same network in another process."""
    shapes = [f"--input-shape={','.join(map(str, one))}" for one in options.input_shape or ()]
    numbers = [
        f"--{name.replace('_', '-')}={getattr(options, name)}"
        for name in ("classes", "image_size", "batch_size")
    ]
    command = [sys.executable, "-W", "ignore", "-m", "mpgluon_command", "bench", options.network]
    return subprocess.run(
        [*command, *shapes, *numbers, *more],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables},
        check=False,
    )


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    said = done.stderr.strip().splitlines()[-1:] or [f"it ended with {done.returncode}"]
    return said[0].removeprefix("error: ")


def profile_of_process(options: argparse.Namespace, dtype: str) -> StepProfile:
    """Return the profile of a training step, from a process of its own.

    Raises
    ------
    ValueError
        If the process fails.
    """
    from mpgluon_tools.step_profile import ENVIRONMENT, read_profile

    rounds = f"--rounds={options.rounds}"
    done = _process(options, f"--profile-of={dtype}", rounds, **ENVIRONMENT)
    if done.returncode:
        raise ValueError(f"a step in {dtype} could not be profiled: {_reason(done)}")
    return read_profile(done.stdout)


def _print_profiles(options: argparse.Namespace) -> None:
    """Print the operators and the primitives of each format that was asked for."""
    for dtype in options.dtype or _POLICIES:
        with progress_line() as show:
            show(f"a profile of a step in {dtype}, in a process of its own")
            profile = profile_of_process(options, dtype)
        print(f"{options.network}: the operators of a training step, {_NAMES[dtype]}\n")
        print(profile.table_of_operators().fitted(width()))
        print("\nPrimitives of oneDNN, as parts of these operators\n")
        print(f"{profile.table_of_primitives().fitted(width())}\n")


def _conditions(load: float) -> str:
    """Return a description of the conditions that the times depend on."""
    from mpgluon.base.processor import processor, usable_cores
    from mpgluon.kernels.bfloat16 import bfloat16_products
    from mpgluon_tools.tables import counted

    native = "natively" if bfloat16_products() == "native" else "emulated"
    cores = usable_cores()
    lines = [
        f"{counted(cores, 'core')} of {processor()[0] or 'this processor'}; "
        f"on a CPU, bfloat16 is computed {native} here"
    ]
    if load > _BUSY * cores:
        lines.append(
            f"The machine was busy: a load of {load:.1f} in the minute before. Repeat this on an "
            "idle one."
        )
    else:
        lines.append("Times hold for an idle machine: compare them only if nothing else ran.")
    return "\n" + "\n".join(lines)
