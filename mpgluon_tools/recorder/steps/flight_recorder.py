"""A flight recorder: one file for each step that is skipped, with all that the step needs.

While steps are finite it keeps references to their batches, the random states, and a copy of the
running statistics. Weights are read when a step was skipped, which has left them as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional, Union

from mpgluon.base.archive import Arrays
from mpgluon.cast import fp32
from mpgluon.checkpoint.random_states import random_states
from mpgluon.checkpoint.scale_histories import scale_histories
from mpgluon.errors import CheckpointError
from mpgluon.trainer.statistics import RunningStatistics
from mpgluon.trainer.step import state_of
from mpgluon.updates import gluon_trainer
from mpgluon_tools.recorder.steps.named import check_loss_name, check_network_name
from mpgluon_tools.recorder.steps.recorded_network import NetworkSettings
from mpgluon_tools.recorder.steps.recorded_step import (
    GradientMark,
    check_values,
    fresh_gradients,
    pack,
    write_step,
)

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.ndarray import NDArray

__all__ = ["FlightRecorder"]

_logger = logging.getLogger("mpgluon.tools.recorder")


class FlightRecorder:
    """Records steps that are skipped, and those whose loss is not finite, each in one file.

    A file ``overflow-<step>.npz`` holds inputs, labels, parameters with their FP32 masters, running
    statistics, loss scale, random states, casts, versions and machine, so that
    `mpgluon.diagnostics.replay` or ``mpgluon replay`` can run the step again elsewhere. It holds
    no code: the network and the loss are named. If the folder cannot be written, one warning is
    logged, and training goes on.

    Parameters
    ----------
    net : gluon.Block
        Cast, if it is to be, before the first step.
    trainer : gluon.Trainer
        The network's Trainer, after ``amp.init_trainer``.
    folder : str or Path
        Made when the first step is recorded.
    network : str, optional
        ``"module:function"``, a function without arguments that returns the network before its
        cast; or a network of a model zoo, ``"resnet50_v2(classes=10, image_size=64)"``. Without
        it, a replay must be given the network.
    loss : str
        A loss of ``gluon.loss``, with arguments as in ``"L2Loss(weight=2.0)"``, or
        ``"module:function"``, which takes the network's results and the labels; its own result
        is the loss for ``amp.scale_loss``.
    keep : int
        How many of the newest files stay.

    Raises
    ------
    TrainerStateError
        If the Trainer has no loss scale.
    ValueError
        If a name cannot name code, or ``keep`` is less than 1.

    Examples
    --------
    >>> recorder = FlightRecorder(net, trainer, "overflows", network="mymodule:make_net")
    >>> for images, labels in batches:
    ...     with recorder.step(images, labels):
    ...         with autograd.record():
    ...             loss = loss_fn(net(images), labels)
    ...             with amp.scale_loss(loss, trainer) as scaled:
    ...                 scaled.backward()
    ...         trainer.step(len(images))
    """

    def __init__(
        self,
        net: gluon.Block,
        trainer: gluon.Trainer,
        folder: Union[str, Path],
        *,
        network: Optional[str] = None,
        loss: str = "SoftmaxCrossEntropyLoss",
        keep: int = 3,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, received {keep}")
        if network is not None:
            check_network_name(network)
        check_loss_name(loss)
        self._net, self._trainer, self._state = net, trainer, state_of(trainer)
        self._folder, self._keep = Path(folder), keep
        self._names = {"network": network, "loss": loss}
        self._parameters = net._collect_params_with_prefix()
        self._statistics = RunningStatistics(self._parameters.values())
        self._before: dict[mx.Context, NDArray] = {}  # the statistics before the first pass
        self._histories: Arrays = {}  # of scales, before the first pass too
        self._passes: list[list[tuple[Any, Any]]] = []  # inputs and labels by device
        self._loss_scale = 1.0
        self._number = 0  # of the step whose passes these are
        self._random_states: dict[str, Any] = {}
        self._is_recorded = False
        self._warned_of: set[str] = set()
        self._state.on_skip.append(self._on_skip)

    def detach(self) -> None:
        """Stop recording; a second call does nothing."""
        if self._on_skip in self._state.on_skip:
            self._state.on_skip.remove(self._on_skip)
        self._passes = []

    @contextmanager
    def step(self, inputs: Any, labels: Any, *, seed: Optional[int] = None) -> Iterator[None]:
        """Tell the recorder the batch of a forward and backward pass; put it around them.

        ``trainer.step`` may be inside the block or after it; if gradients accumulate
        (``grad_req="add"``), each pass has a block of its own, and does not count if the block
        raises. The arrays are not copied: do not overwrite them before the step.

        Parameters
        ----------
        inputs : NDArray, tuple, or list
            The argument of the network, or a tuple of them; a list has one of these for each
            device.
        labels : any
            The second argument of the loss; a list has one for each device if ``inputs`` is a list.
            NDArrays, numbers, text, and tuples or lists of them can be recorded.
        seed : int, optional
            The seed of MXNet's generators before the first pass of a step. They do not expose
            their state, and with a seed a replay draws the same dropout masks. By default it is
            made of the numbers of updates and skipped steps, which are the same in a resumed
            run. Seed different processes differently.

        Raises
        ------
        TypeError
            If a value is of another kind.
        ValueError
            If inputs and labels are lists of different lengths.
        """
        inputs, labels = (inputs, labels) if isinstance(inputs, list) else ([inputs], [labels])
        if not isinstance(labels, list) or len(labels) != len(inputs) or not inputs:
            raise ValueError(
                f"inputs for {len(inputs)} devices need a list of as many labels, received "
                f"{type(labels).__name__}"
            )
        for one, label in zip(inputs, labels):
            first = one[0] if isinstance(one, tuple) and one else one
            if not isinstance(first, NDArray):
                raise TypeError(f"inputs begin with an NDArray, received {type(first).__name__}")
            check_values("inputs", one)
            check_values("labels", label)
        self._begin(seed)
        before, number = len(self._passes), self._number
        self._passes.append(list(zip(inputs, labels)))
        try:
            yield
        except BaseException:
            del self._passes[before:]
            raise
        finally:
            if self._state.step_number() != number:  # the step was inside
                self._passes = []

    def check_loss(self, loss: Union[NDArray, Sequence[NDArray]]) -> bool:
        """Record the step if a loss is not finite, and return whether all are; waits for them.

        For a loss scale that skips nothing, ``"none"``: call it before ``trainer.step``, inside the
        block of :meth:`step`.
        """
        losses = [loss] if isinstance(loss, NDArray) else loss
        finite = all(np.isfinite(one.asnumpy()).all() for one in losses)
        if not finite:
            self._record("loss", skipped=False)
        return finite

    def _begin(self, seed: Optional[int]) -> None:
        """Begin a step, unless the next pass adds to the gradients of those before it."""
        number = self._state.step_number()
        adds = any(parameter.grad_req == "add" for parameter in self._parameters.values())
        if number == self._number and adds and self._passes:
            return
        self._passes, self._number, self._is_recorded = [], number, False
        self._loss_scale = self._state.scale
        self._random_states = random_states(self._seed() if seed is None else seed)
        self._before = self._statistics.copy()
        self._histories = scale_histories(self._net)

    def _seed(self) -> int:
        """Return the seed of a step, which is the same in a resumed run."""
        trainer = self._trainer
        trained = sum(p.grad_req != "null" for p in gluon_trainer.parameters_of(trainer))
        in_kvstore = gluon_trainer.will_update_in_kvstore(trainer)
        copies = 1 if in_kvstore else len(gluon_trainer.devices_of(trainer))
        now = self._state.counts()
        # The first two numbers are enough where each step has updated all parameters.
        is_complete = now.single_updates == now.updates * trained * copies
        numbers = now[:2] if is_complete else now
        return int(np.random.SeedSequence(numbers).generate_state(1)[0] >> 1)

    def _on_skip(self, _: float) -> None:
        self._record("skipped", skipped=True)

    def _record(self, reason: str, *, skipped: bool) -> None:
        """Write the file of this step; a failure is logged once."""
        if self._is_recorded:
            return
        if not self._passes:
            self._warn_once(
                "batch", "a step was skipped whose batch recorder.step was not told; not recorded"
            )
            return
        self._is_recorded = True
        path = self._folder / f"overflow-{self._number:08d}.npz"
        header, arrays = self._content(reason, skipped=skipped)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_step(path, {**header, "step": self._number}, arrays)
            self._remove_old()
        except (CheckpointError, OSError) as error:
            self._warn_once("file", f"a step could not be recorded, and training goes on: {error}")
        else:
            _logger.info("step %d: recorded in %s", self._number, path)
        self._passes = []

    def _content(self, reason: str, *, skipped: bool) -> tuple[dict[str, Any], Arrays]:
        mx.nd.waitall()  # as for a checkpoint: a layout may be changing
        arrays: Arrays = {}
        passes = [
            [
                {
                    "inputs": pack(
                        inputs if isinstance(inputs, tuple) else (inputs,),
                        f"input/{number}/{device}",
                        arrays,
                    ),
                    "labels": pack(labels, f"label/{number}/{device}", arrays),
                }
                for device, (inputs, labels) in enumerate(parts)
            ]
            for number, parts in enumerate(self._passes)
        ]
        # The current values, if there were none before the first pass.
        rows = (self._before or self._statistics.copy()).values()
        values = [self._statistics.split(row.asnumpy()) for row in rows]
        statistics = {
            name: [of_device[parameter] for of_device in values]
            for name, parameter in self._parameters.items()
            if parameter in self._statistics.parameters
        }
        for name, parameter in self._parameters.items():
            arrays[f"parameter/{name}"] = parameter.list_data()[0].asnumpy()
            master = fp32.known(parameter)
            if master is not None:
                arrays[f"master/{name}"] = master.asnumpy()
        arrays.update({f"scale_history/{k}": value for k, value in self._histories.items()})
        for name, copies in statistics.items():
            arrays[f"parameter/{name}"] = copies[0]
            for device, value in enumerate(copies):
                arrays[f"statistics/{device}/{name}"] = value
        gradients = fresh_gradients(self._net, self._state)
        header = {
            **self._names,
            "reason": reason,
            "loss_scale": self._loss_scale,
            "in_numpy": bool(mx.util.is_np_array()),
            "devices": len(gluon_trainer.devices_of(self._trainer)),
            "processes": gluon_trainer.processes_of(self._trainer),
            "reduced": gluon_trainer.reduces_gradients(self._trainer)
            and (skipped or self._state.gradients.now.reduced),
            "passes": passes,
            "random": self._random_states,
            "statistics": list(statistics),
            "network_settings": NetworkSettings.of(self._net).as_dict(),
            "gradients": {n: [GradientMark.of(g) for g in of_n] for n, of_n in gradients.items()},
            "flags": [str(layer) for layer in self._state.flags] if skipped else [],
        }
        return header, arrays

    def _remove_old(self) -> None:
        files = self._folder.glob("overflow-*.npz")
        newest_first = sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name))[::-1]
        for file in newest_first[self._keep :]:
            file.unlink(missing_ok=True)

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._warned_of:
            self._warned_of.add(about)
            _logger.warning("%s", message)
