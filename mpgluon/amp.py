"""Automatic mixed precision for Gluon: the names of ``mxnet.contrib.amp``, made right.

::

    amp.autocast(net)                                   # or mpgluon.cast_block(net)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    amp.init_trainer(trainer)
    with autograd.record():
        loss = loss_fn(net(images), labels)
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    trainer.step(batch_size)                            # skips itself if a gradient overflowed

Nothing is global: a network that was not cast and a Trainer that was not given a loss scale
are plain Gluon.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Union

from mxnet import gluon
from mxnet.ndarray import NDArray

from mpgluon.dtypes import dtype_name
from mpgluon.errors import PrecisionError
from mpgluon.loss_scale import LossScale, as_loss_scale
from mpgluon.precision.autocast import autocast
from mpgluon.precision.casting import restore
from mpgluon.trainer_state import attach, state_of

__all__ = [
    "autocast",
    "init_trainer",
    "loss_scale",
    "restore",
    "scale_loss",
    "skipped_steps",
    "step_was_skipped",
]


def init_trainer(
    trainer: gluon.Trainer, loss_scale: Union[str, float, LossScale] = "dynamic"
) -> None:
    """Give a Trainer a loss scale: its steps then undo the scaling and skip overflows.

    Parameters
    ----------
    trainer : gluon.Trainer
        Before its first step. On several devices it will update weights outside the kvstore
        (``update_on_kvstore=False``), the only place where a step can be skipped on all.
    loss_scale : str, float or LossScale
        ``"dynamic"``, ``"none"``, a power of two for a static scale, or an object such as
        ``mpgluon.DynamicLossScale(growth_interval=100)``.

    Raises
    ------
    TypeError, ValueError
        If ``trainer`` or ``loss_scale`` is something else.
    TrainerStateError
        If the Trainer has a loss scale already, or was created with
        ``update_on_kvstore=True``. Nothing is changed then.
    """
    attach(trainer, as_loss_scale(loss_scale))


@contextmanager
def scale_loss(loss: Any, trainer: gluon.Trainer) -> Iterator[Any]:
    """Multiply a loss by the Trainer's loss scale, for the backward pass.

    Use it inside ``autograd.record``. Several losses may be scaled before one ``step``: their
    gradients add up or, with ``grad_req='add'``, accumulate.

    Parameters
    ----------
    loss : NDArray, or list or tuple of NDArray, any shapes, FP32
        One loss per device, as a rule.
    trainer : gluon.Trainer
        The one whose ``step`` follows.

    Yields
    ------
    NDArray or list of NDArray
        S times ``loss``.

    Raises
    ------
    TypeError
        If a loss is no NDArray.
    TrainerStateError
        If the Trainer has no loss scale yet.
    PrecisionError
        If a loss is float16: S times it, or S itself as its gradient, would overflow.
    """
    state = state_of(trainer)
    losses = loss if isinstance(loss, (list, tuple)) else [loss]
    for one in losses:
        if not isinstance(one, NDArray):
            raise TypeError(f"a loss is an NDArray or a list of them, received {one!r}")
    if any(dtype_name(one) == "float16" for one in losses):
        raise PrecisionError(
            "the loss is float16, in which the scaled loss and its gradient overflow above 65504; "
            "cast the network's output before the loss: loss_fn(net(x).astype('float32'), y)"
        )
    scale = state.note_scaled_loss()
    if isinstance(loss, (list, tuple)):
        yield [one * scale for one in loss]
    else:
        yield loss * scale


def loss_scale(trainer: gluon.Trainer) -> float:
    """Return the factor S by which the Trainer's next loss will be multiplied."""
    return state_of(trainer).loss_scale.scale


def step_was_skipped(trainer: gluon.Trainer) -> bool:
    """Whether the latest ``trainer.step`` left the weights as they were."""
    return state_of(trainer).step_was_skipped


def skipped_steps(trainer: gluon.Trainer) -> int:
    """Return how many steps of the Trainer were skipped so far."""
    return state_of(trainer).skipped_steps
