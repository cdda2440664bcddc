"""Where a step overflows: the first array that is not finite, and the block that computed it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Optional

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.ndarray import NDArray

from mpgluon.cast.arrays import format_of
from mpgluon.cast.block import blocks_of
from mpgluon.diagnostics.meanwhile import untouched
from mpgluon.diagnostics.observe import Batch, Seen, observed_batch, observing
from mpgluon.numerics.dtypes import cast, dtype_name
from mpgluon.numerics.reductions import all_finite
from mpgluon.trainer.inside import update_counts
from mpgluon.trainer.step import state_of

__all__ = ["FoundOverflow", "OverflowLocator", "OverflowReport", "ValueRange"]
__all__ += ["find_overflow", "locate_overflow"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OverflowReport:
    """The first array that is not finite.

    Attributes
    ----------
    direction : {"forward", "backward"}
    what : str
        The array, such as ``"what FullyConnected returned"``.
    block, kind : str
        Name and class of the block at work; for a parameter's gradient, of the block that owns it.
    dtype : str
        The format of its values: a policy may hold them on its grid in FP32 arrays.
    shape : tuple of int
    largest_before : float
        The absolute maximum of its operands: the inputs of the operator, or the gradient before
        it; NaN if that is not known.
    loss_scale : float
    """

    direction: str
    what: str
    block: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    largest_before: float
    loss_scale: float

    def __str__(self) -> str:
        before = (
            ""
            if math.isnan(self.largest_before)
            else f"; what came before was at most {self.largest_before:.4g}"
        )
        return (
            f"{self.direction}: the first array that is not finite is {self.what} in "
            f"{self.block} ({self.kind}), {self.dtype} of shape {self.shape}{before}; the loss "
            f"scale was {self.loss_scale:g}"
        )


@dataclass(frozen=True)
class ValueRange:
    """The range of an array's values.

    Attributes
    ----------
    dtype : str
    shape : tuple of int
    smallest, largest : float
        The least absolute value that is not zero, and the greatest; 0 if all are zero. Values that
        are not finite are left out.
    not_finite : int
        The number of those.
    """

    dtype: str
    shape: tuple[int, ...]
    smallest: float
    largest: float
    not_finite: int

    @classmethod
    def of(cls, array: NDArray) -> ValueRange:
        """Return the range of an array of any type; waits for the device."""
        sizes = np.abs(cast(array, "float32").astype("float32").asnumpy())
        finite = sizes[np.isfinite(sizes)]
        return cls(
            dtype=str(dtype_name(array)),
            shape=tuple(array.shape),
            smallest=float(finite[finite > 0].min(initial=np.inf)) if finite.any() else 0.0,
            largest=float(finite.max(initial=0)),
            not_finite=int(sizes.size - finite.size),
        )


@dataclass(frozen=True)
class FoundOverflow:
    """A report, the block that it names, and the ranges of the operands of what overflowed."""

    report: OverflowReport
    block: gluon.Block
    operands: tuple[ValueRange, ...]


def locate_overflow(
    net: gluon.Block, batch: Batch, *, loss_scale: float = 1.0
) -> Optional[OverflowReport]:
    """Run a batch forward and backward, and return the first array that is not finite.

    The network runs imperatively, operator by operator, and is not changed.

    Returns
    -------
    OverflowReport or None
        ``None`` if every array is finite.
    """
    found = find_overflow(net, batch, loss_scale=loss_scale)
    return None if found is None else found.report


def find_overflow(
    net: gluon.Block, batch: Batch, *, loss_scale: float = 1.0
) -> Optional[FoundOverflow]:
    """Do what `locate_overflow` does, and return the block and its operands too."""
    watch = _Watch(loss_scale)
    observed_batch(net, batch, watch.see, loss_scale=loss_scale, operators=True)
    if watch.report is None or watch.block is None:
        return None
    return FoundOverflow(watch.report, watch.block, watch.operands)


class OverflowLocator:
    """Waits for the first step that is skipped, and reports where its overflow began.

    If gradients overflowed, that may be routine for the first values of a loss scale: when it has
    sunk as far as it can, the first step that is skipped there replaces the report.

    While steps are finite, it only keeps references to their inputs. After a skipped step it runs
    the network forward on those inputs again, imperatively; if every array is finite then, it
    examines the gradients from the last parameter to the first. It logs the report as a warning.
    The second run draws random numbers where the network does, so later dropout masks differ.
    Inputs that are overwritten before ``trainer.step`` cannot be run again.

    Parameters
    ----------
    net : gluon.Block
    trainer : gluon.Trainer
        Of that network, after ``amp.init_trainer``.

    Attributes
    ----------
    report : OverflowReport or None
        Set it to ``None`` to wait for the next one.

    Raises
    ------
    TrainerStateError
        If the Trainer has no loss scale, and so skips no step.
    """

    def __init__(self, net: gluon.Block, trainer: gluon.Trainer) -> None:
        self._net, self._state = net, state_of(trainer)
        self._trainer = trainer
        self._inputs: list[tuple[Any, ...]] = []  # of the forward passes since the latest update
        self._updates = -1
        self._hook = net.register_forward_pre_hook(self._remember)
        self._state.on_skip.append(self._look)
        self.report: Optional[OverflowReport] = None

    def detach(self) -> None:
        """Stop waiting."""
        self._hook.detach()
        self._state.on_skip.remove(self._look)

    def locate(self, batch: Batch) -> Optional[OverflowReport]:
        """Return where a batch overflows with the loss scale as it is now; ``None`` if nowhere."""
        return locate_overflow(self._net, batch, loss_scale=self._state.loss_scale.scale)

    def _remember(self, _: gluon.Block, inputs: tuple[Any, ...]) -> None:
        if not autograd.is_recording():
            return
        updates = update_counts(self._trainer)
        if updates != self._updates:
            self._inputs, self._updates = [], updates
        self._inputs.append(inputs)

    def _look(self, loss_scale: float) -> None:
        inputs_of_step, self._inputs = self._inputs, []
        if self.report is not None and not self._was_routine(self.report, loss_scale):
            return
        watch = _Watch(loss_scale)
        with untouched(self._net), autograd.train_mode():
            for inputs in inputs_of_step:
                with observing(self._net, watch.see, operators=True):
                    self._net(*inputs)
        if watch.report is None:
            for seen in reversed(self._gradients()):
                watch.see(seen)
        if watch.report is not None:
            self.report = watch.report
            _logger.warning("%s", self.report)

    def _was_routine(self, report: OverflowReport, loss_scale: float) -> bool:
        """Whether a report is of gradients at a larger scale than this, the smallest possible."""
        now = self._state.loss_scale
        is_at_the_floor = loss_scale <= now.scale and not now.can_shrink
        return report.direction == "backward" and is_at_the_floor and loss_scale < report.loss_scale

    def _gradients(self) -> list[Seen]:
        """Return the gradients of all parameters, with the block that owns each."""
        net, parameters = self._net, self._net.collect_params().values()
        owners = {p: block for block in blocks_of(net) for p in block._reg_params.values()}
        return [
            Seen(owners.get(parameter, net), "gradient", parameter.name, gradient)
            for parameter in parameters
            if parameter.grad_req != "null"
            for gradient in parameter.list_grad()
        ]


class _Watch:
    """An observer that keeps the first array whose values are not finite, here or later."""

    def __init__(self, loss_scale: float) -> None:
        self.report: Optional[OverflowReport] = None
        self.block: Optional[gluon.Block] = None
        self.operands: tuple[ValueRange, ...] = ()
        self._loss_scale = loss_scale
        self._latest_gradient: tuple[NDArray, ...] = ()

    def see(self, seen: Seen) -> None:
        """Examine an array."""
        backward = seen.kind in ("output gradient", "gradient")
        if self.report is not None and (backward or self.report.direction == "backward"):
            return
        if all_finite([seen.array]):
            self._latest_gradient = (seen.array,) if backward else ()
            if self.report is not None and seen.inputs and not all_finite(seen.inputs):
                self.report = None  # an intended infinity, such as in a mask before a softmax
            return
        if self.report is not None:
            return
        what = {
            "operator": f"what {seen.operator} returned",
            "output": "what the block returned",
            "output gradient": "the gradient of what the block returned",
            "gradient": f"the gradient of {seen.operator}",
        }[seen.kind]
        before = self._latest_gradient if backward else seen.inputs
        self.block, self.operands = seen.block, tuple(map(ValueRange.of, before))
        self.report = OverflowReport(
            direction="backward" if backward else "forward",
            what=what,
            block=seen.block.name,
            kind=type(seen.block).__name__,
            dtype=str(format_of(seen.array)),
            shape=tuple(seen.array.shape),
            largest_before=_largest(before),
            loss_scale=self._loss_scale,
        )


def _largest(arrays: Iterable[NDArray]) -> float:
    """Return the absolute maximum of arrays, also of integers; NaN if there are none."""
    sizes = [mx.nd.abs(cast(a, "float32").astype("float32")).max().asscalar() for a in arrays]
    return float(max(sizes, default=math.nan))
