"""Which optimizers support float16: each of MXNet's is run and compared with itself in FP32.

A weight takes fifty steps with the same gradients in each way of training, so that the errors are
rounding errors only, whatever the network or data set.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Callable, Optional

from mpgluon import amp
from mpgluon.base.blocks import is_mxnets_own
from mpgluon.cast.block import cast_block, restore
from mpgluon.formats.float_format import FLOAT16, FLOAT32, FloatFormat
from mpgluon.kernels.dtypes import cast
from mpgluon.updates.gluon_trainer import arrays_of_state

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import autograd, gluon
from mxnet.base import MXNetError
from mxnet.gluon import nn

__all__ = ["OptimizerReport", "optimizer_names", "report_on_optimizer"]

STEPS = 50
_SHAPE = (16, 8)
_BATCH_SIZE = 8
_LOSS_SCALE = 2.0**13

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class OptimizerReport:
    """The errors of one optimizer in 16 bits, the largest of all weights and steps.

    Attributes
    ----------
    name : str
        As for ``gluon.Trainer``.
    without_masters : str or float
        float16 weights and ``multi_precision=False``: ``"raises"``, ``"NaN"`` or the error of the
        weights in units of the last place of float16.
    mxnet : float
        The same with MXNet's ``multi_precision=True``; rounding the first and the last weights
        alone gives up to 1.
    mxnet_masters, masters : float
        The errors of MXNet's masters and of mpgluon's, in units of the last place of FP32.
    bfloat16 : float
        The error of FP32 parameters in a network that computes in bfloat16, in the same unit.
    """

    name: str
    without_masters: Any
    mxnet: float
    mxnet_masters: float
    masters: float
    bfloat16: float

    @property
    def advice(self) -> str:
        """Which options to use, in a few words."""
        if self.mxnet > 1.5:  # more than rounding the first and the last weights
            return "multi_precision=True on a network of cast_block; MXNet's own masters are wrong"
        if isinstance(self.without_masters, str):
            return f"multi_precision=True; without it: {self.without_masters}"
        return "multi_precision=True; without it updates are lost"


def optimizer_names() -> list[str]:
    """Return the names of MXNet's own optimizers."""
    registry = mx.optimizer.Optimizer.opt_registry
    return sorted(name for name, kind in registry.items() if is_mxnets_own(kind))


def report_on_optimizer(name: str) -> OptimizerReport:
    """Run one optimizer with its default options in every way and return the errors.

    MXNet's random numbers are then those after ``mx.random.seed``.

    Raises
    ------
    ValueError
        If MXNet has no optimizer of that name.
    """
    if name not in optimizer_names():
        raise ValueError(f"MXNet has no optimizer {name!r}; it has {', '.join(optimizer_names())}")
    reference, _ = _layer_run(name, None)
    try:
        plain, _ = _plain_run(name, multi_precision=False)
        finite = all(np.isfinite(weight).all() for weight in plain)
        without: Any = _error(plain, reference, FLOAT16) if finite else "NaN"
    except MXNetError:
        without = "raises"
    mxnet, mxnet_masters = _plain_run(name, multi_precision=True)
    _, masters = _layer_run(name, cast_block)
    bfloat16, _ = _layer_run(name, lambda layer: amp.autocast(layer, "bfloat16"))
    return OptimizerReport(
        name=name,
        without_masters=without,
        mxnet=_error(mxnet, reference, FLOAT16),
        mxnet_masters=_error(mxnet_masters, [reference[-1]], FLOAT32),
        masters=_error(masters, [reference[-1]], FLOAT32),
        bfloat16=_error(bfloat16, reference, FLOAT32),
    )


def _start_and_gradients() -> tuple[Array, list[Array]]:
    """Return FP32 weights of some 1/8, and gradients for a batch that float16 holds exactly."""
    drawn = np.random.default_rng(0)
    start = (drawn.standard_normal(_SHAPE) / 8).astype(np.float32)
    return start, [
        (drawn.standard_normal(_SHAPE) / 16 + 1 / 64).astype(np.float16) for _ in range(STEPS)
    ]


def _plain_run(name: str, *, multi_precision: bool) -> tuple[list[Array], list[Array]]:
    """Return MXNet's own float16 weights after each step, and the masters after the last."""
    start, gradients = _start_and_gradients()
    mx.random.seed(0)  # SGLD adds noise to its updates
    optimizer = mx.optimizer.create(
        name, multi_precision=multi_precision, rescale_grad=1 / _LOSS_SCALE / _BATCH_SIZE
    )
    updater = mx.optimizer.get_updater(optimizer)
    weight = mx.nd.array(start, dtype="float16")
    weights = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accumulating with float16 in optimizer")
        for gradient in gradients:
            scaled = mx.nd.array(gradient.astype(np.float32) * _LOSS_SCALE, dtype="float16")
            updater([0], [scaled], [weight])
            weights.append(weight.asnumpy())
    leaves = [s for s in arrays_of_state(updater.states[0]).values() if s.shape == _SHAPE]
    masters = [s.asnumpy() for s in leaves if (s.astype("float16") == weight).min().asscalar()]
    return weights, masters[:1]


def _layer_run(
    name: str, change: Optional[Callable[[gluon.Block], Any]]
) -> tuple[list[Array], list[Array]]:
    """Return the weights of a layer after each step, and the FP32 values after the last."""
    start, gradients = _start_and_gradients()
    layer = nn.Dense(_SHAPE[0], in_units=_SHAPE[1], use_bias=False)
    layer.initialize()
    layer.weight.set_data(mx.nd.array(start))
    if change is not None:
        change(layer)
    optimizer = mx.optimizer.create(name, multi_precision=True)
    trainer = gluon.Trainer(layer.collect_params(), optimizer)
    amp.init_trainer(trainer, _LOSS_SCALE if change is not None else "none")
    mx.random.seed(0)
    weights = []
    for gradient in gradients:
        with autograd.record():
            loss = cast(layer.weight.data(), "float32") * mx.nd.array(gradient, dtype="float32")
            with amp.scale_loss(loss, trainer) as scaled_loss:
                scaled_loss.backward()
        trainer.step(_BATCH_SIZE)
        weights.append(layer.weight.data().asnumpy())
    restore(layer)
    return weights, [layer.weight.data().asnumpy()]


def _error(values: list[Array], references: list[Array], fmt: FloatFormat) -> float:
    """Return the largest error, in units of the last place of a format.

    The unit of each weight is that at its largest magnitude of all steps: weights that pass
    through zero do not count for more than others.
    """
    start, _ = _start_and_gradients()
    largest = np.max([np.abs(array) for array in (start, *references)], axis=0)
    _, exponents = np.frexp(np.maximum(largest, fmt.smallest_normal).astype(np.float64))
    last_place = np.ldexp(fmt.epsilon, exponents - 1)
    errors = [np.abs(v.astype(np.float64) - r) / last_place for v, r in zip(values, references)]
    return float(np.max(errors))
