"""The doctor's look at networks, Trainers and labels: made-up ones, and planted faults."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace

from mpgluon import Policy, amp, cast_block, restore
from mpgluon.diagnostics.doctor import check_training
from mpgluon.diagnostics.doctor.network import LabelFacts, TrainerFacts, TrainingFacts
from mpgluon.diagnostics.doctor.training import training
from mpgluon.kernels.bfloat16 import has_native_bfloat16

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

CAST = TrainingFacts(
    policy=Policy.parse("float16"), device_types=frozenset({"gpu"}), devices=1, labels=()
)
PLAIN = TrainingFacts(plainly_cast=("a", "b", "c", "d"), device_types=frozenset({"gpu"}), devices=1)
ADAM = TrainerFacts(
    optimizer="Adam",
    float16_weights=("w",),
    obstacle="its epsilon=1e-08 is 0 in float16",
    multi_precision=False,
)

TRAININGS = {
    "net.cast on a GPU": (PLAIN, ("cast", "warning", "a, b, c and 1 more", "softmax", "cast_bl")),
    "net.cast on a CPU": (replace(PLAIN, device_types=frozenset({"cpu"})),
        ("cast", "error", "cast_block did not make", "refuses float16 convolutions", "float32")),
    "cast_block": (CAST, ("cast", "ok", "computation float16, result float32", "", "")),
    "FP32": (TrainingFacts(devices=1), ("cast", "note", "nothing is in 16 bits", "FP32", "cast_")),
    "a float16 BatchNorm": (replace(CAST, float16_batch_norms=("bn",)),
        ("BatchNorm", "error", "bn", "FP32 ones only", 'p.cast("float32")')),
    "SyncBatchNorm after net.cast": (replace(PLAIN, sync_batch_norms=(("s", 1),)),
        ("SyncBatchNorm", "error", "s in a network", "data type do not match", "cast_block")),
    "SyncBatchNorm over too many": (replace(CAST, sync_batch_norms=(("s", 2),)),
        ("SyncBatchNorm", "error", "num_devices=2, the network is on 1", "forever", "devices=1")),
    "SyncBatchNorm over too few": (replace(CAST, sync_batch_norms=(("s", 1),), devices=2),
        ("SyncBatchNorm", "error", "num_devices=1, the network is on 2", "not sync", "devices=2")),
    "SyncBatchNorm": (replace(CAST, sync_batch_norms=(("s", 1),)),
        ("SyncBatchNorm", "ok", "s over 1", "", "")),
    "SyncBatchNorm before initialization": (replace(CAST, sync_batch_norms=(("s", 4),), devices=0),
        ("SyncBatchNorm", "ok", "s", "", "")),
    "float16 logits by net.cast": (PLAIN, ("logits", "warning", "unless", "65504", "cast_block")),
    "float16 logits by policy": (replace(CAST, policy=Policy("float16", "float16", "float16")),
        ("logits", "warning", "returns float16", "exponentials", 'output_dtype="float32"')),
    "Adam without masters": (replace(CAST, trainer=ADAM),
        ("masters", "error", "Adam updates 1", "epsilon=1e-08 is 0", "multi_precision=True")),
    "SGD without masters": (replace(CAST, trainer=replace(ADAM, optimizer="SGD", obstacle=None)),
        ("masters", "warning", "SGD updates 1", "are lost", "multi_precision=True")),
    "a Trainer from before the cast": (
        replace(CAST, trainer=replace(ADAM, multi_precision=True, keeps_masters=False)),
        ("masters", "warning", "before the network was cast", "rounded already", "init_trainer")),
    "masters": (replace(CAST, trainer=replace(ADAM, multi_precision=True)),
        ("masters", "ok", "1 float16 weights", "", "")),
    "contrib.amp's loss scale": (replace(CAST, trainer=TrainerFacts(scaler="contrib")),
        ("loss scale", "error", "contrib.amp", "first device only", "from mpgluon import amp")),
    "no loss scale": (replace(CAST, trainer=TrainerFacts(scaler="none")),
        ("loss scale", "warning", "none", "become 0", "amp.init_trainer")),
    "a loss scale of none": (replace(PLAIN, trainer=TrainerFacts(scaler="mpgluon, none")),
        ("loss scale", "warning", "none", "2^-25", "amp.init_trainer")),
    "no loss scale in bfloat16": (
        replace(CAST, policy=Policy.parse("mixed_bfloat16"), trainer=TrainerFacts(scaler="none")),
        ("loss scale", "ok", "none is needed", "", "")),
    "another loss scale": (replace(CAST, trainer=TrainerFacts(scaler="MyScaler")),
        ("loss scale", "note", "MyScaler", "neither", "init_trainer")),
    "a loss scale": (replace(CAST, trainer=TrainerFacts()),
        ("loss scale", "ok", "mpgluon's", "", "")),
    "an operator with a gradient of its own": (
        replace(CAST, own_gradients=(("head", "SVMOutput"),), trainer=TrainerFacts()),
        ("own gradient", "error", "SVMOutput in head", "refuses such a loss", "gluon.loss")),
    "an operator with a gradient of its own, and no Trainer yet": (
        replace(CAST, own_gradients=(("head", "SVMOutput"),)),
        ("own gradient", "error", "ignores the gradient", "no loss scale reaches", '"none"')),
    "updates in the kvstore": (replace(CAST, trainer=TrainerFacts(updates_in_kvstore=True)),
        ("kvstore", "error", "inside its kvstore", "skipped", "update_on_kvstore=False")),
    "contrib.amp initialized": (replace(CAST, contrib_initialized=True),
        ("contrib.amp", "error", "init() was called", "for good", "remove the call")),
    "float16 labels": (
        replace(CAST, labels=(LabelFacts("int32", 5000.0), LabelFacts("float16", 2047.0))),
        ("labels", "warning", "float16, the largest 2047", "2048 only", "int32")),
    "float16 labels that are wrong": (
        replace(CAST, labels=(LabelFacts("float16", 3.0), LabelFacts("float16", 2048.0))),
        ("labels", "error", "float16, the largest 2048", "2049 has become 2048", "int32")),
    "labels": (replace(CAST, labels=(LabelFacts("int32", 5000.0), LabelFacts("float32", 1.0))),
        ("labels", "ok", "float32, int32", "", "")),
}  # fmt: skip


@pytest.mark.parametrize("case", TRAININGS)
def test_each_training_gets_its_finding(case):
    facts, (topic, level, *words) = TRAININGS[case]
    findings = list(training(facts))
    matching = [f for f in findings if (f.topic, f.level) == (topic, level)]
    assert len(matching) == 1, findings
    for text, word in zip((matching[0].what, matching[0].why, matching[0].fix), words):
        assert word in text


# --- training: real networks -------------------------------------------------------------------


def small_network(ctx=None):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3, in_channels=3), nn.BatchNorm(in_channels=4), nn.Dense(5))
    net.initialize(ctx=ctx)
    return net


def trainer_of(net, optimizer="sgd", multi_precision=True, learning_rate=0.01, **options):
    arguments = {"multi_precision": multi_precision, "learning_rate": learning_rate}
    return gluon.Trainer(net.collect_params(), optimizer, arguments, **options)


def problems(report):
    """Return what is not right, by topic."""
    return {f.topic: f.level for f in report.findings if f.level != "ok"}


@pytest.mark.parametrize("cast", [cast_block, lambda net: amp.autocast(net, "float16")])
def test_a_network_prepared_as_in_the_readme_has_nothing(cast):
    net = small_network()
    cast(net)
    trainer = trainer_of(net)
    amp.init_trainer(trainer)
    report = check_training(net, trainer, mx.nd.array([1, 2], dtype="int32"))
    assert problems(report) == {}
    with autograd.record():
        loss = net(mx.nd.ones((2, 3, 8, 8))).sum()
        with amp.scale_loss(loss, trainer) as scaled:
            scaled.backward()
    trainer.step(2)
    assert problems(check_training(net, trainer)) == {}


def test_adam_without_masters_is_found_and_does_become_nan():
    net = small_network()
    cast_block(net)
    trainer = trainer_of(net, "adam", multi_precision=False)
    report = check_training(net, trainer)
    assert "epsilon=1e-08 is 0 in float16" in str(report)
    assert "4 float16 weights" in str(report)  # weight and bias of two layers
    updater = mx.optimizer.get_updater(mx.optimizer.create("adam"))
    weight = mx.nd.ones((3,), dtype="float16")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accumulating with float16 in optimizer")
        updater([0], [mx.nd.zeros((3,), dtype="float16")], [weight])
    assert np.isnan(weight.asnumpy()).all()


@pytest.mark.parametrize(
    ("optimizer", "options", "level"),
    [
        *((name, {}, "warning") for name in ("sgd", "lamb")),
        *((name, {}, "error") for name in ("adam", "nadam", "ftml", "adagrad", "rmsprop")),
        ("adam", {"epsilon": 1e-3}, "warning"),
    ],
)
def test_an_optimizer_without_masters_is_an_error_if_it_cannot_work_in_float16(
    optimizer, options, level
):
    net = small_network()
    cast_block(net)
    trainer = gluon.Trainer(net.collect_params(), optimizer, options)
    assert problems(check_training(net, trainer))["masters"] == level


def test_a_batchnorm_forced_to_float16_is_found_and_does_fail():
    net = small_network()
    cast_block(net)
    net[1].gamma.cast("float16")
    report = check_training(net)
    assert problems(report) == {"BatchNorm": "error"}
    assert net[1].name in report.at_level("error")[0].what
    lone = nn.BatchNorm(in_channels=2)
    lone.initialize()
    for parameter in lone.collect_params().values():
        parameter.cast("float16")
    with pytest.raises(mx.base.MXNetError, match=r"Expected 'float32' v\.s\. given 'float16'"):
        lone(mx.nd.ones((1, 2, 2, 2), dtype="float16"))


def test_labels_in_float16_are_found():
    labels = np.array([1, 2049])
    assert labels.astype(np.float16)[1] == 2048
    net = small_network()
    cast_block(net)
    assert problems(check_training(net, labels=mx.nd.array(labels, dtype="float16"))) == {
        "labels": "error"
    }
    two_devices = [mx.nd.array([1], dtype="int32"), np.array([2], np.float16)]
    assert problems(check_training(net, labels=two_devices)) == {"labels": "warning"}
    assert problems(check_training(labels=np.zeros(0, np.float16))) == {"labels": "warning"}
    assert problems(check_training(labels=labels)) == {}


def test_a_network_of_plain_cast_is_found_and_does_fail_on_a_cpu():
    net = small_network()
    net.cast("float16")
    trainer = trainer_of(net)
    assert problems(check_training(net, trainer)) == {
        "cast": "error",
        "logits": "warning",
        "loss scale": "warning",
    }
    with pytest.raises(mx.base.MXNetError, match="FP16 gemm on cpu not implemented"):
        net(mx.nd.ones((1, 3, 8, 8), dtype="float16")).wait_to_read()


def test_a_trainer_from_before_the_cast_is_found_until_init_trainer():
    net = small_network()
    trainer = trainer_of(net)
    cast_block(net)
    assert problems(check_training(net, trainer)) == {"masters": "warning", "loss scale": "warning"}
    amp.init_trainer(trainer)
    assert problems(check_training(net, trainer)) == {}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_loss_scale_of_none_is_a_warning_in_float16_only(dtype):
    net = small_network()
    amp.autocast(net, dtype)
    trainer = trainer_of(net)
    amp.init_trainer(trainer, "none")
    in_bfloat16 = {} if has_native_bfloat16() else {"speed": "note"}
    expected = {"loss scale": "warning"} if dtype == "float16" else in_bfloat16
    assert problems(check_training(net, trainer)) == expected


TWO = [mx.cpu(0), mx.cpu(1)]


@pytest.mark.parametrize(
    ("devices", "options", "expected"),
    [
        (TWO, {}, True),
        (TWO, {"update_on_kvstore": False}, False),
        (TWO, {"kvstore": None}, False),
        (TWO[:1], {}, False),
        (TWO, {"update_on_kvstore": True}, True),
    ],
)
def test_updates_in_the_kvstore_are_foreseen_before_the_first_step(devices, options, expected):
    net = nn.Dense(2, in_units=3)
    net.initialize(ctx=devices)
    trainer = trainer_of(net, **options)
    cast_block(net)
    assert ("kvstore" in problems(check_training(net, trainer))) == expected
    restore(net)
    plain = trainer_of(net, **options)
    with autograd.record():
        losses = [net(mx.nd.ones((1, 3), ctx=ctx)) for ctx in devices]
    autograd.backward(losses)
    plain.step(1)
    assert bool(plain._update_on_kvstore) == expected  # what the Trainer itself came to
    assert problems(check_training(net, plain)) == {"cast": "note"}


@pytest.mark.parametrize(
    ("count", "devices", "right"),
    [(1, TWO[:1], True), (2, TWO, True), (1, TWO, False), (3, TWO, False)],
)
def test_a_syncbatchnorm_for_other_devices_is_an_error(count, devices, right):
    net = nn.HybridSequential()
    net.add(gluon.contrib.nn.SyncBatchNorm(in_channels=2, num_devices=count))
    net.initialize(ctx=devices)
    cast_block(net)
    assert problems(check_training(net)) == ({} if right else {"SyncBatchNorm": "error"})


class Head(nn.HybridBlock):
    """Ends in an operator that is output and loss in one."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(3, in_units=4)

    def hybrid_forward(self, F, x, labels):
        return F.SoftmaxOutput(self.dense(x), labels)


def imported_graph():
    data, labels = (mx.sym.var(name, dtype="float32") for name in ("data", "labels"))
    scores = mx.sym.FullyConnected(data, num_hidden=3, name="scores")
    return gluon.SymbolBlock(mx.sym.LogisticRegressionOutput(scores, labels), [data, labels])


@pytest.mark.parametrize(
    ("make", "reached"),
    [
        (lambda: Head(), True),
        (lambda: nn.HybridLambda("MAERegressionOutput"), True),
        (lambda: nn.HybridLambda(lambda F, x, y: F.SVMOutput(x, y)), False),
        (imported_graph, False),
    ],
    ids=["in code", "by name", "in a function", "in a graph"],
)
@pytest.mark.parametrize("hybridize", [False, True])
def test_an_operator_whose_gradient_no_loss_scale_reaches_is_found_wherever_it_stands(
    make, reached, hybridize
):
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=4), make())
    net.initialize()
    net.hybridize(hybridize)
    trainer = trainer_of(net)
    assert "own gradient" not in problems(check_training(net, trainer))
    amp.init_trainer(trainer, "none")
    assert "own gradient" not in problems(check_training(net, trainer))
    trainer = trainer_of(net)
    amp.init_trainer(trainer)
    level = None if reached and not hybridize else "error"
    assert problems(check_training(net, trainer)).get("own gradient") == level
    assert "own gradient" not in problems(check_training(net[0], trainer))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "received none"),
        ({"net": "net"}, TypeError, r"net must be a gluon\.Block, received str"),
        ({"trainer": mx.optimizer.SGD()}, TypeError, r"trainer must be a gluon\.Trainer, .* SGD"),
        ({"labels": [1, 2]}, TypeError, r"labels must be NDArrays or NumPy arrays, .* int"),
    ],
)
def test_other_kinds_of_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        check_training(**arguments)


@pytest.mark.multiprocess
def test_contrib_amp_that_was_initialized_is_found():
    code = """
import mpgluon
from mxnet.gluon import nn
from mpgluon.diagnostics.doctor import check_training
net = nn.Dense(2, in_units=3)
net.initialize()
from mxnet.contrib import amp
print([f.topic for f in check_training(net).at_level("error")])
amp.init()
print([f.topic for f in check_training(net).at_level("error")])
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["[]", "['contrib.amp']"], done.stderr
