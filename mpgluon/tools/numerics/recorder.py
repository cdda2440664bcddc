"""A recorder of the numbers of a training run: every n-th step all of them, of each step a line.

In a recorded step the network runs imperatively, with the same operators on the same numbers. Each
result of a layer is read once where it is made, and each gradient where it arrives; nothing waits
before the end of the step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional, Union

from mpgluon import kernels
from mpgluon.cast import fp32
from mpgluon.cast.arrays import arrays_in, format_of
from mpgluon.cast.numpy_arrays import as_nd
from mpgluon.diagnostics.observe import Seen, observing
from mpgluon.errors import CheckpointError
from mpgluon.kernels.dtypes import cast, dtype_name
from mpgluon.kernels.statistics import LENGTH, Statistics, probed, statistics
from mpgluon.machine import describe_machine, installed_versions
from mpgluon.tools.numerics.files import (
    KINDS,
    NumericsStep,
    StepLines,
    Tensor,
    TensorName,
    step_path,
    write_numerics,
)
from mpgluon.tools.numerics.trends import Trend, Trends
from mpgluon.tools.recorder.recorded_network import paths_of
from mpgluon.trainer.step import state_of
from mpgluon.updates import gluon_trainer
from mpgluon.updates.rounded_updates import NEAREST, rounding_of

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.ndarray import NDArray

__all__ = ["NumericsRecorder", "RecordedLoss"]

_logger = logging.getLogger(__name__)
_FLOATS = ("float32", "float16", "bfloat16")


@dataclass
class RecordedLoss:
    """The loss of a step, to be set in the step's block.

    Attributes
    ----------
    loss : NDArray or list of NDArray, optional
        The loss of the step, of any shape; its mean is recorded. Setting it waits for nothing.
    """

    loss: Any = None


@dataclass
class _Noted:
    """One tensor on its way: what is known of it, and its statistics when they are computed."""

    id: TensorName
    format: str
    shape: tuple[int, ...]
    statistics: NDArray
    block: str = ""
    array: Optional[NDArray] = None

    def finished(self, numbers: Any) -> Tensor:
        array = None if self.array is None else cast(self.array, "float32").asnumpy()
        return Tensor(self.id, self.format, self.shape, Statistics(numbers), self.block, array)


@dataclass
class _Step:
    """The tensors of a step that is being recorded."""

    number: int
    keeps_arrays: bool
    paths: dict[gluon.Block, str]
    noted: list[_Noted] = field(default_factory=list)
    taps: list[_Noted] = field(default_factory=list)  # of activation gradients, forward order
    before: dict[str, NDArray] = field(default_factory=dict)  # what updates change
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    def note(self, kind: str, name: str, array: NDArray, block: str = "", fmt: str = "") -> None:
        """Take the statistics of an array."""
        array = as_nd(array)
        if array.stype != "default":
            array = array.tostype("default")
        fmt = fmt or _format_name(array)
        if dtype_name(array) not in _FLOATS:
            array = array.astype("float32")
        kept = array.copy() if self.keeps_arrays else None
        of = statistics(array)
        self.noted.append(_Noted(self._named(kind, name), fmt, array.shape, of, block, kept))

    def observe(self, seen: Seen) -> None:
        """Take the statistics of a result that a layer computed itself."""
        is_array = isinstance(seen.array, NDArray)  # not where shapes are inferred
        if seen.kind == "output" and seen.made and is_array:
            self.note("activation", self.path(seen.block), seen.array, type(seen.block).__name__)

    def tap(self, block: gluon.Block, array: NDArray, made: bool) -> NDArray:
        """Return what passes a result on and takes the statistics of its gradient."""
        if not made or not isinstance(array, NDArray) or array.stype != "default":
            return array
        if dtype_name(array) not in _FLOATS:
            return array
        probe = self.keeps_arrays or not kernels.available() or array.ctx.device_type != "cpu"
        shape = array.shape if probe else (LENGTH,)
        dtype = dtype_name(array) if probe else "float64"
        zeros = mx.nd.zeros(shape, ctx=array.ctx, dtype=dtype)
        zeros.attach_grad()
        name = self._named("activation gradient", self.path(block))
        fmt, kind = _format_name(array), type(block).__name__
        self.taps.append(_Noted(name, fmt, array.shape, zeros, kind))
        return mx.nd.elemwise_add(array, zeros) if probe else probed(array, zeros)

    def note_activation_gradients(self) -> None:
        """Take over what the taps have received, in the order of the backward pass."""
        for tap in reversed(self.taps):
            gradient = tap.statistics.grad
            if tap.shape == gradient.shape and tap.statistics.dtype != np.float64:
                tap.array = gradient.copy() if self.keeps_arrays else None
                gradient = statistics(gradient)
            tap.statistics = gradient
            self.noted.append(tap)
        self.taps = []

    def path(self, block: gluon.Block) -> str:
        """Return the path of a block; that of the network itself is its class."""
        return self.paths.get(block, "") or type(block).__name__

    def _named(self, kind: str, name: str) -> TensorName:
        call = self.calls[kind, name]
        self.calls[kind, name] += 1
        return TensorName(kind, name, call)

    def tensors(self) -> dict[TensorName, Tensor]:
        """Wait for the statistics, and return the tensors in the order of their kinds."""
        rows = mx.nd.stack(*(one.statistics.as_in_context(mx.cpu()) for one in self.noted))
        finished = [one.finished(row) for one, row in zip(self.noted, rows.asnumpy())]
        finished.sort(key=lambda tensor: KINDS.index(tensor.id.kind))
        return {tensor.id: tensor for tensor in finished}


class NumericsRecorder:
    """Records what the numbers of a training run do: of every n-th step all of them.

    A recorded step has, for each result of a layer, each gradient, weight, update and array of the
    optimizer, the histogram of exponents, the largest size, the norm, a checksum of all bits and 16
    values. Every step has its loss, its loss scale, the flags of the layers, and whether it was
    skipped. What is about to fail is logged as a warning, once for each layer: an activation that
    grows, gradients near the smallest number, lost updates, a loss scale that sinks. If the folder
    cannot be written, one warning is logged, and training goes on.

    `mpgluon.diagnostics.read_numerics` opens the folder, `compare_numerics` compares two, and
    ``mpgluon numerics`` shows them.

    Parameters
    ----------
    net : gluon.Block
        Plain, cast or autocast, hybridized or not.
    trainer : gluon.Trainer
        The network's Trainer, after ``amp.init_trainer``.
    folder : str or Path
        Made at the first step. Of a run that is continued, later steps that it holds are replaced.
    every : int
        Steps 1, ``every``, 2 ``every``, ... are recorded.
    arrays : (int, int), optional
        The first and the last of the steps that are recorded with all values, each of them.
    keep : int
        The largest number of recorded steps: beyond it every second one is removed, and half as
        many are recorded from then on.

    Attributes
    ----------
    on_record : list of callable
        Callbacks, called with each `NumericsStep` that was recorded.

    Raises
    ------
    TrainerStateError
        If the Trainer has no loss scale; ``amp.init_trainer(trainer, "none")`` is enough.
    ValueError
        If a number is out of its range.

    Examples
    --------
    >>> recorder = NumericsRecorder(net, trainer, "numerics", every=10)
    >>> for images, labels in batches:
    ...     with recorder.step(images, labels) as step:
    ...         with autograd.record():
    ...             step.loss = loss_fn(net(images), labels)
    ...             with amp.scale_loss(step.loss, trainer) as scaled:
    ...                 autograd.backward(scaled)
    ...         trainer.step(len(images))
    """

    def __init__(
        self,
        net: gluon.Block,
        trainer: gluon.Trainer,
        folder: Union[str, Path],
        *,
        every: int = 10,
        arrays: Optional[tuple[int, int]] = None,
        keep: int = 1000,
    ) -> None:
        if every < 1 or keep < 2:
            raise ValueError(
                f"every must be at least 1 and keep at least 2, received {every} and {keep}"
            )
        if arrays is not None and not 1 <= arrays[0] <= arrays[1]:
            raise ValueError(
                f"arrays must be the first and the last of some steps, received {arrays}"
            )
        self._net, self._trainer, self._state = net, trainer, state_of(trainer)
        self._folder, self._every, self._keep = Path(folder), every, keep
        self._arrays = arrays or (1, 0)
        self._lines: Optional[StepLines] = None
        self._now: Optional[_Step] = None
        self._judged: dict[str, Any] = {}  # what is known when a step is judged
        self._numbers: list[int] = []  # of the recorded steps
        self._trends = Trends()
        self.on_record: list[Callable[[NumericsStep], None]] = []
        self._has_warned = False
        self.about = {
            "versions": installed_versions(),
            "machine": describe_machine(),
            "update_rounding": (rounding_of(trainer) or NEAREST).way,
        }

    @contextmanager
    def step(self, inputs: Any = (), labels: Any = ()) -> Iterator[RecordedLoss]:
        """Record a step; put it around its forward and backward passes and ``trainer.step``.

        Parameters
        ----------
        inputs, labels : any
            Arrays, or tuples and lists of them, whose numbers are recorded too.

        Yields
        ------
        RecordedLoss
            Set its ``loss``.
        """
        updates = gluon_trainer.optimizer_of(self._trainer).num_update
        number = updates + self._state.skipped_steps + 1
        self._begin(number)
        told, self._judged = RecordedLoss(), {}
        self._state.on_step.append(self._note_judgement)
        try:
            if self._is_recorded(number):
                with self._observed(number, inputs, labels):
                    yield told
            else:
                yield told
        except BaseException:
            self._now = None
            raise
        finally:
            self._state.on_step.remove(self._note_judgement)
        if self._judged:
            self._finish(number, told.loss)
        self._now = None

    def _begin(self, number: int) -> None:
        """Make the folder at the first step; what is there of it and later ones will be new."""
        if self._lines is not None or self._has_warned:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lines = StepLines(self._folder, number)
            for file in self._folder.glob("step-*.npz"):
                digits = file.stem.removeprefix("step-")
                if digits.isdigit() and int(digits) >= number:
                    file.unlink()
                elif digits.isdigit():
                    self._numbers.append(int(digits))
        except OSError as error:
            self._warn(error)

    def _is_recorded(self, number: int) -> bool:
        first, last = self._arrays
        wanted = number == 1 or number % self._every == 0 or first <= number <= last
        return wanted and not self._has_warned

    @contextmanager
    def _observed(self, number: int, inputs: Any, labels: Any) -> Iterator[None]:
        """Take the statistics of everything that is computed within."""
        first, last = self._arrays
        step = self._now = _Step(number, first <= number <= last, paths_of(self._net))
        if mx.context.current_context().device_type == "cpu":
            kernels.load()
        for kind, value in (("input", inputs), ("label", labels)):
            for place, array in enumerate(arrays_in(value)):
                step.note(kind, str(place), array)
        self._note_weights(step)
        with observing(self._net, step.observe, tap=step.tap):
            yield

    def _note_weights(self, step: _Step) -> None:
        index_of = {
            parameter: index
            for index, parameter in enumerate(gluon_trainer.parameters_of(self._trainer))
        }
        states = gluon_trainer.updaters_of(self._trainer)[:1]
        for name, parameter in self._net._collect_params_with_prefix().items():
            if parameter._data is None or parameter._stype != "default":
                continue
            weight = as_nd(parameter.list_data()[0])
            step.note("weight", name, weight, fmt=fp32.format_of(parameter).name)
            if parameter.grad_req == "null":
                continue
            master = fp32.known(parameter)
            if master is not None:
                step.note("master", name, master)
            changed = weight if master is None else master
            step.before[name] = changed.copy()
            index = index_of.get(parameter)
            for updater in states:
                state = gluon_trainer.arrays_of_state(updater.states.get(index))
                for place, array in state.items():
                    if array.shape == weight.shape and array is not master:
                        step.note("state", f"{name}{place}", array)

    def _note_judgement(self, good: bool, scale: float) -> None:
        """Note what is known, and the gradients, before the update."""
        optimizer = gluon_trainer.optimizer_of(self._trainer)
        self._judged = {
            "skipped": not good,
            "loss_scale": scale,
            "learning_rate": float(self._trainer.learning_rate),
            "rescale": float(optimizer.rescale_grad),
        }
        if self._now is None:
            return
        self._now.note_activation_gradients()
        for name, parameter in self._net._collect_params_with_prefix().items():
            if parameter.grad_req != "null" and parameter._grad is not None:
                self._now.note("gradient", name, as_nd(parameter.list_grad()[0]))

    def _finish(self, number: int, loss: Any) -> None:
        """Write the line of the step, and the file if it was recorded."""
        step = self._now
        losses = arrays_in(loss)
        norm = self._state.gradient_norm
        line = {
            "step": number,
            "loss": _mean(losses) if losses else None,
            **self._judged,
            "gradient_norm": None if norm is None else float(norm),
            "flags": [str(layer) for layer in self._state.flags],
        }
        try:
            if self._lines is not None:
                self._lines.add(line)
            self._log(self._trends.add_line(line))
            if step is not None:
                for one in losses:
                    step.note("loss", "", one)
                self._note_updates(step)
                self._keep_step(NumericsStep(number, line, step.tensors(), self.about))
        except (OSError, CheckpointError) as error:
            self._warn(error)

    def _keep_step(self, step: NumericsStep) -> None:
        write_numerics(self._folder, step)
        self._numbers.append(step.number)
        self._thin_out()
        self._log(self._trends.add_step(step))
        for callback in self.on_record:
            callback(step)

    def _log(self, trends: Iterable[Trend]) -> None:
        for trend in trends:
            _logger.warning("%s", trend)

    def _note_updates(self, step: _Step) -> None:
        parameters = self._net._collect_params_with_prefix()
        for name, before in step.before.items():
            master = fp32.known(parameters[name])
            now = as_nd(parameters[name].list_data()[0]) if master is None else master
            difference = cast(now, "float32") - cast(before, "float32")
            step.note("update", name, difference, fmt=_format_name(now))
        step.before = {}

    def _thin_out(self) -> None:
        """Remove every second recorded step if there are too many."""
        if len(self._numbers) <= self._keep:
            return
        self._every *= 2
        for number in self._numbers:
            if not self._is_recorded(number):
                step_path(self._folder, number).unlink(missing_ok=True)
        self._numbers = [n for n in self._numbers if self._is_recorded(n)]

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("numerics are no longer recorded, and training goes on: %s", error)


def _format_name(array: NDArray) -> str:
    fmt = format_of(array)
    return str(getattr(fmt, "name", fmt))


def _mean(losses: Sequence[NDArray]) -> float:
    values = [one.asnumpy().astype(np.float64).ravel() for one in losses]
    return float(np.concatenate(values).mean())
