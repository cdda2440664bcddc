"""Where a step overflows: the first array that is not finite, and the block that computed it."""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Optional

from mpgluon.cast.arrays import format_of
from mpgluon.cast.block import blocks_of
from mpgluon.cast.network_cast import cast_of
from mpgluon.cast.status_flags import muted_run
from mpgluon.kernels.dtypes import cast, dtype_name
from mpgluon.kernels.reductions import all_finite, global_norm
from mpgluon.trainer.step import state_of
from mpgluon_tools.diagnostics.observe import (
    Batch,
    LossFunction,
    Seen,
    complete,
    observed_batch,
    observing,
)
from mpgluon_tools.diagnostics.temporarily import untouched

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.base import _LIB, check_call
from mxnet.ndarray import NDArray

__all__ = ["FoundOverflow", "OverflowLocator", "OverflowReport", "ValueRange"]
__all__ += ["find_overflow", "locate_overflow"]

_logger = logging.getLogger("mpgluon.diagnostics")


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
    """A report, the block that it names, and the ranges of the overflowed operator's operands.

    ``operator`` is the operator's name in ``F``, empty if it is not known. ``after`` is the block
    whose gradient, the last finite one, came before the gradient of a result that is not finite.
    """

    report: OverflowReport
    block: gluon.Block
    operands: tuple[ValueRange, ...]
    operator: str = ""
    after: Optional[gluon.Block] = None


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
    overflow = find_overflow(net, batch, loss_scale=loss_scale)
    return None if overflow is None else overflow.report


def find_overflow(
    net: gluon.Block, batch: Batch, *, loss_scale: float = 1.0
) -> Optional[FoundOverflow]:
    """Locate an overflow as `locate_overflow` does; return the block and its operands too."""
    complete(net, batch)
    watch = _Watch(net, loss_scale)
    watched = replace(batch, loss_fn=partial(watch.loss_of, batch.loss_fn))
    observed_batch(net, watched, watch.see, loss_scale=loss_scale, operators=True)
    return watch.overflow


class OverflowLocator:
    """Waits for the first step that is skipped, and reports where its overflow began.

    If gradients overflowed, that may be routine for the first values of a loss scale: when it has
    sunk as far as it can, the first step that is skipped there replaces the report.

    While steps are finite, it only keeps references to their inputs. After a skipped step it runs
    the network forward on those inputs again, imperatively, for the operator and its operands; if
    the results are finite then, it examines the gradients from the last parameter to the first.
    Where the layers' status flags (`mpgluon.amp.step_flags`) name other layers, as after another
    dropout mask, the first of those is reported. It logs the report as a warning.
    The second run draws random numbers where the network does, so later dropout masks differ.
    Inputs that are overwritten before ``trainer.step`` cannot be run again.

    Parameters
    ----------
    net : gluon.Block
    trainer : gluon.Trainer
        The network's Trainer, after ``amp.init_trainer``.

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
        self._inputs: list[tuple[Any, ...]] = []  # of the forward passes of a step
        self._step = 0  # whose inputs these are
        self._hook = net.register_forward_pre_hook(self._remember)
        self._state.on_skip.append(self._look)
        self.report: Optional[OverflowReport] = None

    def detach(self) -> None:
        """Stop waiting."""
        self._hook.detach()
        if self._look in self._state.on_skip:
            self._state.on_skip.remove(self._look)

    def locate(self, batch: Batch) -> Optional[OverflowReport]:
        """Return where a batch overflows with the loss scale as it is now; ``None`` if nowhere."""
        return locate_overflow(self._net, batch, loss_scale=self._state.loss_scale.scale)

    def _remember(self, _: gluon.Block, inputs: tuple[Any, ...]) -> None:
        if not autograd.is_recording() or muted_run() is not None:
            return
        step = self._state.step_number()
        if step != self._step:
            self._inputs, self._step = [], step
        self._inputs.append(inputs)

    def _look(self, loss_scale: float) -> None:
        inputs_of_step, self._inputs = self._inputs, []
        if self.report is not None and not self._was_routine(self.report, loss_scale):
            return
        watch = _Watch(self._net, loss_scale)
        with untouched(self._net), autograd.train_mode():
            for inputs in inputs_of_step:
                with observing(self._net, watch.see, operators=True):
                    self._net(*inputs)
        for seen in reversed(self._gradients()):
            watch.see(seen)
        report = self._agreeing(
            None if watch.overflow is None else watch.overflow.report, loss_scale
        )
        if report is not None:
            self.report = report
            _logger.warning("%s", self.report)

    def _agreeing(
        self, report: Optional[OverflowReport], loss_scale: float
    ) -> Optional[OverflowReport]:
        """Return a report, or another one if the flags that the step raised contradict it."""
        flags = self._state.flags
        directions = ("forward", "backward") if report is None else (report.direction,)
        for direction in directions:
            raised = [layer for layer in flags if any(getattr(layer, direction)[:2])]
            first = flags.first(direction)
            agrees = report is not None and report.block in [flag.layer for flag in raised]
            if first is None or agrees or (report is not None and first.layer == self._net.name):
                continue  # the network itself rounds the gradient of its result
            what = "a result that was rounded" if direction == "forward" else "a rounded gradient"
            return OverflowReport(
                direction, what, first.layer, first.kind, self._dtype, (), math.nan, loss_scale
            )
        return report

    @property
    def _dtype(self) -> str:
        """The format that the network computes in."""
        casts = (cast_of(p) for p in self._net.collect_params().values())
        return next((one.policy.compute_dtype for one in casts if one is not None), "float32")

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
    """An observer that finds where the first values that are not finite come from.

    A forward pass has overflowed if the network's result has a NaN, or is infinite and so is the
    loss. Its origin is looked for from there: an infinity that a later operator makes finite, such
    as in a mask before a softmax, is intended. Where a saturated function makes it finite, 0 * inf
    can make NaN of a gradient: then it was an overflow all the same.
    """

    def __init__(self, net: gluon.Block, loss_scale: float) -> None:
        self.overflow: Optional[FoundOverflow] = None
        self._net, self._loss_scale = net, loss_scale
        self._loss_is_finite = False
        self._result: Optional[FoundOverflow] = None  # the origin of an infinite result
        self._origins: dict[int, tuple[NDArray, FoundOverflow]] = {}  # by handle, which stays used
        self._reached: dict[gluon.Block, FoundOverflow] = {}  # blocks where an infinity came
        self._latest: Optional[Seen] = None  # the latest gradient, which was finite
        self._sees_results = False  # gradients of results, and not of parameters alone

    def loss_of(self, loss_fn: LossFunction, result: Any, labels: Any) -> NDArray:
        """Compute a loss, and note whether it is finite."""
        loss = loss_fn(result, labels)
        with autograd.pause():
            self._loss_is_finite = all_finite([loss])
        return loss

    def see(self, seen: Seen) -> None:
        """Examine an array."""
        if self.overflow is not None:
            return
        if seen.kind in ("output gradient", "gradient"):
            self._see_gradient(seen)
            return
        finite, bad = all_finite([seen.array]), [a for a in seen.inputs if not all_finite([a])]
        if finite and not (bad and self._origins):
            return
        origin = self._reached[seen.block] = self._origin_of(seen, bad)
        if not finite:
            for array in (seen.array, seen.onward):
                if array is not None:
                    self._origins[_key(array)] = (array, origin)
            if seen.kind == "output" and seen.block is self._net:
                if _holds_nan(seen.array):
                    self.overflow = origin
                self._result = self._result or origin

    def _origin_of(self, seen: Seen, bad: list[NDArray]) -> FoundOverflow:
        """Return where the values of an array come from that are not finite, NaN first."""
        if _key(seen.array) in self._origins:
            return self._origins[_key(seen.array)][1]
        traced = [array for array in bad if _key(array) in self._origins]
        if traced:
            return self._origins[_key(max(traced, key=_holds_nan))][1]
        if self._origins and (bad or not seen.made):  # a copy in another format
            return list(self._origins.values())[-1][1]
        return self._report(seen, seen.inputs)

    def _see_gradient(self, seen: Seen) -> None:
        if self._result is not None and not self._loss_is_finite:
            self.overflow = self._result
            return
        if not seen.made:  # a container passes on the result of a block inside it
            return
        self._sees_results |= seen.kind == "output gradient"
        if all_finite([seen.array]):
            self._latest = seen
            return
        latest, source = self._latest, seen.block
        if latest is not None and seen.kind == "output gradient":
            source = latest.block
        if self._reached and not _has_infinity(seen.array):  # NaN alone: of 0 * inf
            anywhere = None if self._sees_results else list(self._reached.values())[-1]
            self.overflow = self._reached.get(source, anywhere)
        if self.overflow is None:
            first = self._report(seen, () if latest is None else (latest.array,))
            self.overflow = first if source is seen.block else replace(first, after=source)

    def _report(self, seen: Seen, before: tuple[NDArray, ...]) -> FoundOverflow:
        what = {
            "operator": f"what {seen.operator} returned",
            "output": "what the block returned",
            "output gradient": "the gradient of what the block returned",
            "gradient": f"the gradient of {seen.operator}",
        }[seen.kind]
        report = OverflowReport(
            direction="backward" if "gradient" in seen.kind else "forward",
            what=what,
            block=seen.block.name,
            kind=type(seen.block).__name__,
            dtype=str(format_of(seen.array)),
            shape=tuple(seen.array.shape),
            largest_before=_largest(before),
            loss_scale=self._loss_scale,
        )
        operator = seen.operator if seen.kind == "operator" else ""
        return FoundOverflow(report, seen.block, tuple(map(ValueRange.of, before)), operator)


def _key(array: NDArray) -> int:
    """Return the address of an array's memory, which several objects for one array share."""
    address = ctypes.c_void_p()
    array.wait_to_read()  # until it is computed, it may get other memory
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(address)))
    return address.value or 0


def _has_infinity(array: NDArray) -> bool:
    return bool(np.isinf(cast(array, "float32").asnumpy()).any())


def _holds_nan(array: NDArray) -> bool:
    return math.isnan(global_norm([array]))


def _largest(arrays: Iterable[NDArray]) -> float:
    """Return the absolute maximum of arrays, also of integers; NaN if there are none."""
    sizes = [mx.nd.abs(cast(a, "float32").astype("float32")).max().asscalar() for a in arrays]
    return float(max(sizes, default=math.nan))
