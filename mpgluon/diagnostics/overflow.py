"""Where did it overflow? The first array of a step that is not finite, and who computed it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Optional

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.ndarray import NDArray

from mpgluon.cast.block import blocks_of
from mpgluon.diagnostics.observe import Batch, Seen, observed_batch, observing, untouched
from mpgluon.numerics.dtypes import cast, dtype_name
from mpgluon.numerics.reductions import all_finite
from mpgluon.trainer.inside import update_counts
from mpgluon.trainer.step import state_of

__all__ = ["OverflowLocator", "OverflowReport", "locate_overflow"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OverflowReport:
    """The first array that is not finite.

    Attributes
    ----------
    direction : {"forward", "backward"}
    what : str
        What the array is, such as ``"what FullyConnected returned"``.
    block : str
        The name of the block at work; of the parameter's, for a parameter's gradient.
    kind : str
        The block's class.
    dtype : str
    shape : tuple of int
    largest_before : float
        The absolute maximum of what it was computed from: the inputs of the operator, or the
        gradient that came before; NaN if that is not known.
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


def locate_overflow(
    net: gluon.Block, batch: Batch, *, loss_scale: float = 1.0
) -> Optional[OverflowReport]:
    """Run a batch forward and backward, and return the first array that is not finite.

    The network is left as it was. It is run imperatively, operator by operator.

    Parameters
    ----------
    net : gluon.Block
    batch : Batch
    loss_scale : float

    Returns
    -------
    OverflowReport or None
        ``None`` if every array is finite.
    """
    watch = _Watch(loss_scale)
    observed_batch(net, batch, watch.see, loss_scale=loss_scale, operators=True)
    return watch.report


class OverflowLocator:
    """Waits for the first step that is skipped, and reports where its overflow began.

    Costs references to a step's inputs while steps are finite. When one is skipped, the network
    is run forward once more on those inputs, imperatively; if everything is finite then, the
    gradients are looked at from the last parameter to the first. The report is logged as a warning.
    The second run draws random numbers where the network does, so dropout goes on with other masks.
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
        if self.report is not None:
            return
        watch = _Watch(loss_scale)
        with untouched(self._net), autograd.train_mode():
            for inputs in inputs_of_step:
                with observing(self._net, watch.see, operators=True):
                    self._net(*inputs)
        gradients = [
            (parameter, gradient)
            for parameter in self._net.collect_params().values()
            if parameter.grad_req != "null"
            for gradient in parameter.list_grad()
        ]
        self.report = watch.report or _first_of_gradients(self._net, gradients, loss_scale)
        if self.report is not None:
            _logger.warning("%s", self.report)


class _Watch:
    """An observer that keeps the first array that is not finite and stays so."""

    def __init__(self, loss_scale: float) -> None:
        self.report: Optional[OverflowReport] = None
        self._loss_scale = loss_scale
        self._latest_gradient = math.nan

    def see(self, seen: Seen) -> None:
        """Look at an array."""
        backward = seen.kind in ("output gradient", "gradient")
        if self.report is not None and (backward or self.report.direction == "backward"):
            return
        if all_finite([seen.array]):
            self._latest_gradient = _largest([seen.array]) if backward else math.nan
            if self.report is not None and seen.inputs and not all_finite(seen.inputs):
                self.report = None  # an infinity that was meant, such as a mask before a softmax
            return
        if self.report is not None:
            return
        what = {
            "operator": f"what {seen.operator} returned",
            "output": "what it returned",
            "output gradient": "the gradient of what it returned",
            "gradient": f"the gradient of {seen.operator}",
        }[seen.kind]
        self.report = OverflowReport(
            direction="backward" if backward else "forward",
            what=what,
            block=seen.block.name,
            kind=type(seen.block).__name__,
            dtype=str(dtype_name(seen.array)),
            shape=tuple(seen.array.shape),
            largest_before=self._latest_gradient if backward else _largest(seen.inputs),
            loss_scale=self._loss_scale,
        )


def _first_of_gradients(
    net: gluon.Block, gradients: Iterable[tuple[gluon.Parameter, NDArray]], loss_scale: float
) -> Optional[OverflowReport]:
    """Return the first parameter's gradient that is not finite, by backward order."""
    owners = {p: b for b in blocks_of(net) for p in b._reg_params.values()}
    owners.update({p: net for p in net.collect_params().values() if p not in owners})
    before = math.nan
    for parameter, gradient in reversed(list(gradients)):
        if not all_finite([gradient]):
            return OverflowReport(
                direction="backward",
                what=f"the gradient of {parameter.name}",
                block=owners[parameter].name,
                kind=type(owners[parameter]).__name__,
                dtype=str(dtype_name(gradient)),
                shape=tuple(gradient.shape),
                largest_before=before,
                loss_scale=loss_scale,
            )
        before = _largest([gradient])
    return None


def _largest(arrays: Iterable[NDArray]) -> float:
    """Return the absolute maximum of some arrays, integers included; NaN if there are none."""
    sizes = [mx.nd.abs(cast(a, "float32").astype("float32")).max().asscalar() for a in arrays]
    return float(max(sizes, default=math.nan))
