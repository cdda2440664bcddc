"""One loop for every format: what ``prepare`` makes of a network, and that FP32 stays plain."""

import mpgluon
from mpgluon import NoLossScale, Policy, PrecisionError, amp
from mpgluon.formats.policy import as_policy

import mxnet as mx
import numpy as np
import pytest
from helpers import assert_same_bits, parameters_of
from mxnet import autograd, gluon
from mxnet.gluon import nn

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
FORMATS = ["float32", "fp32", "float16", "fp16", np.float16, "mixed_float16", "bfloat16", "bf16",
           "mixed_bfloat16", "mixed_float8", Policy.parse("compute=float16")]  # fmt: skip


def make_net():
    mx.random.seed(0)
    net = nn.HybridSequential()
    net.add(*(nn.Conv2D(4, 3, in_channels=2), nn.BatchNorm(in_channels=4)))
    net.add(*(nn.Activation("relu"), nn.Dense(8, in_units=64), nn.Dense(3, in_units=8)))
    net.initialize(mx.init.Xavier())
    return net


def batches(count):
    random = np.random.RandomState(0)
    for _ in range(count):
        yield mx.nd.array(random.randn(6, 2, 6, 6)), mx.nd.array(random.randint(0, 3, 6))


def train(net, trainer, steps=6):
    losses = []
    for images, labels in batches(steps):
        with autograd.record():
            loss = LOSS(net(images), labels)
        with amp.scale_loss(loss, trainer) as scaled_loss:  # where backward of a plain loop stands
            scaled_loss.backward()
        amp.clip_global_norm(trainer, 100.0, len(labels))
        trainer.step(len(labels))
        losses.append(float(loss.mean().asscalar()))
    return losses


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:Accumulating with float16")  # MXNet, of weights without masters
@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_one_loop_trains_in_every_format(dtype, masters):
    net, policy = make_net(), as_policy(dtype)
    update = "stochastic" if policy.param_dtype == "bfloat16" and not masters else "nearest"
    trainer = mpgluon.prepare(
        net, dtype, "sgd", {"learning_rate": 0.2}, masters=masters, update_rounding=update
    )
    losses = train(net, trainer, steps=20)
    assert np.isfinite(losses[-1])
    assert np.dtype(net[3].weight.dtype) == np.dtype(
        "float16" if policy.param_dtype == "float16" else "float32"
    )
    assert trainer.optimizer.multi_precision == (masters and policy.param_dtype != "float32")
    assert (amp.loss_scale(trainer) > 1) == (policy.compute_dtype == "float16")


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_in_float32_the_loop_has_the_bits_of_plain_gluon(name):
    net, plain = make_net(), make_net()
    trainer = mpgluon.prepare(net, "float32", name, {"learning_rate": 0.1})
    stock = gluon.Trainer(plain.collect_params(), name, {"learning_rate": 0.1})
    train(net, trainer)
    for images, labels in batches(6):
        with autograd.record():
            loss = LOSS(plain(images), labels)
        loss.backward()
        gradients = [p.grad() for p in plain.collect_params().values() if p.grad_req != "null"]
        assert gluon.utils.clip_global_norm(gradients, 1e9) < 100 * len(labels)
        stock.step(len(labels))
    assert_same_bits(parameters_of(net), parameters_of(plain))
    assert isinstance(trainer._amp_loss_scaler.loss_scale, NoLossScale)
    assert (amp.loss_scale(trainer), amp.skipped_steps(trainer)) == (1, 0)
    assert not amp.step_was_skipped(trainer)


def test_arguments_of_prepare_are_kept():
    net, scale = make_net(), mpgluon.DynamicLossScale(2.0**9)
    trainer = mpgluon.prepare(
        net, "fp16", "nag", {"momentum": 0.9, "multi_precision": False}, loss_scale=scale,
        keep_fp32=[net[4]], params=net[3].collect_params(), kvstore=None,
    )  # fmt: skip
    assert not trainer.optimizer.multi_precision
    assert amp.loss_scale(trainer) == 2.0**9
    assert np.dtype(net[4].weight.dtype) == np.float32
    assert len(trainer._params) == 2
    sgd = mx.optimizer.create("sgd")
    assert mpgluon.prepare(make_net(), "fp16", sgd).optimizer.multi_precision


def test_a_network_that_is_cast_and_formats_that_do_not_exist_are_refused():
    for made in ("float16", "mixed_bfloat16"):
        net = make_net()
        mpgluon.prepare(net, made, "sgd")
        for asked in ("fp16", "fp32"):
            with pytest.raises(PrecisionError, match="is already cast"):
                mpgluon.prepare(net, asked, "sgd")
    net = make_net()
    net.cast("float16")
    with pytest.raises(PrecisionError, match=r"_weight is float16, and FP32 was asked for; call"):
        mpgluon.prepare(net, "fp32", "sgd")
    with pytest.raises(ValueError, match=r"received 'fp17', .* did you mean 'fp16'"):
        mpgluon.prepare(make_net(), "fp17", "sgd")
    with pytest.raises(ValueError, match="has no parameters to train"):
        mpgluon.prepare(nn.HybridSequential(), "fp32", "sgd")


def test_a_loss_is_scaled_inside_and_behind_the_recorded_block_to_the_same_bits():
    weights = []
    for inside in (True, False):
        net = make_net()
        trainer = mpgluon.prepare(net, "fp16", "sgd", {"learning_rate": 0.2})
        for images, labels in batches(3):
            with autograd.record():
                loss = LOSS(net(images), labels)
                if inside:
                    with amp.scale_loss(loss, trainer) as scaled_loss:
                        scaled_loss.backward()
            if not inside:
                with amp.scale_loss(loss, trainer) as scaled_loss:
                    scaled_loss.backward()
            trainer.step(len(labels))
        weights.append(parameters_of(net))
    assert_same_bits(*weights)
