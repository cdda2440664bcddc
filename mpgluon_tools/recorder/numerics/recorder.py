"""A recorder of the numbers of a training run: of every n-th step, and a line for each step.

In a step whose activations are recorded the network runs imperatively, with the same operators on
the same numbers. Each result of a layer is read once where it is made, and each gradient where it
arrives; nothing waits before the end of the step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Optional, Union

from mpgluon import kernels
from mpgluon.base.machine import describe_machine, installed_versions
from mpgluon.cast import fp32
from mpgluon.cast.arrays import arrays_in
from mpgluon.cast.numpy_arrays import as_nd
from mpgluon.errors import CheckpointError
from mpgluon.kernels.dtypes import cast
from mpgluon.trainer.step import state_of
from mpgluon.updates import gluon_trainer
from mpgluon.updates.rounded_updates import NEAREST, rounding_of
from mpgluon.updates.updater import has_master
from mpgluon_tools.diagnostics.observe import observing
from mpgluon_tools.recorder.numerics.files import (
    NumericsStep,
    StepLines,
    recorded_steps,
    step_path,
    write_numerics,
)
from mpgluon_tools.recorder.numerics.notes import StepNotes
from mpgluon_tools.recorder.numerics.trends import Trend, Trends, lines_of

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.ndarray import NDArray

__all__ = ["NumericsRecorder", "RecordedLoss"]

_logger = logging.getLogger("mpgluon.tools.recorder")


@dataclass
class RecordedLoss:
    """The loss of a step, to be set in the step's block.

    Attributes
    ----------
    loss : NDArray or list of NDArray, optional
        The loss of the step, of any shape; its mean is recorded. Setting it waits for nothing.
    """

    loss: Any = None


class NumericsRecorder:
    """Records statistics of all arrays of a training run, at every n-th step.

    A recorded step has, for each gradient, weight, update and array of the optimizer, and if wanted
    each result of a layer, the histogram of exponents, the largest size, the norm, a checksum of
    all bits and 16 values. Every step has its loss, its loss scale, the flags of the layers, and
    whether it was skipped. Signs of failure are logged as warnings, once for each layer: an
    activation that grows, gradients near the smallest number, lost updates, a loss scale that
    sinks. If the folder cannot be written, one warning is logged, and training goes on.

    `mpgluon.diagnostics.read_numerics` opens the folder, `compare_numerics` compares two, and
    ``mpgluon numerics`` shows them.

    Parameters
    ----------
    net : gluon.Block
        Plain, cast or autocast, hybridized or not.
    trainer : gluon.Trainer
        The network's Trainer, after ``amp.init_trainer``.
    folder : str or Path
        Made at the first step. Of a run that is continued, or that loads a checkpoint, later steps
        that it holds are replaced.
    every : int
        Steps 1, ``every``, 2 ``every``, ... are recorded.
    activations_every : int, optional
        The same for activations and their gradients, which take the most time; by default 20 times
        ``every``, or 1 if that is 1.
    arrays : (int, int), optional
        The first and the last of the steps that are recorded with all values, each of them.
    keep : int
        The largest number of recorded steps, not counting ``arrays``: beyond it every second
        one is removed, and half as many are recorded from then on.

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
        activations_every: Optional[int] = None,
        arrays: Optional[tuple[int, int]] = None,
        keep: int = 1000,
    ) -> None:
        if activations_every is None:
            activations_every = every if every == 1 else 20 * every
        if every < 1 or activations_every < 1 or keep < 2:
            raise ValueError(
                "every and activations_every must be at least 1 and keep at least 2, received "
                f"{every}, {activations_every} and {keep}"
            )
        if arrays is not None and not 1 <= arrays[0] <= arrays[1]:
            raise ValueError(
                f"arrays must be the first and the last of some steps, received {arrays}"
            )
        self._net, self._trainer, self._state = net, trainer, state_of(trainer)
        self._folder, self._keep = Path(folder), keep
        self._every, self._activations_every = every, activations_every
        self._arrays = arrays or (1, 0)
        self._lines: Optional[StepLines] = None
        self._now: Optional[StepNotes] = None
        self._before: dict[str, NDArray] = {}  # what updates change, before the step
        self._judged: dict[str, Any] = {}  # facts from the moment when a step is judged
        self._numbers: list[int] = []  # of the recorded steps
        self._shift = 0  # the difference of a number that was given to the state's
        self._latest = 0  # the number of the latest step, recorded or not
        self._trends = Trends()
        self.on_record: list[Callable[[NumericsStep], None]] = []
        self._has_warned = False
        self.about = {
            "versions": installed_versions(),
            "machine": describe_machine(),
            "update_rounding": (rounding_of(trainer) or NEAREST).way,
            "optimizer": type(gluon_trainer.optimizer_of(trainer)).__name__,
            "activations_every": activations_every,
        }

    @contextmanager
    def step(
        self, inputs: Any = (), labels: Any = (), *, number: Optional[int] = None
    ) -> Iterator[RecordedLoss]:
        """Record a step; put it around its forward and backward passes and ``trainer.step``.

        Parameters
        ----------
        inputs, labels : any
            Arrays, or tuples and lists of them, whose numbers are recorded too.
        number : int, optional
            The number of the step, from 1; by default one more than the optimizer's updates and the
            skipped steps, which a checkpoint of mpgluon restores. If a step updates only some of
            the parameters, MXNet counts fewer updates than steps: the steps of one process still
            have different numbers, but pass the numbers of a continued run.

        Yields
        ------
        RecordedLoss
            Set its ``loss``.
        """
        counted = self._state.step_number()
        if number is not None:
            self._shift = number - counted
        number = counted + self._shift
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
            self._latest = number
        self._now = None

    def _begin(self, number: int) -> None:
        """Make the folder, or go back after a load: remove this step and later ones from it."""
        if self._has_warned or (self._lines is not None and number > self._latest):
            return
        self._trends = Trends()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            found = recorded_steps(self._folder)
            later = [step for step in found if step >= number]
            if later:
                _logger.warning(
                    "%s: replacing the recorded steps %d to %d, which are at or after this run's "
                    "next step, %d", self._folder, later[0], later[-1], number
                )  # fmt: skip
            for step in later:
                step_path(self._folder, step).unlink()
            self._lines = StepLines(self._folder, number)
            self._numbers = [step for step in found if step < number]
        except OSError as error:
            self._warn(error)

    def _is_recorded(self, number: int) -> bool:
        wanted = number % self._every == 0 or self._has_activations(number)
        return wanted and not self._has_warned

    def _has_activations(self, number: int) -> bool:
        first, last = self._arrays
        return number == 1 or number % self._activations_every == 0 or first <= number <= last

    @contextmanager
    def _observed(self, number: int, inputs: Any, labels: Any) -> Iterator[None]:
        """Take the statistics of everything that is computed within."""
        first, last = self._arrays
        if gluon_trainer.devices_of(self._trainer)[0].device_type == "cpu":
            kernels.load()
        notes = self._now = StepNotes(self._net, keeps_arrays=first <= number <= last)
        for kind, value in (("input", inputs), ("label", labels)):
            notes.note(kind, [(str(n), array, "") for n, array in enumerate(arrays_in(value))])
        self._note_parameters(notes)
        watching: AbstractContextManager[None] = nullcontext()
        if self._has_activations(number):
            watching = observing(self._net, notes.observe, tap=notes.tap)
        with watching:
            yield

    def _note_parameters(self, notes: StepNotes) -> None:
        """Take the statistics of weights, masters and the optimizer's arrays before the step."""
        weights, masters, states = [], [], []
        places = {p: index for index, p in enumerate(gluon_trainer.parameters_of(self._trainer))}
        updaters = gluon_trainer.updaters_of(self._trainer)
        self._before = {}
        for name, parameter in self._net._collect_params_with_prefix().items():
            if parameter._data is None or parameter._stype != "default":
                continue
            weight = as_nd(parameter.list_data()[0])
            weights.append((name, weight, fp32.format_of(parameter).name))
            if parameter.grad_req == "null":
                continue
            master = self._master_of(parameter)
            if master is not None:
                masters.append((name, master, ""))
            self._before[name] = (weight if master is None else master).copy()
            state = updaters[0].states.get(places.get(parameter)) if updaters else None
            for place, array in gluon_trainer.arrays_of_state(state).items():
                if array.shape == weight.shape and array is not master:
                    states.append((f"{name}{place}", array, ""))
        for kind, named in (("weight", weights), ("master", masters), ("state", states)):
            notes.note(kind, named)

    def _master_of(self, parameter: gluon.Parameter) -> Optional[NDArray]:
        """Return the FP32 values that the optimizer updates; None if it updates the weight.

        Without masters the values from before the cast are known too, and no step changes them.
        The first step begins with those values, which are on the CPU.
        """
        optimizer = gluon_trainer.optimizer_of(self._trainer)
        master = fp32.known(parameter) if has_master(optimizer, parameter) else None
        return None if master is None else master.as_in_context(parameter.list_ctx()[0])

    def _note_judgement(self, good: bool, scale: float) -> None:
        """Record the loss scale, the decision to skip, and the gradients, before the update."""
        optimizer = gluon_trainer.optimizer_of(self._trainer)
        self._judged = {
            "skipped": not good,
            "loss_scale": scale,
            "rescale": float(optimizer.rescale_grad),
        }
        if self._now is None:
            return
        self._now.note_activation_gradients()
        own = set(gluon_trainer.parameters_of(self._trainer))
        gradients = []
        for name, parameter in self._net._collect_params_with_prefix().items():
            if parameter.grad_req == "null" or parameter._grad is None:
                continue
            # Another Trainer's flags may be down until its own step.
            if parameter in own and not parameter.list_data()[0]._fresh_grad:
                self._before.pop(name, None)
            else:
                gradients.append((name, parameter.list_grad()[0], ""))
        self._now.note("gradient", gradients)

    def _finish(self, number: int, loss: Any) -> None:
        """Write the line of the step, and the file if it was recorded."""
        losses = arrays_in(loss)
        norm = self._state.gradient_norm
        line = {
            "step": number,
            "loss": _mean(losses) if losses else None,
            **self._judged,
            "learning_rate": float(self._trainer.learning_rate),  # of the update
            "gradient_norm": None if norm is None else float(norm),
            "flags": [str(layer) for layer in self._state.flags],
        }
        try:
            if self._lines is not None:
                self._lines.add(line)
            self._log(self._trends.add_line(line))
            if self._now is not None:
                self._now.note("loss", [("", one, "") for one in losses])
                self._now.note("running statistic", self._statistics())
                self._now.note("update", self._updates())
                self._keep_step(NumericsStep(number, line, self._now.tensors(), self.about))
        except (OSError, CheckpointError) as error:
            self._warn(error)

    def _keep_step(self, step: NumericsStep) -> None:
        write_numerics(self._folder, step)
        self._numbers.append(step.number)
        self._thin_out()
        self._log(self._trends.add_step(step))
        for callback in self.on_record:
            callback(step)

    def _log(self, trends: Sequence[Trend]) -> None:
        for line in lines_of(trends):
            _logger.warning("%s", line)

    def _statistics(self) -> Iterator[tuple[str, NDArray, str]]:
        """Yield the running statistics that the step leaves; waits, as static graphs do not."""
        mx.nd.waitall()
        for name, parameter in self._net._collect_params_with_prefix().items():
            if gluon_trainer.is_statistic(parameter) and parameter._data is not None:
                yield name, as_nd(parameter.list_data()[0]), ""

    def _updates(self) -> Iterator[tuple[str, NDArray, str]]:
        """Yield the differences that the step has made, with the formats of the changed arrays."""
        parameters = self._net._collect_params_with_prefix()
        for name, before in self._before.items():
            master = self._master_of(parameters[name])
            now = as_nd(parameters[name].list_data()[0]) if master is None else master
            fmt = "float32" if master is not None else fp32.format_of(parameters[name]).name
            yield name, cast(now, "float32") - cast(before, "float32"), fmt
        self._before = {}

    def _thin_out(self) -> None:
        """Remove every second recorded step if there are too many."""
        first, last = self._arrays
        if sum(not first <= number <= last for number in self._numbers) <= self._keep:
            return
        self._every, self._activations_every = 2 * self._every, 2 * self._activations_every
        for number in self._numbers:
            if not self._is_recorded(number):
                step_path(self._folder, number).unlink(missing_ok=True)
        self._numbers = [n for n in self._numbers if self._is_recorded(n)]

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("numerics are no longer recorded, and training goes on: %s", error)


def _mean(losses: Sequence[NDArray]) -> float:
    values = [one.asnumpy().astype(np.float64).ravel() for one in losses]
    return float(np.concatenate(values).mean())
