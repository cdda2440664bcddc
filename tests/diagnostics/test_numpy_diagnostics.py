"""Diagnostics of a network of MXNet's NumPy interface: equal to those for mx.nd."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mpgluon
from mpgluon import amp
from mpgluon.diagnostics import (
    Batch,
    ExponentRecorder,
    FlightRecorder,
    OverflowLocator,
    alignment_report,
    batch_exponents,
    check_network,
    check_training,
    compare_with_fp32,
    locate_overflow,
    range_report,
    replay,
    suggest_keep_fp32,
)
from mpgluon_tools.diagnostics.observe import observed_batch

import mxnet as mx
import numpy as np
import pytest
from helpers import BOTH, WAYS, backward_from, cast_net, run_python
from interfaces import images_of, in_both, interface, made
from mxnet import autograd, gluon

CASTS = pytest.mark.parametrize("way", ["cast float16", "autocast bfloat16"])
FP32_TOO = pytest.mark.parametrize("way", [None, "cast float16", "autocast bfloat16"])


def batch_of(array, factor=1.0):
    labels = array(np.arange(4), dtype="int32")
    return Batch(images_of(array) * factor, labels, gluon.loss.SoftmaxCrossEntropyLoss())


def without_dropout(net):
    net.drop._rate = 0  # a mask is drawn by another operator in the other interface
    return net


def histograms_of(exponents):
    return {
        (what, name): (histogram.counts.tolist(), histogram.zeros, histogram.not_finite)
        for what in ("weights", "gradients", "activations", "activation_gradients")
        for name, histogram in getattr(exponents, what).items()
    }


@FP32_TOO
@BOTH
def test_exponents_and_ranges_are_the_same(way, hybridize):
    def examined(array):
        net = without_dropout(made(way, hybridize))
        report = range_report(net, batch_of(array), loss_scale=64)
        exponents = batch_exponents(net, batch_of(array), loss_scale=64)
        return str(report), [a.largest for a in report.arrays], histograms_of(exponents)

    in_nd, in_np = in_both(examined)
    assert in_np == in_nd
    assert "both_conv0" in in_np[0]


@FP32_TOO
@BOTH
def test_an_overflow_is_found_in_the_same_place(way, hybridize):
    def located(array):
        net = without_dropout(made(way, hybridize))
        forward = locate_overflow(net, batch_of(array, 2.0**126))
        batch = batch_of(array)
        steep = replace(batch, loss_fn=lambda *both: batch.loss_fn(*both) * 64)
        return [forward, locate_overflow(net, steep, loss_scale=2.0**126)]

    (forward, backward), in_np = in_both(located)
    assert in_np == [forward, backward]
    assert (forward.direction, backward.direction) == ("forward", "backward")
    assert forward.what == "what Convolution returned"


class Computes(gluon.HybridBlock):
    def __init__(self, function):
        super().__init__(prefix="computes_")
        self.function = function

    def hybrid_forward(self, F, x):
        return self.function(F, x)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda F, x: F.np.dot(x, x * 2.0**120), "_np_dot"),
        (lambda F, x: F.npx.batch_dot(F.np.expand_dims(x, 0), F.np.ones((1, 2, 2)) * 2.0**120),
         "batch_dot"),
        (lambda _, x: x * 2.0**120 * 2.0**10, "broadcast_mul"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("way", [None, "autocast float16"])
def test_the_operator_of_an_overflow_has_its_name_in_f_or_in_a_graph(way, function, name):
    with interface(in_numpy=True) as array:
        net = Computes(function)
        if way is not None:
            WAYS[way](net)
        x = array(np.full((2, 2), 200.0, np.float32))
        overflow = locate_overflow(net, Batch(x, None, lambda out, _: out.sum()))
    assert overflow.what == f"what {name} returned"


def test_each_operator_is_observed_once():
    def observed(array):
        net, names = without_dropout(made("cast float16")), []

        def note(seen):
            if seen.kind == "operator":
                names.append((seen.block.name, seen.operator, seen.array.shape))

        observed_batch(net, batch_of(array), note, operators=True)
        return names

    in_nd, in_np = in_both(observed)
    same = {"_np_dot": "dot", "_mul_scalar": "broadcast_mul"}
    assert [(block, same.get(name, name), shape) for block, name, shape in in_np] == [
        (block, same.get(name, name), shape) for block, name, shape in in_nd
    ]


@CASTS
def test_the_errors_of_each_layer_are_the_same(way):
    def compared(array):
        net, batch = without_dropout(made(way)), batch_of(array)
        comparison = compare_with_fp32(net, batch, loss_scale=128)
        suggestion = suggest_keep_fp32(net, batch, limit=2.0**-13, at_most=2)
        layers = [
            (one.block.name, one.output, one.introduced, one.gradient) for one in comparison.layers
        ]
        return str(comparison), layers, str(suggestion), suggestion.error_after

    in_nd, in_np = in_both(compared)
    assert in_np == in_nd
    assert "both_dense0" in in_np[0]


@CASTS
def test_checks_of_network_and_training_are_the_same(way):
    def checked(array):
        net = made(way)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"multi_precision": True})
        report = check_training(net, trainer, array(np.arange(4), dtype="float16"))
        return str(check_network(net, (4, 3, 8, 8))), str(report)

    in_nd, in_np = in_both(checked)
    assert in_np == in_nd


def test_a_number_too_large_for_float16_is_found_in_the_code():
    class Masks(gluon.HybridBlock):
        def hybrid_forward(self, F, x):
            return x * 1.0 - 1e18

    def checked(_):
        net = cast_net(Masks(prefix="masks_"))
        dense = gluon.nn.HybridSequential(prefix="")
        dense.add(gluon.nn.Dense(3, in_units=4), net)
        dense.initialize()
        mpgluon.restore(net)
        mpgluon.cast_block(dense)
        return str(check_network(dense, (2, 4)))

    in_nd, in_np = in_both(checked)
    assert in_np == in_nd
    assert "broadcast_sub in masks computes with 1e+18" in in_np


def test_products_and_their_sizes_are_the_same():
    def reported(_):
        return str(alignment_report(made(), (4, 3, 8, 8)))

    in_nd, in_np = in_both(reported)
    assert in_np.replace("_np_dot", "dot").split() == in_nd.split()
    assert "_np_dot" in in_np


@pytest.mark.parametrize(
    ("way", "hybridize"),  # a graph in native bfloat16 stays in it from other layers to others
    [("cast float16", False), ("cast float16", True), ("autocast bfloat16", False)],
)
def test_a_training_is_watched_to_the_same_end(way, hybridize):
    def watched(array):
        net = without_dropout(made(way, hybridize))
        options = {"learning_rate": 0.05, "multi_precision": True}
        trainer = gluon.Trainer(net.collect_params(), "sgd", options)
        amp.init_trainer(trainer, mpgluon.DynamicLossScale(2.0**10))
        locator, recorder = OverflowLocator(net, trainer), ExponentRecorder(trainer, every=1)
        for step in range(3):
            batch = batch_of(array, 2.0**126 if step == 1 else 1.0)
            with autograd.record():
                loss = batch.loss_fn(net(batch.inputs), batch.labels)
                with amp.scale_loss(loss, trainer) as scaled:
                    autograd.backward(scaled)
            trainer.step(4)
            recorder.after_step()
        samples = [
            (s.weights.counts.tolist(), s.gradients.counts.tolist()) for s in recorder.samples
        ]
        return str(locator.report), samples, amp.skipped_steps(trainer)

    in_nd, in_np = in_both(watched)
    assert (in_np, in_np[2]) == (in_nd, 1)
    assert "both_" in in_np[0]


def test_products_of_any_dimensions_are_counted():
    class Multiplies(gluon.HybridBlock):
        def hybrid_forward(self, F, x):
            many = F.np.ones((5, 4, 3))
            return F.np.matmul(x, many), F.np.dot(x[0], many), F.np.dot(2 * x, F.np.ones(()))

    with interface(in_numpy=True):
        products = alignment_report(Multiplies(), (2, 4)).products
    sizes = [(p.batch, p.inputs, p.outputs, p.repeats) for p in products]
    assert sizes == [(2, 4, 3, 5), (1, 4, 15, 1)]


def recorded(array, folder, hybridize):
    """Record a step that overflows, and return its path and the gradients of the run."""
    net = made("cast float16", hybridize)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"multi_precision": True})
    amp.init_trainer(trainer, mpgluon.DynamicLossScale(2.0**10))
    recorder = FlightRecorder(net, trainer, folder, network="interfaces:made")
    batch = batch_of(array, 2.0**126)
    with recorder.step(batch.inputs, batch.labels):
        backward_from(lambda: batch.loss_fn(net(batch.inputs), batch.labels), trainer)
        trainer.step(4)
    assert amp.skipped_steps(trainer) == 1
    (path,) = folder.iterdir()
    return path


@BOTH
def test_a_recorded_step_is_replayed_with_the_same_bits_wherever_it_is_read(hybridize, tmp_path):
    with interface(in_numpy=True) as array:
        path = recorded(array, tmp_path / "np", hybridize)
        inside = replay(path, cures=False)
    outside = replay(path, cures=not hybridize)  # which switches the interface on
    assert not mx.util.is_np_array()
    assert not mx.util.is_np_shape()
    assert inside.same_bits
    assert outside.same_bits
    assert bool(outside.cures) != hybridize
    in_nd = replay(recorded(mx.nd.array, tmp_path / "nd", hybridize), cures=not hybridize)
    assert in_nd.same_bits
    assert (outside.layer, str(outside.overflow)) == (in_nd.layer, str(in_nd.overflow))
    assert [(c.name, c.saves) for c in outside.cures] == [(c.name, c.saves) for c in in_nd.cures]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_command_replays_a_step_of_the_numpy_interface(tmp_path):
    with interface(in_numpy=True) as array:
        path = recorded(array, tmp_path, hybridize=False)
    code = "from mpgluon_tools.commands import main; import sys; sys.exit(main(sys.argv[1:]))"
    process = run_python(code, "replay", path, cwd=Path(__file__).parents[1])  # of interfaces.py
    assert "the same bits in all" in process.stdout, process.stderr
