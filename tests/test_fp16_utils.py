"""Mixed precision by hand: equal, bit for bit, to the automatic kind."""

import mpgluon
from mpgluon import amp
from mpgluon.fp16_utils import (
    BN_convert_float,
    bn_to_float32,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
)

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

SCALE, BATCH_SIZE, STEPS = 128.0, 4, 5
ONE, TWO = [mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]
OPTIMIZERS = {
    "sgd": ("sgd", {"learning_rate": 0.1, "wd": 0.01}),
    "momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9}),
    "nag": ("nag", {"learning_rate": 0.1, "momentum": 0.9}),
    "adam": ("adam", {"learning_rate": 0.01}),
}
LOSS = gluon.loss.L2Loss()


def make_net(devices=ONE, *, cast=True):
    mx.random.seed(0)
    np.random.seed(0)
    net = nn.HybridSequential()
    net.add(nn.Dense(8, in_units=3, use_bias=False))
    net.add(nn.BatchNorm(in_channels=8), nn.Dense(2, in_units=8))
    net.initialize(mx.init.Normal(0.5), ctx=devices)
    if cast:
        mpgluon.cast_block(net)
    return net


def losses_of(net, devices, step):
    data = np.random.RandomState(step)
    batch = [mx.nd.array(data.randn(BATCH_SIZE, size)) for size in (3, 2)]
    parts = zip(*(gluon.utils.split_and_load(one, devices) for one in batch))
    return [LOSS(net(images), targets) for images, targets in parts]


def by_hand(optimizer, devices=ONE):
    net = make_net(devices)
    model_params, master_params = prep_param_lists(net)
    trainer = gluon.Trainer(master_params, *OPTIMIZERS[optimizer], update_on_kvstore=False)
    for step in range(STEPS):
        with autograd.record():
            losses = [loss * SCALE for loss in losses_of(net, devices, step)]
        autograd.backward(losses)
        model_grads_to_master_grads(model_params, master_params)
        trainer.step(BATCH_SIZE * SCALE)
        master_params_to_model_params(model_params, master_params)
    return net, master_params


def out_of_sight(optimizer, devices=ONE, *, with_amp):
    net = make_net(devices)
    name, options = OPTIMIZERS[optimizer]
    trainer = gluon.Trainer(
        net.collect_params(), name, {**options, "multi_precision": True}, update_on_kvstore=False
    )
    if with_amp:
        amp.init_trainer(trainer, SCALE)
    for step in range(STEPS):
        with autograd.record():
            losses = losses_of(net, devices, step)
            if with_amp:
                with amp.scale_loss(losses, trainer) as losses:
                    pass
            else:
                losses = [loss * SCALE for loss in losses]
        autograd.backward(losses)
        trainer.step(BATCH_SIZE * (1 if with_amp else SCALE))
    return net


def bits(net):
    parameters = [p for p in net.collect_params().values() if p.grad_req != "null"]
    return [one.asnumpy().tobytes() for p in parameters for one in p.list_data()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loop_by_hand_gives_the_weights_of_multi_precision_and_of_amp_bit_for_bit(optimizer):
    net, masters = by_hand(optimizer)
    assert bits(net) != bits(make_net())
    assert bits(net) == bits(out_of_sight(optimizer, with_amp=False))
    with_amp = out_of_sight(optimizer, with_amp=True)
    assert bits(net) == bits(with_amp)
    mpgluon.restore(with_amp)  # to its masters
    assert [master.data().asnumpy().tobytes() for master in masters] == bits(with_amp)


def test_a_loop_by_hand_on_two_devices_sums_float16_gradients_in_fp32():
    net, masters = by_hand("momentum", TWO)
    reference = out_of_sight("momentum", TWO, with_amp=True)
    for master in masters:
        first, second = (one.asnumpy() for one in master.list_data())
        assert first.tobytes() == second.tobytes()
    mpgluon.restore(reference)
    trained = [p for p in reference.collect_params().values() if p.grad_req != "null"]
    for master, parameter in zip(masters, trained):
        # The kvstore sums float16 gradients in float16: a rounding of 2**-11 in each of 5 steps,
        # of gradients below 2 and with momentum, times the rate of 0.1.
        difference = np.abs(master.data().asnumpy() - parameter.data().asnumpy()).max()
        assert difference <= 0.1 * 2 * 2.0**-11 * sum(5 * 0.9**k for k in range(5))
    assert len(bits(net)) == 2 * len(masters)


def test_masters_begin_with_the_weights_before_the_cast_and_have_their_own_gradients():
    before = [p.data().asnumpy() for p in make_net(cast=False).collect_params().values()]
    net = make_net()
    model_params, master_params = prep_param_lists(net)
    assert [p.name for p in master_params] == [f"{p.name}_master" for p in model_params]
    trained = [v for v, p in zip(before, net.collect_params().values()) if p.grad_req != "null"]
    assert len(trained) == len(master_params) == 5
    for master, value in zip(master_params, trained):
        assert master.data().asnumpy().tobytes() == value.tobytes()
        assert np.dtype(master.dtype) == master.grad().dtype == np.float32


def test_masters_of_weights_that_were_set_since_the_cast_are_those_weights():
    net = make_net()
    net[0].weight.set_data(net[0].weight.data() * 3)
    _, (master, *_) = prep_param_lists(net)
    expected = net[0].weight.data().asnumpy().astype(np.float32)
    assert master.data().asnumpy().tobytes() == expected.tobytes()


def test_frozen_parameters_have_no_master_and_multipliers_are_kept():
    net = make_net()
    net[0].weight.grad_req = "null"
    net[2].weight.lr_mult, net[2].bias.wd_mult = 0.5, 0.0
    model_params, master_params = prep_param_lists(net)
    expected = (net[1].gamma, net[1].beta, net[2].weight, net[2].bias)
    assert [p.name for p in model_params] == [p.name for p in expected]
    assert [p.lr_mult for p in master_params] == [1, 1, 0.5, 1]
    assert [p.wd_mult for p in master_params] == [1, 1, 1, 0]
    net.collect_params().setattr("grad_req", "null")
    with pytest.raises(ValueError, match="no parameter to train: all are frozen"):
        prep_param_lists(net)


def test_a_gradient_that_backward_did_not_write_is_stale_for_the_masters_too():
    net = make_net()
    model_params, master_params = prep_param_lists(net)
    trainer = gluon.Trainer(master_params, "sgd")
    with autograd.record():
        (loss,) = losses_of(net, ONE, 0)
    loss.backward()
    model_grads_to_master_grads(model_params, master_params)
    trainer.step(1)
    model_grads_to_master_grads(model_params, master_params)
    with pytest.raises(UserWarning, match="has not been updated by backward"):
        trainer.step(1)


def test_gradients_are_widened_exactly_and_weights_rounded_to_nearest_even():
    layer = nn.Dense(4, in_units=1, use_bias=False)
    layer.initialize()
    mpgluon.cast_block(layer)
    (model,), (master,) = lists = prep_param_lists(layer)
    gradient = np.array([[2.0**-24], [65504], [1 + 2.0**-10], [-0.0]], dtype=np.float16)
    with autograd.record():
        loss = layer(mx.nd.ones((1, 1)))
    loss.backward()
    model.grad()[:] = mx.nd.array(gradient, dtype="float16")
    model_grads_to_master_grads(*lists)
    assert master.grad().asnumpy().tobytes() == gradient.astype(np.float32).tobytes()
    # Two ties, one to either side, and one number just above a tie.
    ties = [[1 + 2.0**-11], [1 + 3 * 2.0**-11], [1 + 2.0**-11 + 2.0**-20], [0]]
    master.set_data(mx.nd.array(ties))
    master_params_to_model_params(*lists)
    assert model.data().asnumpy().ravel().tolist() == [1, 1 + 2.0**-9, 1 + 2.0**-10, 0]


def test_lists_that_do_not_belong_together_are_refused():
    model_params, master_params = prep_param_lists(make_net())
    for call in (model_grads_to_master_grads, master_params_to_model_params):
        with pytest.raises(ValueError, match="5 parameters and 4 masters do not belong together"):
            call(model_params, master_params[1:])


def test_batch_normalization_is_fp32_again_after_a_cast_of_every_parameter():
    net = make_net(cast=False)
    before = {p.name: p.data().asnumpy() for p in net[1].collect_params().values()}
    for parameter in net.collect_params().values():
        parameter.cast("float16")
    assert bn_to_float32(net) is net
    dtypes = {p.name: p.data().dtype for p in net.collect_params().values()}
    assert all(dtypes[name] == np.float32 for name in before)
    assert dtypes[net[0].weight.name] == dtypes[net[2].bias.name] == np.float16
    images = mx.nd.ones((2, 8), dtype="float16")
    assert net[1](images).dtype == np.float16  # MXNet's own operator takes it


def test_apex_names_cast_a_network_and_keep_batch_norm():
    net = nn.HybridSequential()
    net.add(nn.Dense(4, in_units=3), nn.BatchNorm(in_channels=4))
    net.initialize()
    assert network_to_half(net) is net
    assert net[0].weight.dtype == "float16"
    assert net[1].gamma.dtype == np.float32
    assert BN_convert_float is bn_to_float32
