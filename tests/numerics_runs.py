"""Short recorded training runs, each with one planted difference from the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import mpgluon
from mpgluon import amp, diagnostics

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

BATCH, CLASSES = 8, 5


class Run:
    """A run of a small network; a planted difference changes its parts before or between steps."""

    def __init__(self, *, cast: Optional[str] = "float16", dropout: float = 0.5) -> None:
        mx.random.seed(0)
        np.random.seed(0)
        self.net = nn.HybridSequential(prefix="run_")
        with self.net.name_scope():
            self.net.add(nn.Conv2D(4, 3, padding=1, in_channels=3), nn.BatchNorm(in_channels=4))
            self.net.add(nn.Activation("relu"), nn.Dense(6, in_units=4 * 6 * 6))
            self.net.add(nn.Dropout(dropout), nn.Dense(CLASSES, in_units=6))
        self.devices = [mx.cpu()]
        self.net.initialize(mx.init.Xavier())
        self.cast, self.seed, self.scale, self.optimizer = cast, 0, 16.0, "sgd"
        self.options: dict[str, Any] = {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-4}
        rng = np.random.default_rng(1)
        self.images = rng.standard_normal((20, BATCH, 3, 6, 6)).astype(np.float32)
        self.labels = rng.integers(0, CLASSES, (20, BATCH))
        self.loss_fn: Callable[..., Any] = gluon.loss.SoftmaxCrossEntropyLoss()
        self.before_step: Callable[[Run, int], None] = lambda *_: None
        self.cast_options: dict[str, Any] = {}

    def train(self, folder: Path, steps: int = 5, **options: Any) -> Path:
        """Train, and record in a folder; return it."""
        if len(self.devices) > 1:
            self.net.collect_params().reset_ctx(self.devices)
        if self.cast is not None:
            mpgluon.cast_block(self.net, self.cast, **self.cast_options)
        half = self.cast is not None
        self.trainer = gluon.Trainer(
            self.net.collect_params(), self.optimizer, {**self.options, "multi_precision": half}
        )
        amp.init_trainer(self.trainer, self.scale if half else "none")
        options = {"every": 1, **options}
        self.recorder = diagnostics.NumericsRecorder(self.net, self.trainer, folder, **options)
        for step in range(1, steps + 1):
            self.before_step(self, step)
            self.one_step(step)
        return folder

    def one_step(self, step: int) -> None:
        mx.random.seed(self.seed + step)
        images, labels = (mx.nd.array(one[step - 1]) for one in (self.images, self.labels))
        parts = [gluon.utils.split_and_load(one, self.devices) for one in (images, labels)]
        with self.recorder.step(images, labels) as told:
            with autograd.record():
                told.loss = [self.loss_fn(self.net(x), y) for x, y in zip(*parts)]
                with amp.scale_loss(told.loss, self.trainer) as scaled:
                    autograd.backward(scaled)
            self.trainer.step(BATCH)
