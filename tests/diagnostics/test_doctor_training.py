"""The doctor's look at networks, Trainers and labels with planted faults."""

from __future__ import annotations

import warnings

from mpgluon import Policy, amp, cast_block, restore
from mpgluon.kernels.bfloat16 import has_native_bfloat16
from mpgluon_tools.diagnostics.doctor import check_training

import mxnet as mx
import numpy as np
import pytest
from helpers import autocast_net, backward_from, cast_net, in_sequence, initialized, run_python
from mxnet import gluon
from mxnet.base import MXNetError
from mxnet.contrib.amp.loss_scaler import LossScaler
from mxnet.gluon import nn

TWO = [mx.cpu(0), mx.cpu(1)]
GPU = mx.gpu()


def uninitialized_cast(ctx):
    """Return a network after ``net.cast``, whose parameters are on no device yet."""
    net = in_sequence(*(nn.Dense(2, use_bias=False, prefix=f"{name}_") for name in "abcd"))
    net.initialize(ctx=ctx)
    net.cast("float16")
    return net


def synchronized(count, cast=cast_block, devices=()):
    net = in_sequence(
        gluon.contrib.nn.SyncBatchNorm(in_channels=2, num_devices=count, prefix="s_"),
        nn.Dense(2, in_units=2),
    )
    if devices:
        net.initialize(ctx=devices)
    cast(net)
    return net


def trained(policy="float16", optimizer="sgd", multi_precision=True, scaler=None, cast=cast_block):
    """Return a network and its Trainer, which asks ``scaler`` whether to skip a step."""
    net = small_network()
    cast(net, policy) if cast is cast_block else cast(net)
    trainer = trainer_of(net, optimizer, multi_precision)
    if scaler is not None:
        trainer._amp_loss_scaler = scaler
    return net, trainer


def test_a_plain_network_that_shares_parameters_with_a_cast_one_is_an_error_that_names_both():
    cast = nn.Dense(2, in_units=2, prefix="cast_")
    plain = nn.HybridSequential(prefix="plain_")
    plain.add(nn.Dense(2, in_units=2, prefix="layer_", params=cast.collect_params()))
    cast.initialize()
    amp.autocast(cast)
    assert "sharing" not in problems(check_training(plain))
    restore(cast)
    cast_block(cast)
    (found,) = check_training(plain).at_level("error")
    assert all(name in found.what for name in ("plain", "cast_weight", "float16"))
    with pytest.raises(MXNetError):
        plain(mx.nd.ones((1, 2))).wait_to_read()
    cast_block(plain)
    assert "sharing" not in problems(check_training(plain))
    assert plain(mx.nd.ones((1, 2))).shape == (1, 2)


def plainly(net):
    net.cast("float16")


def cast_head(operator):
    return cast_net(initialized(in_sequence(nn.Dense(4, in_units=4), nn.HybridLambda(operator))))


def test_a_network_without_values_is_looked_at_too():
    (finding,) = check_training(nn.Dense(3)).findings
    assert finding.what == "nothing is in 16 bits"


class MyScaler:
    """An object that a Trainer can ask."""


TRAININGS = {
    "net.cast on a GPU": (lambda: check_training(uninitialized_cast(GPU)),
        ("cast", "warning", "a_weight, b_weight, c_weight and 1 more", "softmax", "cast_bl")),
    "net.cast on a CPU": (lambda: check_training(uninitialized_cast(mx.cpu())),
        ("cast", "error", "cast_block did not make", "refuses float16 convolutions", "float32")),
    "cast_block": (lambda: check_training(trained()[0]),
        ("cast", "ok", "computation float16, result float32", "", "")),
    "FP32": (lambda: check_training(small_network()),
        ("cast", "note", "nothing is in 16 bits", "FP32", "cast_")),
    "SyncBatchNorm after net.cast": (lambda: check_training(synchronized(1, plainly, TWO[:1])),
        ("SyncBatchNorm", "error", "s in a network", "data type do not match", "cast_block")),
    "SyncBatchNorm over too many": (lambda: check_training(synchronized(2, devices=TWO[:1])),
        ("SyncBatchNorm", "error", "num_devices=2, the network is on 1", "forever", "devices=1")),
    "SyncBatchNorm over too few": (lambda: check_training(synchronized(1, devices=TWO)),
        ("SyncBatchNorm", "error", "num_devices=1, the network is on 2", "not sync", "devices=2")),
    "SyncBatchNorm": (lambda: check_training(synchronized(1, devices=TWO[:1])),
        ("SyncBatchNorm", "ok", "s over 1", "", "")),
    "SyncBatchNorm over two": (lambda: check_training(synchronized(2, devices=TWO)),
        ("SyncBatchNorm", "ok", "s over 2", "", "")),
    "SyncBatchNorm before initialization": (lambda: check_training(synchronized(4)),
        ("SyncBatchNorm", "ok", "s", "", "")),
    "float16 logits by net.cast": (lambda: check_training(trained(cast=plainly)[0]),
        ("logits", "warning", "unless", "65504", "cast_block")),
    "float16 logits by policy": (
        lambda: check_training(trained(Policy("float16", "float16", "float16"))[0]),
        ("logits", "warning", "returns float16", "exponentials", 'output_dtype="float32"'),
    ),
    "Adam without masters": (
        lambda: check_training(*trained(optimizer="adam", multi_precision=False)),
        ("masters", "error", "Adam updates 4", "epsilon=1e-08 is 0", "multi_precision=True"),
    ),
    "SGD without masters": (lambda: check_training(*trained(multi_precision=False)),
        ("masters", "warning", "SGD updates 4", "are lost", "multi_precision=True")),
    "masters": (lambda: check_training(*trained()), ("masters", "ok", "4 float16 weights", "", "")),
    "contrib.amp's loss scale": (lambda: check_training(*trained(scaler=LossScaler())),
        ("loss scale", "error", "contrib.amp", "first device only", "from mpgluon import amp")),
    "no loss scale": (lambda: check_training(*trained(cast=plainly)),
        ("loss scale", "warning", "no loss scale", "2^-25 become 0", "amp.init_trainer")),
    "no loss scale in bfloat16": (lambda: check_training(*trained("mixed_bfloat16")),
        ("loss scale", "ok", "none is needed", "", "")),
    "another loss scale": (lambda: check_training(*trained(scaler=MyScaler())),
        ("loss scale", "note", "MyScaler", "neither", "init_trainer")),
    "an operator with a gradient of its own, and no Trainer yet": (
        lambda: check_training(cast_head("SVMOutput")),
        ("own gradient", "error", "ignores the gradient", "no loss scale reaches", '"none"'),
    ),
    "updates in the kvstore": (
        lambda: check_training(
            trainer=gluon.Trainer(cast_head("relu").collect_params(), "sgd", update_on_kvstore=True)
        ),
        ("kvstore", "error", "inside its kvstore", "skipped", "update_on_kvstore=False"),
    ),
    "float16 labels": (
        lambda: check_training(labels=[np.array([5000]), np.array([2047], np.float16)]),
        ("labels", "warning", "float16, the largest 2047", "2048 only", "int32"),
    ),
    "float16 labels that are wrong": (
        lambda: check_training(labels=[np.array([v], np.float16) for v in (3, 2048)]),
        ("labels", "error", "float16, the largest 2048", "2049 has become 2048", "int32"),
    ),
    "float16 labels, of which there are none": (
        lambda: check_training(labels=np.zeros(0, np.float16)),
        ("labels", "warning", "float16", "", "int32"),
    ),
    "labels": (lambda: check_training(labels=[np.array([1], d) for d in (np.int32, np.float32)]),
        ("labels", "ok", "float32, int32", "", "")),
}  # fmt: skip


@pytest.mark.parametrize("case", TRAININGS)
def test_each_training_gets_its_finding(case):
    check, (topic, level, *words) = TRAININGS[case]
    findings = check().findings
    matching = [f for f in findings if (f.topic, f.level) == (topic, level)]
    assert len(matching) == 1, findings
    for text, word in zip((matching[0].what, matching[0].why, matching[0].fix), words):
        assert word in text


def small_network(ctx=None):
    net = in_sequence(nn.Conv2D(4, 3, in_channels=3), nn.BatchNorm(in_channels=4), nn.Dense(5))
    net.initialize(ctx=ctx)
    return net


def trainer_of(net, optimizer="sgd", multi_precision=True, learning_rate=0.01, **options):
    arguments = {"multi_precision": multi_precision, "learning_rate": learning_rate}
    return gluon.Trainer(net.collect_params(), optimizer, arguments, **options)


def problems(report):
    """Return the levels of findings that are not "ok", by topic."""
    return {f.topic: f.level for f in report.findings if f.level != "ok"}


@pytest.mark.parametrize("cast", [cast_block, lambda net: amp.autocast(net, "float16")])
def test_a_network_prepared_as_in_the_readme_has_nothing(cast):
    net = small_network()
    cast(net)
    trainer = trainer_of(net)
    amp.init_trainer(trainer)
    assert problems(check_training(net, trainer, mx.nd.array([1, 2], dtype="int32"))) == {}
    backward_from(lambda: net(mx.nd.ones((2, 3, 8, 8))).sum(), trainer)
    trainer.step(2)
    assert problems(check_training(net, trainer)) == {}


def test_adam_without_masters_does_become_nan():
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
    net = cast_net(small_network())
    trainer = gluon.Trainer(net.collect_params(), optimizer, options)
    assert problems(check_training(net, trainer))["masters"] == level


def test_a_batchnorm_forced_to_float16_is_found_and_does_fail():
    net = cast_net(small_network())
    gluon.Parameter.cast(net[1].gamma, "float16")  # its own ``cast`` refuses
    report = check_training(net)
    assert problems(report) == {"BatchNorm": "error"}
    assert net[1].name in report.at_level("error")[0].what
    lone = initialized(nn.BatchNorm(in_channels=2))
    for parameter in lone.collect_params().values():
        parameter.cast("float16")
    with pytest.raises(mx.base.MXNetError, match=r"Expected 'float32' v\.s\. given 'float16'"):
        lone(mx.nd.ones((1, 2, 2, 2), dtype="float16"))


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


def test_a_trainer_from_before_the_cast_lacks_a_loss_scale_alone():
    net = small_network()
    trainer = trainer_of(net)
    cast_block(net)
    assert problems(check_training(net, trainer)) == {"loss scale": "warning"}
    amp.init_trainer(trainer)
    assert problems(check_training(net, trainer)) == {}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_loss_scale_of_none_is_a_warning_in_float16_only(dtype):
    net = autocast_net(small_network(), dtype)
    trainer = trainer_of(net)
    amp.init_trainer(trainer, "none")
    in_bfloat16 = {} if has_native_bfloat16() else {"speed": "note"}
    expected = {"loss scale": "warning"} if dtype == "float16" else in_bfloat16
    assert problems(check_training(net, trainer)) == expected


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
    net = initialized(nn.Dense(2, in_units=3), ctx=devices)
    trainer = trainer_of(net, **options)
    cast_block(net)
    assert ("kvstore" in problems(check_training(net, trainer))) == expected
    restore(net)
    plain = trainer_of(net, **options)
    backward_from(lambda: [net(mx.nd.ones((1, 3), ctx=ctx)) for ctx in devices])
    plain.step(1)
    assert bool(plain._update_on_kvstore) == expected  # the Trainer's own decision
    assert problems(check_training(net, plain)) == {"cast": "note"}


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
    net = initialized(in_sequence(nn.Dense(4, in_units=4), make()))
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


@pytest.mark.slow
@pytest.mark.multiprocess
def test_contrib_amp_that_was_initialized_is_found():
    code = """
import mpgluon
from mxnet.gluon import nn
from mpgluon_tools.diagnostics.doctor import check_training
net = nn.Dense(2, in_units=3)
net.initialize()
from mxnet.contrib import amp
print([f.topic for f in check_training(net).at_level("error")])
amp.init()
print([f.topic for f in check_training(net).at_level("error")])
"""
    done = run_python(code)
    assert done.stdout.splitlines() == ["[]", "['contrib.amp']"], done.stderr
