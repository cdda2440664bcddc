"""Running a recorded step again, on CPUs: its bits, where it overflowed, and what would help."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

from mpgluon.base.blocks import interface
from mpgluon.base.processor import computing_threads
from mpgluon_tools.diagnostics.overflow import OverflowReport, ValueRange
from mpgluon_tools.recorder.steps.cures import Cure, Cures
from mpgluon_tools.recorder.steps.named import named_loss, named_network
from mpgluon_tools.recorder.steps.recorded_network import code_of, paths_of
from mpgluon_tools.recorder.steps.recorded_step import GradientMark, RecordedStep, read_step
from mpgluon_tools.recorder.steps.step_bench import Gradients, LossFunction, StepBench
from mpgluon_tools.tables import Table, counted

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import gluon

__all__ = ["Replay", "replay"]

_FLAGS_SHOWN = 8


@dataclass(frozen=True, eq=False)
class Replay:
    """Result of running a recorded step again.

    Attributes
    ----------
    recorded : RecordedStep
    losses : list of arrays
        One for each pass and device.
    gradients : dict from a name in the network's structure to a list of arrays, one per device
        Still multiplied by the loss scale.
    different, elsewhere : tuple of str
        The parameters whose gradients have other bits than the recorded ones, NaN aside; and of
        these, those that are not finite in other places.
    overflow : OverflowReport or None
        Where the step overflowed; ``None`` if all arrays of its batches are finite.
    layer : str
        The block of the report as an expression, such as ``net.features[3]``.
    operands : tuple of ValueRange
        The ranges of the operator's operands, or of the gradient that came before.
    cures : tuple of Cure
    threads : int
        With how many it was run again: with another number than the recorded one sums have another
        order, and gradients other bits.
    """

    recorded: RecordedStep
    losses: list[npt.NDArray[Any]]
    gradients: Gradients
    different: tuple[str, ...]
    elsewhere: tuple[str, ...]
    overflow: Optional[OverflowReport]
    layer: str
    operands: tuple[ValueRange, ...]
    cures: tuple[Cure, ...]
    threads: int

    @property
    def same_bits(self) -> bool:
        """Whether every gradient has the bits that were recorded."""
        return not self.different

    def __str__(self) -> str:
        return self.text()

    def text(self, width: Optional[int] = None) -> str:
        """Return the result, by default in lines of any length.

        Parameters
        ----------
        width : int, optional
            Characters of a line of the tables. Where the Python of a cure does not fit into the
            table, it follows in a line of its own, to be copied.
        """
        parts = [f"{self._origin()}\n{self._agreement()}", self._place()]
        if self.operands:
            rows = [
                (str(r.shape), r.dtype, f"{r.smallest:.4g}", f"{r.largest:.4g}", str(r.not_finite))
                for r in self.operands
            ]
            headings = ("what went in", "format", "smallest", "largest", "not finite")
            operands = Table(headings, rows)
            parts.append(str(operands) if width is None else operands.fitted(width))
        if self.recorded.flags:
            shown = self.recorded.flags[:_FLAGS_SHOWN]
            more = len(self.recorded.flags) - len(shown)
            lines = [*shown, f"and {counted(more, 'more layer')}"] if more else shown
            parts.append("\n  ".join(["flags that the recorded step raised:", *lines]))
        if self.cures:
            cures = [
                (c.name, "yes" if c.saves else "no", c.code)
                if not c.error
                else (c.name, "not run", c.error)
                for c in self.cures
            ]
            parts.append(_cures(cures, width))
        return "\n\n".join(parts)

    def _origin(self) -> str:
        step = self.recorded
        what = "skipped" if step.reason == "skipped" else "with a loss that is not finite,"
        versions = ", ".join(f"{n} {step.versions.get(n)}" for n in ("mpgluon", "mxnet", "numpy"))
        threads = ""
        if step.threads not in (None, self.threads):
            threads = (
                f"\nrecorded with {counted(step.threads, 'thread')}, replayed with {self.threads}, "
                "which add in another order: set "
                f"OMP_NUM_THREADS={step.threads} before MXNet is imported, or use mpgluon replay"
            )
        return (
            f"step {step.step}, {what} at a loss scale of {step.loss_scale:g}\n"
            f"recorded with {versions} on {step.machine.get('processor')}{threads}"
        )

    def _agreement(self) -> str:
        step = self.recorded
        total = len(step.gradients)
        broken = sum(any(mark.not_finite for mark in g) for g in step.gradients.values())
        words = f"{total} gradients, of which {broken} are not finite"
        if not total:
            return "replayed: no gradients were recorded to compare with"
        if step.is_sum_over_processes:
            sums = f"sums over {step.processes} processes"
            return f"replayed this process's batch; recorded were {sums}: {words}"
        if self.same_bits:
            return f"replayed: the same bits in all {words}"
        first = ", ".join(self.different[:3])
        where = (
            f"not finite in other places: {', '.join(self.elsewhere[:3])}"
            if self.elsewhere
            else "all are finite and infinite in the same places"
        )
        return f"replayed: {len(self.different)} of {words}, have other bits ({first}); {where}"

    def _place(self) -> str:
        step = self.recorded
        before = step.not_finite()
        if before:
            names = ", ".join(before[:5])
            return f"not finite before the step began: {names}; no cure of 16 bits helps\n" + (
                "" if self.overflow is None else str(self.overflow)
            )
        if self.overflow is not None:
            return f"{self.overflow}\nlayer: {self.layer}"
        if step.is_sum_over_processes:
            return (
                "all arrays of this process's batch are finite: another of the "
                f"{step.processes} processes overflowed, which has a file of its own"
            )
        if all(np.isfinite(g).all() for of_all in self.gradients.values() for g in of_all):
            return (
                "nothing overflows here: was another loss or network recorded, or another device "
                "with other roundings?"
            )
        return "all arrays of each batch are finite: it was a sum of gradients that overflowed"


def _cures(rows: Sequence[tuple[str, str, str]], width: Optional[int]) -> str:
    table = Table(("cure", "saves the step", "how to write it"), rows)
    if width is None or max(map(len, str(table).splitlines())) <= width:
        return str(table)
    names, saves, codes = (list(column) for column in zip(table.headings, *rows))
    place = min(width - len(saves[0]) - 2, max(map(len, names)))
    lines = []
    for name, saved, code in zip(names, saves, codes):
        first, *rest = textwrap.wrap(name, place)
        lines += [f"{first:<{place}}  {saved}", *rest]
        lines += [f"    {code}"] if code != "-" else []
    return "\n".join(lines)


def replay(
    path: Union[str, Path],
    net: Union[gluon.Block, str, None] = None,
    *,
    loss_fn: Union[LossFunction, str, None] = None,
    cures: bool = True,
) -> Replay:
    """Run a recorded step again on CPUs, find where it overflowed, and try what would have helped.

    The code that the file names is imported and called: check the names in a file from somebody
    else first. While it runs, the interface of MXNet is switched on that the step was recorded
    with, mx.nd or mx.np. MXNet's generators are seeded; the states of Python's and NumPy's
    generators are restored afterwards.

    Parameters
    ----------
    path : str or Path
        A file of `mpgluon.diagnostics.FlightRecorder`.
    net : gluon.Block or str, optional
        A new network of the same structure, which is overwritten, or a name as the recorder takes
        it; by default the one that the file names.
    loss_fn : callable or str, optional
        Takes the network's results and the labels; by default the one that the file names.
    cures : bool
        Whether to try cures: up to 25 steps.

    Returns
    -------
    Replay
        ``print`` it.

    Raises
    ------
    CheckpointError
        If the file is damaged, of another version, or does not fit the network.
    ValueError, TypeError
        If the code that is named cannot be found, or returns something else.
    """
    step = read_step(path)
    devices = [mx.cpu(number) for number in range(step.devices)]
    with _own_random_states(), interface(in_numpy=step.in_numpy):
        if net is None and step.network is None:
            raise ValueError(
                f"{step.path} does not name its network: pass it, replay(path, net), or "
                "--network module:function"
            )
        if net is None or isinstance(net, str):
            net = named_network(str(net or step.network), devices)
        if loss_fn is None or isinstance(loss_fn, str):
            loss_fn = named_loss(str(loss_fn or step.loss))
        bench = StepBench(step, net, loss_fn, devices)
        losses, gradients = bench.run(step.settings.casts, step.loss_scale, exact=True)
        overflow = bench.find(step.settings.casts, step.loss_scale, exact=True)
        marks = {name: _marks(arrays) for name, arrays in gradients.items()}
        names = sorted(step.gradients.keys() | marks.keys())
        different = [n for n in names if step.gradients.get(n) != marks.get(n)]
        older = {n: _marks(gradients[n], nan_bits=True) for n in different if n in gradients}
        different = [n for n in different if step.gradients.get(n) != older.get(n)]
        elsewhere = [n for n in different if _patterns(marks, n) != _patterns(step.gradients, n)]
        return Replay(
            recorded=step,
            losses=losses,
            gradients=gradients,
            different=tuple(different),
            elsewhere=tuple(elsewhere),
            overflow=None if overflow is None else overflow.report,
            layer="" if overflow is None else code_of(net, paths_of(net)[overflow.block]),
            operands=() if overflow is None else overflow.operands,
            cures=tuple(Cures(bench, overflow)) if cures else (),
            threads=computing_threads(),
        )


def _marks(gradients: Sequence[npt.NDArray[Any]], *, nan_bits: bool = False) -> list[GradientMark]:
    return [GradientMark.of(gradient, nan_bits=nan_bits) for gradient in gradients]


def _patterns(marks: dict[str, list[GradientMark]], name: str) -> list[str]:
    return [mark.pattern for mark in marks.get(name, [])]


@contextmanager
def _own_random_states() -> Iterator[None]:
    """Restore the states of Python's and NumPy's generators at the end of the block."""
    before = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
