"""Running statistics, kept for each step, so that a step that is skipped cannot ruin them.

BatchNorm takes a batch into its running mean and variance before anyone has looked at the
gradients: in the backward pass, or, with cuDNN, in the forward pass. After an overflow of the
forward pass they are NaN, and would stay so, since each update keeps a part of the value before it.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpgluon.base.blocks import arrays_of, shape_of
from mpgluon.updates import gluon_trainer

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import autograd, gluon
from mxnet.ndarray import NDArray

__all__ = ["KeptStatistics", "RunningStatistics"]


class RunningStatistics:
    """The FP32 running statistics among some parameters.

    Parameters
    ----------
    parameters : iterable of gluon.Parameter

    Attributes
    ----------
    parameters : list of gluon.Parameter
        Those in FP32 that autograd never differentiates, each once.
    """

    def __init__(self, parameters: Iterable[gluon.Parameter]) -> None:
        statistics = [p for p in dict.fromkeys(parameters) if gluon_trainer.is_statistic(p)]
        self.parameters = [p for p in statistics if _is_fp32(p)]
        self._flat: list[bool] = []  # asking an array for its shape takes longer than copying it

    def copy(self) -> dict[mx.Context, NDArray]:
        """Copy all values into one row for each device, by one operator; does not wait.

        A static graph's statistics can be read before they are written, but ``trainer.step`` has
        waited for the gradients, which BatchNorm's backward pass computes together with them.

        Returns
        -------
        dict from a device to NDArray, shape (elements,), FP32
            Empty if there are none, or one has no values yet or was cast since.
        """
        if not self.parameters or any(p._data is None or not _is_fp32(p) for p in self.parameters):
            return {}
        self._flat = self._flat or [len(shape_of(p)) == 1 for p in self.parameters]
        with autograd.pause():
            return {
                context: mx.nd.concat(
                    *(a if flat else a.reshape(-1) for a, flat in zip(arrays, self._flat)), dim=0
                )
                for context, *arrays in zip(
                    self.parameters[0].list_ctx(), *map(arrays_of, self.parameters)
                )
            }

    def split(self, row: npt.NDArray[np.float32]) -> dict[gluon.Parameter, npt.NDArray[np.float32]]:
        """Return the values of each parameter in a copy."""
        ends = np.cumsum([np.prod(shape_of(p), dtype=int) for p in self.parameters])
        parts = np.split(row, ends[:-1])
        return {p: part.reshape(shape_of(p)) for p, part in zip(self.parameters, parts)}


def _is_fp32(parameter: gluon.Parameter) -> bool:
    return bool(np.dtype(parameter.dtype) == np.float32)


class KeptStatistics:
    """The running statistics of a Trainer's parameters from before its latest losses.

    Parameters
    ----------
    trainer : gluon.Trainer
        Statistics of a network that it was not given are not known.
    """

    def __init__(self, trainer: gluon.Trainer) -> None:
        self._statistics = RunningStatistics(gluon_trainer.parameters_of(trainer))
        self._copies: list[dict[mx.Context, NDArray]] = []  # the newest first

    def keep(self) -> None:
        """Copy the values of now, before the backward pass of a step's first loss; does not wait.

        Where the forward pass has written them already, the values from before it are those that
        were copied in the step before, so these are kept as well.
        """
        self._copies = [self._statistics.copy(), *self._copies[:1]]

    def nan_where_ruined(self, device_type: str = "gpu") -> dict[mx.Context, NDArray]:
        """Return NaN for each device whose statistics have ceased to be finite, else -0.

        On a GPU a forward pass writes them, so that this tells an overflow which kernels that drop
        NaN may hide from the loss. On a CPU the backward pass does. Does not wait.

        Parameters
        ----------
        device_type : str
            The kind of devices to look at.

        Returns
        -------
        dict from a device to NDArray, shape (1,), FP32
        """
        parameters = self._statistics.parameters
        if not any(c.device_type == device_type for p in parameters[:1] for c in p.list_ctx()):
            return {}
        before = self._copies[0] if self._copies else {}
        with autograd.pause():
            ruined = {}
            for context, row in self._statistics.copy().items():
                was = mx.nd.contrib.isfinite(before[context]) if context in before else 1
                ruined_now = mx.nd.max(was * (1 - mx.nd.contrib.isfinite(row)))
                ruined[context] = mx.nd.sqrt(-ruined_now)
            return ruined

    def repair(self) -> None:
        """Put back the newest values that are finite, on each device with some that are not.

        All statistics of the device go back to one moment. Those that have never been finite stay
        as they are. The devices must have been waited for.
        """
        for device, (context, row) in enumerate(self._statistics.copy().items()):
            before = row.asnumpy()
            now = before
            for copies in self._copies:
                if context not in copies or copies[context].size != now.size:
                    continue  # from before the parameters moved to other devices
                copy = copies[context].asnumpy()
                if (np.isfinite(copy) & ~np.isfinite(now)).any():
                    now = copy
            if now is not before:
                for parameter, values in self._statistics.split(now).items():
                    arrays_of(parameter)[device][:] = values

    def discard(self) -> None:
        """Discard the copies, since other values have been loaded."""
        self._copies = []
