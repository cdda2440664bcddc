"""What ``mxnet.contrib.amp`` 1.9.1 gets wrong in training, and mpgluon on the same scenario.

Each test has two parts: the defect, shown on MXNet's own code, and mpgluon. Should the first
part ever fail, MXNet was repaired and the test has served its time.
"""

from __future__ import annotations

import ast
import math
import textwrap
from pathlib import Path

from mpgluon import DynamicLossScale, amp, cast_block
from mpgluon.kernels.dtypes import cast
from mpgluon.trainer.step import state_of

import mxnet as mx
import numpy as np
import pytest
from helpers import run_python
from mxnet import autograd, gluon
from mxnet.contrib import amp as contrib_amp
from mxnet.contrib.amp.loss_scaler import LossScaler
from mxnet.gluon import nn

DEVICES = [mx.cpu(0), mx.cpu(1)]


class Contrib:
    """MXNet's names, with ``init_trainer`` as it is after ``amp.init()``, which patches MXNet."""

    scale_loss = staticmethod(contrib_amp.scale_loss)

    @staticmethod
    def init_trainer(trainer):
        trainer._amp_loss_scaler = LossScaler()
        trainer._amp_original_scale = trainer._scale

    @staticmethod
    def loss_scale(trainer):
        return trainer._amp_loss_scaler.loss_scale


def one_weight(dtype="float32", ctx=None, value=1.0, grad_req="write"):
    weight = gluon.Parameter("weight", shape=(1,), dtype=dtype, grad_req=grad_req)
    weight.initialize(mx.init.Constant(value), ctx=ctx)
    return weight


def make_trainer(weight, library, learning_rate=1.0, **options):
    arguments = {"learning_rate": learning_rate, "multi_precision": True}
    trainer = gluon.Trainer([weight], "sgd", arguments, **options)
    library.init_trainer(trainer)
    return trainer


def backward(weight, trainer, library, gradient):
    """Give ``weight`` S times ``gradient``, or one gradient for each device."""
    gradients = gradient if isinstance(gradient, list) else [gradient]
    with autograd.record():
        losses = [cast(one, "float32") * g for one, g in zip(weight.list_data(), gradients)]
        with library.scale_loss(losses, trainer) as scaled:
            autograd.backward(scaled)


def values(weight):
    return [one.asscalar() for one in weight.list_data()]


def train_step(net, trainer, images, library, factor=1.0):
    with autograd.record(), library.scale_loss(net(images).sum() * factor, trainer) as scaled:
        scaled.backward()
    trainer.step(len(images))


def test_contrib_amp_cannot_check_gradients_of_two_formats():
    def run(library):
        net = nn.HybridSequential()
        net.add(nn.Dense(2, in_units=3), nn.BatchNorm(in_channels=2))
        net.initialize()
        cast_block(net, "float16")
        assert net[0].weight.grad().dtype == np.float16
        assert net[1].gamma.grad().dtype == np.float32
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"multi_precision": True})
        library.init_trainer(trainer)
        train_step(net, trainer, mx.nd.array([[1, 2, 3], [3, 1, 2]]), library, 2.0**-12)
        return trainer

    with pytest.raises(mx.base.MXNetError, match="data type do not match specified type"):
        run(Contrib)
    assert not amp.step_was_skipped(run(amp))


def test_contrib_amp_backs_off_one_step_late():
    def run(library):
        weight = one_weight("float16", value=0.0)
        trainer = make_trainer(weight, library)
        scales, moved = [], []
        for _ in range(4):
            before = values(weight)
            scales.append(library.loss_scale(trainer))
            backward(weight, trainer, library, 1.5)  # 1.5 S is finite in float16 up to 2**15
            trainer.step(1)
            moved.append(values(weight) != before)
        return scales, moved

    scales, moved = run(Contrib)
    assert scales == [2**16, 2**16, 2**15, 2**14]  # a quarter, though 2**15 was fine
    assert moved == [False, False, True, True]  # two skips for one overflow
    scales, moved = run(amp)
    assert scales == [2**16, 2**15, 2**15, 2**15]
    assert moved == [False, True, True, True]


def test_contrib_amp_leaves_nan_in_the_running_statistics_of_a_network_that_overflowed():
    def run(library):
        net = nn.HybridSequential()
        net.add(nn.BatchNorm(in_channels=1), nn.Dense(1, in_units=1))
        net.initialize()
        trainer = gluon.Trainer(net.collect_params(), "sgd")
        library.init_trainer(trainer)
        for largest in (1.0, math.inf, 1.0):
            train_step(net, trainer, mx.nd.array([[0.0], [largest]]), library)
        assert np.isfinite(net[1].weight.data().asscalar())  # the step was skipped
        return net(mx.nd.zeros((1, 1))).asscalar()

    assert math.isnan(run(Contrib))
    assert math.isfinite(run(amp))


def test_contrib_amp_skips_nothing_on_several_devices():
    def run(library):
        weight = one_weight(ctx=DEVICES)
        trainer = make_trainer(weight, library)  # update_on_kvstore is left to MXNet
        backward(weight, trainer, library, [math.inf, 1.0])
        trainer.step(1)
        return values(weight)

    assert run(Contrib) == [-math.inf, -math.inf]
    assert run(amp) == [1, 1]


def test_contrib_amp_loses_gradients_by_dividing_them_in_float16():
    # 2**-26 is less than any float16 number; times the rate 2**10 it is 2**-16, which is one.
    rate, gradient = 2.0**10, 2.0**-26

    def prepare(library):
        weight = one_weight("float16", value=0.0)
        trainer = make_trainer(weight, library, rate)
        backward(weight, trainer, library, gradient)
        assert weight.grad().asscalar() == gradient * 2.0**16
        return weight, trainer

    weight, trainer = prepare(Contrib)
    contrib_amp.unscale(trainer)
    assert weight.grad().asscalar() == 0
    trainer.step(1)
    assert values(weight) == [0]
    weight, trainer = prepare(amp)
    trainer.step(1)
    assert values(weight) == [-rate * gradient]


def test_contrib_amp_has_no_floor_and_ends_in_a_division_by_zero():
    weight = one_weight()
    trainer = make_trainer(weight, Contrib)
    weight.grad()[:] = math.inf
    overflows = 0
    while Contrib.loss_scale(trainer) > 0:
        assert trainer._amp_loss_scaler.has_overflow([weight])
        overflows += 1
    # From 2**16 past the smallest float64, 2**-1074, each halving a step late.
    assert overflows == 16 + 1074 + 1 + 1
    with pytest.raises(ZeroDivisionError):
        backward(weight, trainer, Contrib, 1.0)

    weight = one_weight()
    trainer = make_trainer(weight, amp)
    for _ in range(overflows):
        backward(weight, trainer, amp, math.inf)
        trainer.step(1)
    assert amp.loss_scale(trainer) == 1
    backward(weight, trainer, amp, 1.0)
    trainer.step(1)
    assert values(weight) == [0]  # 1 - rate * gradient


def test_contrib_amp_neither_saves_nor_restores_its_scale():
    def after_an_overflow(library):
        weight = one_weight("float16")
        trainer = make_trainer(weight, library)
        for _ in range(2):  # contrib.amp needs a second step to act on the first
            backward(weight, trainer, library, 1.5)
            trainer.step(1)
        assert library.loss_scale(trainer) == 2.0**15
        return trainer

    after_an_overflow(Contrib)
    assert not hasattr(LossScaler, "state_dict")
    assert not hasattr(LossScaler, "load_state_dict")
    restarted = make_trainer(one_weight("float16"), Contrib)
    assert Contrib.loss_scale(restarted) == 2.0**16  # all that was learnt is gone

    saved = state_of(after_an_overflow(amp)).loss_scale.state_dict()
    restored = DynamicLossScale()
    restored.load_state_dict(saved)
    trainer = gluon.Trainer([one_weight("float16")], "sgd")
    amp.init_trainer(trainer, restored)
    assert amp.loss_scale(trainer) == 2.0**15


def test_contrib_amp_never_recovers_from_an_overflow_in_gradients_that_accumulate():
    def run(library):
        weight = one_weight(grad_req="add")
        trainer = make_trainer(weight, library)
        moved = []
        for gradient in (math.inf, 0.5, 0.5):
            before = values(weight)
            backward(weight, trainer, library, gradient)
            trainer.step(1)
            moved.append(values(weight) != before)
            if moved[-1]:
                weight.zero_grad()  # as after every update in plain Gluon
        return moved, values(weight)

    assert run(Contrib) == ([False, False, False], [1])
    assert run(amp) == ([False, True, True], [0])


IN_A_PROCESS_OF_ITS_OWN = """
    import mxnet as mx
    from mxnet.gluon import nn

    def functions():
        modules = (mx.nd, mx.sym, mx.nd.op, mx.sym.op)
        return [vars(module)[name] for module in modules for name in sorted(vars(module))
                if not name.startswith("__")]

    def plain_fp32_convolution():
        net = nn.Conv2D(1, 1, in_channels=1)
        net.initialize(mx.init.One())
        result = net(mx.nd.array([[[[1.0, 2.0]]]]))
        return result.dtype.__name__, result.asnumpy().ravel().tolist()

    before = functions()
    {use}
    print([a is b for a, b in zip(before, functions())].count(False) > 0)
    try:
        print(plain_fp32_convolution())
    except mx.base.MXNetError as error:
        print("gemm on cpu not implemented" in str(error))
"""
USE_CONTRIB = "from mxnet.contrib import amp; amp.init('float16')"
USE_MPGLUON = """
    from mpgluon import amp
    other = nn.Conv2D(1, 1, in_channels=1)
    other.initialize(mx.init.One())
    amp.autocast(other)
    amp.init_trainer(mx.gluon.Trainer(other.collect_params(), 'sgd'))
    assert other(mx.nd.array([[[[1.0, 2.0]]]])).asnumpy().tolist() == [[[[1.0, 2.0]]]]
"""


@pytest.mark.multiprocess
def test_contrib_amp_patches_mxnet_for_good_and_breaks_plain_fp32_convolution_on_the_cpu():
    def run(use):
        script = textwrap.dedent(IN_A_PROCESS_OF_ITS_OWN).format(use=textwrap.dedent(use))
        finished = run_python(script)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout.splitlines()

    patched, failed = run(USE_CONTRIB)
    assert (patched, failed) == ("True", "True")
    patched, result = run(USE_MPGLUON)
    assert (patched, result) == ("False", "('float32', [1.0, 2.0])")


def test_contrib_amp_has_no_tests_but_every_name_of_mpgluon_amp_is_called_in_this_suite():
    called = set()
    for path in Path(__file__).parent.rglob("test_*.py"):
        for test in ast.walk(ast.parse(path.read_text())):
            if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
                called |= {
                    node.func.attr
                    for node in ast.walk(test)
                    if isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and isinstance(node.func.value, ast.Name)
                    and node.func.value.id == "amp"
                }
    assert sorted(set(amp.__all__) - called) == []
