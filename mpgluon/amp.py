"""Automatic mixed precision for Gluon, under the names of ``mxnet.contrib.amp``.

::

    amp.autocast(net)                                   # or mpgluon.cast_block(net)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    amp.init_trainer(trainer)
    with autograd.record():
        loss = loss_fn(net(images), labels)
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    trainer.step(batch_size)                            # skips itself if a gradient overflowed

A network that was not cast and a Trainer without a loss scale are plain Gluon, and nothing of MXNet
is replaced for good. State belongs to its Trainer. Two things belong to the process, since MXNet
offers no Trainer to keep them in: the formats that ``init`` asks for before there is one
(``mpgluon/trainer/networks.py``), and a weak set of the Trainers that each thread uses, because a
loss does not show whose gradients it writes (``mpgluon/trainer/gradient_flags.py``). Nothing leads
from a parameter or a hybridized block's recorded call to the block either: where ``init`` or
``scale_loss`` needs it, it is among those that the garbage collector lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Optional, Union

from mpgluon.cast.block import autocast, restore
from mpgluon.cast.status_flags import StepFlags
from mpgluon.errors import PrecisionError
from mpgluon.formats.loss_scale import NUMBERS, LossScale, as_loss_scale, whole_number
from mpgluon.kernels.dtypes import dtype_name
from mpgluon.trainer import clipping
from mpgluon.trainer.networks import cast_networks_of, layers_of
from mpgluon.trainer.scaled_loss import scaled
from mpgluon.trainer.step import attach, state_of
from mpgluon.updates.rounded_updates import UpdateRounding

from mxnet import gluon
from mxnet.ndarray import NDArray

__all__ = [
    "autocast",
    "clip_global_norm",
    "gradient_norm",
    "init_trainer",
    "loss_scale",
    "restore",
    "scale_loss",
    "skipped_steps",
    "step_flags",
    "step_was_skipped",
    "unscale",
    "unscaled_gradients",
]


_CONTRIB = """
    convert_hybrid_block convert_model convert_symbol init list_conditional_fp32_ops list_fp32_ops
    list_loss_output_functions list_lp16_fp32_ops list_lp16_ops list_lp16_use_fp32_params
    list_widest_type_cast
"""


def __getattr__(name: str) -> Any:
    """Import the names of ``contrib.amp``; say what to write instead of other libraries' names."""
    if name in _CONTRIB.split():
        return getattr(import_module("mpgluon.contrib_amp"), name)
    instead = import_module("mpgluon.base.migration").INSTEAD
    if name in instead:
        raise AttributeError(
            f"mpgluon.amp has no {name}; instead: {instead[name]} (docs/migration.md)"
        )
    if name in import_module("mpgluon").__all__:
        raise AttributeError(f"mpgluon.amp has no {name}; it is mpgluon.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def init_trainer(
    trainer: gluon.Trainer,
    loss_scale: Union[str, float, LossScale] = "dynamic",
    *,
    max_consecutive_skips: Optional[int] = 2000,
    update_rounding: str = "nearest",
    rounding_seed: int = 0,
    count_underflow: bool = False,
) -> None:
    """Give a Trainer a loss scale: its steps then undo the scaling and skip overflows.

    With ``multi_precision=True`` it also keeps FP32 masters of 16-bit weights, which begin with
    the values from before the cast and follow weights that are set or loaded later.

    A skipped step leaves no NaN in BatchNorm's running statistics either, if they are among the
    Trainer's parameters, as in ``net.collect_params()``: statistics that are not finite go back to
    their values from before the step.

    Parameters
    ----------
    trainer : gluon.Trainer
        Before its first step. On several devices it will update weights outside the kvstore
        (``update_on_kvstore=False``), the only place where a step can be skipped on all.
    loss_scale : str, float or LossScale
        ``"dynamic"``, ``"measured"``, ``"none"``, a power of two for a static scale, or an object
        such as ``mpgluon.DynamicLossScale(growth_interval=100)``. Several Trainers may share one
        object: it is updated once when each of them has made a step, or when one that has made its
        step scales its next loss.
    max_consecutive_skips : int or None
        The number of steps in a row that overflow although the scale can shrink no further (a
        static scale never can) after which ``trainer.step`` raises ``LossScaleCollapseError``. The
        second one is logged as a warning. ``None``: it never raises.
    update_rounding : {"nearest", "stochastic", "kahan"}
        How the updates of bfloat16 weights (``mpgluon.cast_block(net, "bfloat16")``) are rounded
        without masters. ``"nearest"`` loses those below half a unit in a weight's last place, which
        is logged as a warning; ``"stochastic"`` keeps them on average; ``"kahan"`` keeps
        rounding errors in an array of the same format per weight (docs/optimizers.md).
    rounding_seed : int
        Seed of stochastic rounding, whose random bits depend on it, the number of the step (skipped
        ones apart), the weight and the element, not on devices, threads or other random numbers.
    count_underflow : bool
        Whether :func:`step_flags` also counts the results of each layer that rounding makes zero.

    Raises
    ------
    TypeError, ValueError
        If an argument is of another kind or out of range, or if ``update_rounding`` has nothing to
        round: no bfloat16 weights, or weights with masters.
    TrainerStateError
        If the Trainer has a loss scale already, was created with ``update_on_kvstore=True``, or
        has row-sparse weights, which MXNet updates there. Nothing is changed then.
    PrecisionError
        If it was created without ``multi_precision=True``, has float16 weights, and its optimizer
        cannot update those (docs/optimizers.md): Adam's epsilon is zero in float16, RMSProp's
        state is FP32. Other optimizers lose small updates without masters, which is logged as a
        warning.
    """
    skips = max_consecutive_skips
    if skips is not None:
        skips = whole_number("max_consecutive_skips", skips)
    rounding = UpdateRounding(update_rounding, rounding_seed)
    if isinstance(trainer, gluon.Trainer):
        cast_networks_of(trainer)
    attach(trainer, as_loss_scale(loss_scale), skips, rounding)
    for layers in layers_of([trainer]):
        layers.note(counts_underflow=count_underflow)


def scale_loss(
    loss: Any, trainer: Union[gluon.Trainer, Sequence[gluon.Trainer]]
) -> AbstractContextManager[Any]:
    """Multiply a loss by the Trainer's loss scale, for the backward pass.

    Use it inside ``autograd.record`` or right after that block, and call ``backward`` inside its
    own ``with`` block: gradients that are written there are known to be S times too large, and a
    step that would divide others by S is refused. Several losses may be scaled before one ``step``:
    their gradients add up or, with ``grad_req='add'``, accumulate, float16 ones in FP32. A step
    that was given up is discarded when the next loss is scaled; gradients that accumulate must be
    emptied first (``net.collect_params().zero_grad()``, before this block: inside it float16
    gradients are from the latest loss alone, and are added to their sums at its end, by
    ``trainer.step`` or by clipping).

    Parameters
    ----------
    loss : NDArray, or list or tuple of NDArray, any shapes, FP32
        One loss per device, as a rule.
    trainer : gluon.Trainer, or list or tuple of them
        Every Trainer whose ``step`` follows. Several share one loss scale: it is updated once, by
        the first step, and an overflow in the gradients of one skips the steps of all. If each has
        its own, all share the first one's from then on.

    Returns
    -------
    context manager
        Yields S times ``loss``: an NDArray, or a list of them.

    Raises
    ------
    TypeError, ValueError
        If a loss is not an NDArray, or ``trainer`` is an empty list or names a Trainer twice.
    TrainerStateError
        If a Trainer has no loss scale yet, if several have different ones, if the gradients would
        mix with others that cannot be added to them, or if the loss is being scaled already.
    PrecisionError
        If a loss is float16: S times it, or S itself as its gradient, would overflow. If it comes
        from an operator whose gradient does not depend on a loss scale.

    Notes
    -----
    ``SoftmaxOutput`` and the ``RegressionOutput`` operators compute the same gradient whatever the
    loss is multiplied by. Outside of hybridized blocks, their ``grad_scale`` in the recorded graph
    is multiplied by S; MXNet's other such operators are refused.
    """
    losses = list(loss) if isinstance(loss, (list, tuple)) else [loss]
    for one in losses:
        if not isinstance(one, NDArray):
            raise TypeError(
                "scale_loss takes a loss, an NDArray computed inside autograd.record or a list of "
                f"them, and a Trainer; received {one!r} as the loss"
            )
    if any(dtype_name(one) == "float16" for one in losses):
        raise PrecisionError(
            "the loss is float16, in which the scaled loss and its gradient overflow above 65504; "
            "cast the network's output before the loss: loss_fn(net(x).astype('float32'), y)"
        )
    trainers = trainer if isinstance(trainer, (list, tuple)) else (trainer,)
    states = tuple(state_of(one) for one in trainers)
    if not states or len(set(states)) < len(states):
        raise ValueError(
            f"scale_loss takes one Trainer, or a list of different ones, received {trainer!r}"
        )
    return scaled(losses, states, as_list=isinstance(loss, (list, tuple)))


def loss_scale(trainer: gluon.Trainer) -> float:
    """Return the factor S by which the Trainer's next loss will be multiplied."""
    return state_of(trainer).scale


def step_was_skipped(trainer: gluon.Trainer) -> bool:
    """Whether the latest ``trainer.step`` left the weights as they were."""
    return state_of(trainer).step_was_skipped


def skipped_steps(trainer: gluon.Trainer) -> int:
    """Return how many steps of the Trainer were skipped so far."""
    return state_of(trainer).skipped_steps


def step_flags(trainer: gluon.Trainer) -> StepFlags:
    """Return which layers overflowed or made a NaN during the latest step, without a rerun.

    Every rounding of a cast network on a CPU with native operators raises flags of its layer, as
    in IEEE 754: *overflow* if a finite FP32 result became infinite, *invalid* if a NaN was
    made of operands without NaN. The step takes them, and the next one begins without any.

    Parameters
    ----------
    trainer : gluon.Trainer
        After ``trainer.step``.

    Returns
    -------
    StepFlags
        ``print`` it, or iterate over its layers: each has ``layer`` (the name of the block),
        ``device``, ``forward`` and ``backward``, and these ``overflow``, ``invalid`` and
        ``underflow``; after a step that several processes have skipped, the layers of all, and
        ``rank``. It is false if no layer raised a flag. An infinity may be intended, such as a
        mask of -1e9 that a softmax turns into zeros: a flag alone skips no step.

    Raises
    ------
    TrainerStateError
        If the Trainer has no loss scale yet.

    Notes
    -----
    Imperative runs do not note *invalid*. Nothing is noted of native bfloat16 products, on a GPU,
    and without native operators. Where a step was skipped without a flag, the text says which of
    these it was.
    """
    return state_of(trainer).flags


def clip_global_norm(trainer: gluon.Trainer, max_norm: float, batch_size: float) -> float:
    """Shrink all gradients together in the next step, so that their norm is at most ``max_norm``.

    The factor is folded into the step, like the division by S: no gradient is written, and
    float16 gradients whose true values underflow count in full. Gradients are summed over devices
    (and processes) here, not in the step: do not change gradients or weights between the two.
    Waits for the devices once, in place of the step. ``gluon.utils.clip_global_norm`` would clip
    gradients times S, and fails for float16 on a CPU; MXNet's message does not name this function.

    Parameters
    ----------
    trainer : gluon.Trainer
        Between ``backward`` (the last one, if gradients accumulate) and ``trainer.step``.
    max_norm : float
        In true units: of gradients divided by S and by ``batch_size``.
    batch_size : float
        The argument that ``trainer.step`` will receive.

    Returns
    -------
    float
        The true norm before clipping, of the gradients that the optimizer would receive.
        Infinite or NaN if a gradient is; the step is then skipped.

    Raises
    ------
    ValueError, TypeError
        If ``max_norm`` or ``batch_size`` is not a positive number.
    TrainerStateError
        If the Trainer has no loss scale yet, if it was called already since the last step, if
        there is no gradient, or, from ``trainer.step``, if it received another batch size.

    References
    ----------
    Pascanu, Mikolov, Bengio, "On the difficulty of training recurrent neural networks", 2013, 3.2.
    """
    state = state_of(trainer)
    for name, value in (("max_norm", max_norm), ("batch_size", batch_size)):
        if isinstance(value, bool) or not isinstance(value, NUMBERS):
            raise TypeError(f"{name} must be a number, received {value!r}")
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, received {value!r}")
    return clipping.clip(state, float(max_norm), float(batch_size))


def gradient_norm(trainer: gluon.Trainer) -> Optional[float]:
    """Return the true norm of the latest step's gradients, as the optimizer received them.

    The step has summed the squares of all gradients to see whether they are finite; this is the
    root of that sum, and neither computes nor waits.

    Parameters
    ----------
    trainer : gluon.Trainer
        After ``trainer.step``.

    Returns
    -------
    float or None
        What ``clip_global_norm`` returned or, with the step's batch size, would have, up to
        rounding: the norm before clipping of gradients divided by S and by the batch size. On
        devices whose gradients are not summed, the largest norm. Infinite or NaN if the step
        was skipped.
        ``None`` before the first step, and where nothing was looked at: with the loss scale
        ``"none"`` and no clipping.

    Raises
    ------
    TrainerStateError
        If the Trainer has no loss scale yet.
    """
    return state_of(trainer).gradient_norm


def unscale(trainer: gluon.Trainer) -> None:
    """Divide FP32 gradients by the loss scale in place, to read or change them by hand.

    ``trainer.step`` then divides by the batch size only. Nothing else needs this call.

    Raises
    ------
    PrecisionError
        If a gradient is float16, in which small true values are zero; nothing is changed then.
    TrainerStateError
        If the Trainer has no loss scale yet, if no loss was scaled since the last step, or if the
        gradients were unscaled already.
    """
    clipping.unscale(state_of(trainer))


def unscaled_gradients(trainer: gluon.Trainer) -> dict[str, NDArray]:
    """Return FP32 copies of all gradients, divided by the loss scale; not by the batch size.

    Parameters
    ----------
    trainer : gluon.Trainer
        After ``backward``, or after the step, whose gradients it then returns.

    Returns
    -------
    dict from the name of each trained parameter to NDArray
        Summed over the devices of this process, on the first of them; without a kvstore, which
        never sums them, the first device's. A gradient that this step did not write is from an
        earlier step, whose scale may have been another.

    Raises
    ------
    TrainerStateError
        If the Trainer has no loss scale yet, or all parameters are frozen.
    """
    return clipping.unscaled_gradients(state_of(trainer))
