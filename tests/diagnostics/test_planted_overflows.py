"""Overflows planted in random networks are found where they are, however a step is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Callable

import mpgluon
from mpgluon import amp
from mpgluon.diagnostics import FlightRecorder, OverflowLocator, locate_overflow, replay
from mpgluon_tools.diagnostics.overflow import OverflowReport

import numpy as np
import pytest
from diagnostics_helpers import scaled_trainer
from helpers import STATIC
from mxnet import autograd, gluon
from planted_overflows import Planted, planted

SEEDS = (*range(48), 106, 133, 189)  # three in which NaN is replaced by 0 if ReLU does so
Locate = Callable[[Planted, gluon.Block, Path], OverflowReport]
pytestmark = pytest.mark.filterwarnings("ignore:All children of this Sequential layer")


def by_locate_overflow(one: Planted, net: gluon.Block, _: Path) -> OverflowReport:
    return locate_overflow(net, one.batch)


def by_locator(one: Planted, net: gluon.Block, _: Path) -> OverflowReport:
    trainer = scaled_trainer(net, 1.0)
    locator = OverflowLocator(net, trainer)
    skipped_step(one, net, trainer)
    return locator.report


def by_replay(one: Planted, net: gluon.Block, folder: Path) -> OverflowReport:
    trainer = scaled_trainer(net, 1.0)
    recorder = FlightRecorder(net, trainer, folder)
    with recorder.step(one.batch.inputs, one.batch.labels):
        skipped_step(one, net, trainer)
    (file,) = folder.iterdir()
    again = replay(file, one.make(), cures=False)
    assert again.same_bits
    return again.overflow


def skipped_step(one: Planted, net: gluon.Block, trainer: gluon.Trainer) -> None:
    with autograd.record():
        loss = one.batch.loss_fn(net(one.batch.inputs), one.batch.labels)
        with amp.scale_loss(loss, trainer) as scaled:
            scaled.backward()
    trainer.step(len(loss))
    assert amp.step_was_skipped(trainer)


def cast_net(one: Planted) -> gluon.Block:
    """Return the network cast or autocast, imperative, hybridized or static, by its seed."""
    net = one.make()
    (mpgluon.cast_block, amp.autocast)[one.seed % 2](net)
    flags = (None, {}, STATIC)[one.seed // 2 % 3]
    if flags is not None:
        net.hybridize(**flags)
    return net


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("locate", [by_locate_overflow, by_locator, by_replay])
def test_the_layer_that_overflows_first_is_named(locate: Locate, seed, tmp_path):
    one = planted(seed)
    report = locate(one, cast_net(one), tmp_path)
    assert (report.direction, report.block) == ("forward", one.layer)


@pytest.mark.sampled(8)
@pytest.mark.usefixtures("native_operators")
@pytest.mark.parametrize("seed", SEEDS)
def test_the_layer_that_overflows_first_raises_its_flag_and_is_finite_in_fp32(seed):
    one = planted(seed)
    with autograd.train_mode():
        assert np.isfinite(one.make()(one.batch.inputs).asnumpy()).all()
    net = cast_net(one)
    trainer = scaled_trainer(net, 1.0)
    skipped_step(one, net, trainer)
    assert amp.step_flags(trainer).first("forward").layer == one.layer
