"""One training loop for small networks in every format: first weights, Trainer, steps, tests."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

import mpgluon
from mpgluon import amp

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from numpy.typing import NDArray

from study.experiments.experiment import Outcome
from study.experiments.series import means

__all__ = ["FORMATS", "WINDOW", "LoopSettings", "fit", "predict", "start"]

FORMATS = ("float32", "float16", "mixed_float16", "bfloat16")
WINDOW = 10  # steps of which a curve has the mean
_TEST_BATCH = 500
_ORDER_SEED = 2  # keeps the order's draws apart from draws for other purposes


@dataclass(frozen=True)
class LoopSettings:
    """The settings of a training that do not depend on its task.

    Attributes
    ----------
    dtype : str
        One of ``FORMATS``: "float16" is the cast network, "mixed_float16" autocast.
    seed : int
        Decides the first weights and the order of the examples, but not the examples.
    learning_rate : float
        Adam's first learning rate, which falls to 0 in a straight line.
    max_norm : float
        The limit to which the gradients' global norm is clipped, in true units.
    init_scale, growth_interval
        Settings of the dynamic loss scale, in float16.
    """

    dtype: str = "float32"
    seed: int = 0
    epochs: int = 14
    batch_size: int = 25
    learning_rate: float = 0.004
    max_norm: float = 0.5
    init_scale: float = 2.0**16
    growth_interval: int = 100

    def __post_init__(self) -> None:
        if self.dtype not in FORMATS:
            raise ValueError(f"dtype must be one of {', '.join(FORMATS)}; received {self.dtype!r}")

    @property
    def has_loss_scale(self) -> bool:
        """Whether the loss is scaled: FP32 and bfloat16 have exponents enough without it."""
        return self.dtype in ("float16", "mixed_float16")


def start(net: gluon.HybridBlock, settings: LoopSettings) -> None:
    """Give a network its first weights, which depend on the seed only, and its format."""
    mx.random.seed(settings.seed)
    net.initialize(mx.init.Xavier())
    if settings.dtype == "float16":
        mpgluon.cast_block(net)
    elif settings.dtype != "float32":
        amp.autocast(net, settings.dtype.replace("mixed_", ""))
    net.hybridize(static_alloc=True, static_shape=True)


def fit(
    net: gluon.HybridBlock,
    settings: LoopSettings,
    examples: Sequence[NDArray[Any]],
    loss_of: Callable[..., Any],
    test: Callable[[], Mapping[str, float]],
) -> Outcome:
    """Train a network that was started, and test it before the first and after each epoch.

    Parameters
    ----------
    net : HybridBlock
    settings : LoopSettings
    examples : sequence of ndarray, shapes (N, ...)
        N must be a multiple of the batch size.
    loss_of : callable
        Takes the arrays of a batch as NDArrays, and returns a loss for each example, FP32.
    test : callable
        Returns figures by name; the outcome has the last ones, and all of them as curves.

    Raises
    ------
    ValueError
        If the examples do not make whole batches.
    """
    count = len(examples[0])
    if count % settings.batch_size:
        raise ValueError(
            f"the number of examples must be a multiple of batch_size, received {count} and "
            f"{settings.batch_size}"
        )
    batches = count // settings.batch_size
    trainer = _make_trainer(net, settings, steps=batches * settings.epochs)
    rng = np.random.default_rng([_ORDER_SEED, settings.seed])
    losses, norms, scales, tests, seconds = [], [], [], [test()], 0.0
    for _ in range(settings.epochs):
        began = time.perf_counter()
        for chosen in np.split(rng.permutation(count), batches):
            scales.append(amp.loss_scale(trainer))
            batch = [one[chosen] for one in examples]
            loss, norm = _step(trainer, loss_of, batch, settings.max_norm)
            losses.append(loss)
            norms.append(norm)
        seconds += time.perf_counter() - began
        tests.append(test())
    curves: dict[str, Sequence[Any]] = {name: [one[name] for one in tests] for name in tests[0]}
    curves["loss"] = means(losses, WINDOW)
    if settings.has_loss_scale:
        curves["loss_scale"] = scales[::WINDOW]
    return Outcome(
        figures={
            **tests[-1],
            "final_loss": means(losses, batches)[-1],
            "steps": len(losses),
            "skipped_steps": amp.skipped_steps(trainer),
            "clipped_steps": sum(settings.max_norm < norm < math.inf for norm in norms),
            "final_scale": amp.loss_scale(trainer),
        },
        curves=curves,
        times={"seconds_per_step": seconds / len(losses)},
    )


def _make_trainer(net: gluon.Block, settings: LoopSettings, steps: int) -> gluon.Trainer:
    schedule = mx.lr_scheduler.PolyScheduler(steps, settings.learning_rate, pwr=1)
    options = {
        "learning_rate": settings.learning_rate,
        "lr_scheduler": schedule,
        "multi_precision": True,
    }
    trainer = gluon.Trainer(net.collect_params(), "adam", options)
    scale = mpgluon.DynamicLossScale(settings.init_scale, growth_interval=settings.growth_interval)
    amp.init_trainer(trainer, scale if settings.has_loss_scale else "none")
    return trainer


def _step(
    trainer: gluon.Trainer,
    loss_of: Callable[..., Any],
    batch: Sequence[NDArray[Any]],
    max_norm: float,
) -> tuple[float, float]:
    """Do one step; return the mean loss, and the gradients' norm before clipping."""
    with autograd.record():
        loss = loss_of(*map(_as_ndarray, batch))
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    norm = amp.clip_global_norm(trainer, max_norm, len(loss))
    trainer.step(len(loss))
    return float(loss.mean().asscalar()), norm


def predict(net: gluon.HybridBlock, *inputs: NDArray[Any]) -> NDArray[np.float32]:
    """Return a network's outputs for inputs of any number, computed in parts."""
    parts = range(0, len(inputs[0]), _TEST_BATCH)
    return np.concatenate([
        net(*(_as_ndarray(one[first : first + _TEST_BATCH]) for one in inputs)).asnumpy()
        for first in parts
    ])  # fmt: skip


def _as_ndarray(array: NDArray[Any]) -> Any:
    return mx.nd.array(array, dtype=array.dtype)
