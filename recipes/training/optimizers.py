"""The optimizer of a run, by name, with its schedule."""

from __future__ import annotations

import inspect
from typing import Any

import mxnet as mx

from recipes.training.config import TrainingConfig

__all__ = ["make_optimizer"]


def make_optimizer(
    config: TrainingConfig, total_steps: int, global_batch_size: int
) -> mx.optimizer.Optimizer:
    """Return the optimizer with its schedule: a linear warm-up, then a cosine down to zero.

    Raises
    ------
    ValueError
        If MXNet has no such optimizer.
    """
    registry = mx.optimizer.Optimizer.opt_registry
    name = config.optimizer.lower()
    if name not in registry:
        names = ", ".join(sorted(registry.keys() - {"test"}))  # MXNet's own, for its tests
        raise ValueError(f"MXNet has no optimizer {config.optimizer!r}; it has {names}")
    warmup_steps = total_steps // config.epochs * min(config.warmup_epochs, config.epochs - 1)
    peak = config.peak_learning_rate(global_batch_size)
    schedule = mx.lr_scheduler.CosineScheduler(
        max_update=total_steps, base_lr=peak, warmup_steps=warmup_steps
    )
    options: dict[str, Any] = {
        "learning_rate": peak,
        "lr_scheduler": schedule,
        "wd": config.weight_decay,
        "multi_precision": config.policy.param_dtype != "float32"
        and config.update_rounding is None,
    }
    if "momentum" in inspect.signature(registry[name].__init__).parameters:
        options["momentum"] = config.momentum
    if name == "dcasgd" and config.momentum:
        raise ValueError(
            f"MXNet's DCASGD fails with momentum={config.momentum}; choose momentum 0 with it"
        )
    return mx.optimizer.create(name, **options)
