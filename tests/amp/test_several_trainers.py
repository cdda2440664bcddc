"""One loss for several Trainers, one loss scale for several, and gradients of the wrong loss."""

from __future__ import annotations

import copy
import math
import pickle
import threading

import mpgluon
from mpgluon import DynamicLossScale, StaticLossScale, TrainerStateError, amp

import mxnet as mx
import numpy as np
import pytest
from amp_helpers import (
    BATCH_SIZE,
    LOSS,
    ONE,
    OPTIMIZERS,
    TWO,
    backward,
    backward_of_two,
    backward_on,
    batches,
    each_device_list,
    each_dtype,
    give_gradient,
    make_net,
    make_trainer,
    one_weight,
    scaled_net,
    trained,
    two_weights,
    weight_trainer,
    weights,
)
from helpers import assert_same_bits, backward_from
from mxnet import autograd, gluon


def dynamic(scale=128, growth_interval=1):
    return DynamicLossScale(scale, growth_interval=growth_interval)


def parts_of(net):
    """Return the parameters of a backbone and of a head: what two optimizers would train."""
    return [
        [*net[0].collect_params().values(), *net[1].collect_params().values()],
        [*net[2].params.values()],
    ]


def trainers_of(net, scales, optimizers=("momentum", "adam"), **options):
    trainers = []
    for parameters, scale, optimizer in zip(parts_of(net), scales, optimizers):
        name, arguments = OPTIMIZERS[optimizer]
        arguments = {**arguments, "multi_precision": True}
        trainers.append(gluon.Trainer(parameters, name, arguments, **options))
        if scale is not None:
            amp.init_trainer(trainers[-1], scale)
    return trainers


def run(dtype, scales, *, bad=None, leave_out=None, kvstore="device", devices=ONE, clips=()):
    """Train with two Trainers; ``bad`` is (batch, layer): an infinite gradient there."""
    net = make_net(dtype, devices)
    trainers = trainers_of(net, scales, kvstore=kvstore)
    history = []
    for number, batch in enumerate(batches()):
        if number == leave_out:
            continue
        backward_on(net, devices, batch, trainers)
        if bad is not None and number == bad[0]:
            net[bad[1]].weight.list_grad()[-1][0, 0] = math.inf
        for place in clips:
            amp.clip_global_norm(trainers[place], 0.1, BATCH_SIZE)
        for trainer in trainers:
            trainer.step(BATCH_SIZE)
        history.append([(amp.step_was_skipped(t), amp.loss_scale(t)) for t in trainers])
    return weights(net), history, trainers


@pytest.mark.sampled(4)
@each_dtype
@pytest.mark.parametrize("kind", ["own scales", "one object", "static"])
@pytest.mark.parametrize("bad_layer", [0, 2])
@pytest.mark.parametrize("kvstore", ["device", None])
@each_device_list
def test_an_overflow_in_either_trainer_skips_the_steps_of_both_and_counts_once(
    dtype, kind, bad_layer, kvstore, devices
):
    shared = dynamic()
    scales = {
        "own scales": lambda: (dynamic(), dynamic()),
        "one object": lambda: (shared, shared),
        "static": lambda: (128, 128),
    }[kind]()
    options = {"kvstore": kvstore, "devices": devices}
    values, history, trainers = run(dtype, scales, bad=(2, bad_layer), **options)
    control, _, _ = run(dtype, (1, 1), leave_out=2, **options)
    assert_same_bits(values, control)
    expected = [128] * 4 if kind == "static" else [256, 512, 256, 512]
    assert history == [[(n == 2, scale)] * 2 for n, scale in enumerate(expected)]
    assert [amp.skipped_steps(trainer) for trainer in trainers] == [1, 1]


@pytest.mark.parametrize("clips", [(0,), (1,), (0, 1), (1, 0)])
@pytest.mark.parametrize("bad_layer", [None, 0, 2])
def test_clipping_one_or_both_changes_nothing_of_that(clips, bad_layer):
    bad = None if bad_layer is None else (2, bad_layer)
    values, history, _ = run("float16", (dynamic(), dynamic()), bad=bad, clips=clips)
    control, _, _ = run("float16", (1, 1), leave_out=None if bad is None else 2, clips=clips)
    assert_same_bits(values, control)
    assert [skips for (skips, _), _ in history] == [bad is not None and n == 2 for n in range(4)]
    assert all(one == other for one, other in history)


def test_gradients_are_divided_copied_and_clipped_for_each_trainer():
    def copies():
        return [one.asnumpy() for t in trainers for one in amp.unscaled_gradients(t).values()]

    net, control = make_net(), make_net()
    trainers = trainers_of(net, (dynamic(), dynamic()), optimizers=("sgd", "sgd"))
    batch = next(batches())
    backward(control, *batch)
    expected = [p.grad().asnumpy() for p in trained(control)]
    backward(net, *batch, trainers)
    assert_same_bits(copies(), expected)
    amp.unscale(trainers[1])
    norm = amp.clip_global_norm(trainers[0], 1000.0, BATCH_SIZE)
    for trainer in trainers:
        trainer.step(BATCH_SIZE)
    assert amp.gradient_norm(trainers[0]) == norm
    make_trainer(control).step(BATCH_SIZE)
    assert_same_bits(weights(net), weights(control))
    assert_same_bits(copies()[:2], expected[:2])


def test_a_scale_that_grows_at_the_first_step_still_divides_the_second_by_the_old_one():
    pair, trainers = two_weights(lambda: dynamic(8))
    for expected in (0.5, 0.0):
        backward_of_two(pair, trainers, (0.5, 0.5))
        trainers[0].step(1)
        trainers[1].step(1)
        assert [p.data().asscalar() for p in pair] == [expected, expected]
    assert amp.loss_scale(trainers[1]) == 32


def test_accumulated_losses_of_different_trainers_are_stepped_together():
    # A loss of both, then one of the first only: an overflow of the second still skips both.
    pair, trainers = two_weights(lambda: dynamic(8), grad_req="add")
    for factor in (math.inf, 0.25):
        backward_of_two(pair, trainers, (0.25, factor))
        backward_of_two(pair, trainers[0], (0.25, 0.0))
        for trainer in trainers:
            trainer.step(1)
        skipped = factor == math.inf
        assert [amp.step_was_skipped(t) for t in trainers] == [skipped] * 2
    assert [p.data().asscalar() for p in pair] == [0.5, 0.75]


def test_a_trainer_that_is_named_and_steps_late_delays_no_other():
    net = make_net()
    trainers = trainers_of(net, (dynamic(), dynamic()))
    before = weights(net)
    for number, batch in enumerate(batches()):
        backward(net, *batch, trainers)
        trainers[0].step(BATCH_SIZE)
        assert amp.loss_scale(trainers[0]) == 256 * 2**number
    trainers[1].step(BATCH_SIZE)
    assert not any(np.array_equal(one, other) for one, other in zip(before, weights(net)))


def test_checkpoints_of_both_trainers_bring_back_the_shared_scale(tmp_path):
    def go_on(net, trainers, first, last):
        for number, batch in enumerate(batches()):
            if first <= number < last:
                backward(net, *batch, trainers)
                for trainer in trainers:
                    trainer.step(BATCH_SIZE)
        return weights(net), [amp.loss_scale(trainer) for trainer in trainers]

    def make():
        net = make_net("float16")
        shared = dynamic()
        return net, trainers_of(net, (shared, shared))

    whole = go_on(*make(), 0, 4)
    net, trainers = make()
    go_on(net, trainers, 0, 2)
    for place, trainer in enumerate(trainers):
        mpgluon.save_checkpoint(tmp_path / f"{place}.npz", net, trainer)
    other, others = make()
    for place, trainer in enumerate(others):
        mpgluon.load_checkpoint(tmp_path / f"{place}.npz", other, trainer)
    resumed = go_on(other, others, 2, 4)
    assert_same_bits(resumed[0], whole[0])
    assert resumed[1] == whole[1] == [2048, 2048]


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ((dynamic(128), dynamic(64)), r"loss scales of 128 and 64; give both the same object"),
        ((128, 64), "loss scales of 128 and 64"),
        (("none", 128), "loss scales of 1 and 128"),
        ((dynamic(128), StaticLossScale(128)), "kind is 'DynamicLossScale' and 'StaticLossScale'"),
        ((dynamic(128), dynamic(128, 100)), "growth_interval is 1 and 100; give both the same"),
    ],
)
def test_loss_scales_that_cannot_be_one_are_refused_and_nothing_is_changed(scales, message):
    net = make_net()
    trainers = trainers_of(net, scales)
    loss = mx.nd.ones(1)
    with pytest.raises(TrainerStateError, match=message), amp.scale_loss(loss, trainers):
        pytest.fail("the loss was scaled")
    for trainer in trainers:
        with amp.scale_loss(loss, trainer) as scaled:
            assert scaled.asscalar() == amp.loss_scale(trainer)


def test_no_trainer_and_one_twice_are_refused():
    trainer = trainers_of(make_net(), (8, None))[0]
    for wrong in ([], [trainer, trainer]):
        with pytest.raises(ValueError, match="one Trainer, or a list of different ones"):
            amp.scale_loss(mx.nd.ones(1), wrong)


# None: no init_trainer. Of a Trainer of a plain FP32 network MXNet then asks nobody.
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    ("dtype", "second"),
    [
        *(("float32", 8), ("float32", "none")),
        *(("float16", 8), ("float16", "none"), ("float16", None)),
    ],
)
def test_a_step_on_gradients_of_a_loss_that_was_scaled_for_another_trainer_raises(
    order, dtype, second
):
    net = make_net(dtype)
    trainers = trainers_of(net, (8, second))
    before = weights(net)
    backward(net, *next(batches()), trainers[0])
    for place in order:
        if place == 0:
            trainers[0].step(BATCH_SIZE)
        else:
            for _ in range(2):
                message = r"holds 2 gradients \(dense.* first\) of a loss .* for another Trainer"
                with pytest.raises(TrainerStateError, match=message):
                    trainers[1].step(BATCH_SIZE)
    assert_same_bits(weights(net)[3:], before[3:])
    assert not np.array_equal(weights(net)[0], before[0])


def test_a_step_on_gradients_of_another_trainers_loss_raises_with_backward_after_the_block_too():
    weight = one_weight(value=1.0)
    trainers = [weight_trainer(weight) for _ in range(2)]
    with autograd.record(), amp.scale_loss(weight.data() * 1.0, trainers[0]) as scaled:
        pass
    scaled.backward()
    with pytest.raises(TrainerStateError, match=r"amp.scale_loss\(loss, \[trainer_a, trainer_b\]"):
        trainers[1].step(1)
    assert weight.data().asscalar() == 1


def test_a_trainer_that_was_idle_for_100_losses_is_watched_again():
    weights = [one_weight(value=1.0) for _ in range(2)]
    trainer, idle = (weight_trainer(weight) for weight in weights)
    for _ in range(110):  # after 100 looks without a result only some weights are looked at
        with autograd.record(), amp.scale_loss(weights[0].data() * 1.0, trainer) as scaled:
            scaled.backward()
        trainer.step(1)
    first, second = (weight.data() for weight in weights)
    with autograd.record(), amp.scale_loss(first * second, trainer) as scaled:
        scaled.backward()
    with pytest.raises(TrainerStateError, match="for another Trainer"):
        idle.step(1)


@pytest.mark.parametrize("critic_scale", [8, 64, "none"])
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_a_loss_that_passes_through_another_trainers_network_does_not_change_its_next_step(
    critic_scale, grad_req
):
    # As in a GAN: the generator's loss fills the critic's gradients, which the critic's own loss
    # overwrites, or finds emptied.
    def train(scales):
        net = make_net()
        for part in parts_of(net)[1]:
            part.grad_req = grad_req
        generator, critic = trainers_of(net, scales, optimizers=("sgd", "sgd"))
        for images, targets in batches():
            for trainer in (generator, critic):
                net[2].collect_params().zero_grad()
                with autograd.record():
                    features = net[1](net[0](images))
                    if trainer is critic:
                        features = features.detach()
                    loss = LOSS(net[2](features), targets)
                    if scales[1] == "none" and trainer is critic:
                        loss.backward()
                    else:
                        with amp.scale_loss(loss, trainer) as scaled:
                            scaled.backward()
                trainer.step(BATCH_SIZE)
        return weights(net)

    assert_same_bits(train((128, critic_scale)), train((1, 1)))


def test_a_step_raises_where_the_scaled_loss_of_another_trainer_has_overwritten_its_gradients():
    net = make_net()
    first, second = trainers_of(net, (8, 64))
    images, targets = next(batches())
    backward_from(lambda: LOSS(net[2](net[1](net[0](images)).detach()), targets), second)
    backward(net, images, targets, first)  # through the second's layers
    with pytest.raises(TrainerStateError, match="name every Trainer that steps"):
        second.step(BATCH_SIZE)


def test_two_losses_of_two_trainers_may_go_backward_in_one_call():
    def train(scales):
        net = make_net()
        trainers = trainers_of(net, scales, optimizers=("sgd", "sgd"))
        for images, targets in batches():
            with autograd.record():
                features = net[1](net[0](images))
                one = (features**2).sum(axis=1)
                other = LOSS(net[2](features.detach()), targets)
                with amp.scale_loss(one, trainers[0]) as a, amp.scale_loss(other, trainers[1]) as b:
                    autograd.backward([a, b])
            for trainer in trainers:
                trainer.step(BATCH_SIZE)
        return weights(net)

    assert_same_bits(train((8, 64)), train((1, 1)))


@pytest.mark.parametrize("same", [True, False])
def test_a_loss_scaled_inside_of_scaling_a_loss_of_the_same_trainer_is_refused(same):
    trainer = make_trainer(make_net(), loss_scale=8)
    loss, other = mx.nd.ones(1), mx.nd.ones(1)
    refused = pytest.raises(TrainerStateError, match=r"amp\.scale_loss\(\[loss_a, loss_b\], tr")
    with amp.scale_loss(loss, trainer) as scaled, refused:
        amp.scale_loss(scaled if same else other, trainer).__enter__()
    with amp.scale_loss(other, trainer) as scaled:  # after it, it may
        assert scaled.asscalar() == 8


@pytest.mark.parametrize("passed", ["scaled", "loss", "made from it", "after the block"])
def test_scaling_a_loss_again_is_refused(passed):
    net = make_net()
    first, second = trainers_of(net, (8, 64))
    images, targets = next(batches())
    refused = pytest.raises(TrainerStateError, match=r"multiplied twice; .*\[trainer_a, train")
    with autograd.record():
        loss = LOSS(net(images), targets)
        with amp.scale_loss(loss, first) as scaled:
            if passed != "after the block":
                inner = {"scaled": scaled, "loss": loss, "made from it": scaled.mean()}[passed]
                with refused:
                    amp.scale_loss(inner, second).__enter__()
        if passed == "after the block":
            with refused:
                amp.scale_loss(scaled, first).__enter__()


def test_threads_may_scale_losses_of_one_trainer_at_once():
    # gluoncv's detection scripts: one thread for each device.
    def train(scale, *, threads):
        net, trainer = scaled_net("float16", ctx=TWO, loss_scale=scale)
        for batch in batches():
            pairs = zip(*(gluon.utils.split_and_load(one, TWO) for one in batch))
            meet = threading.Barrier(2)

            def work(image, target, meet=meet):
                with autograd.record(), amp.scale_loss(LOSS(net(image), target), trainer) as scaled:
                    if threads:
                        meet.wait(30)
                    scaled.backward()

            workers = [threading.Thread(target=work, args=pair) for pair in pairs]
            for worker in workers:
                worker.start()
                if not threads:
                    worker.join()
            for worker in workers:
                worker.join()
            trainer.step(BATCH_SIZE)
        return weights(net)

    assert_same_bits(train(64, threads=True), train(1, threads=False))


def separate(shared_by, batches_with_overflow=(), order=(0, 1)):
    """Train two parts with a loss each and one loss scale; return it after each iteration."""
    pair, trainers = two_weights(lambda: shared_by, learning_rate=2.0**-4)
    scales = []
    for iteration in range(4):
        for place in order:
            give_gradient(pair[place], trainers[place], 1.0)
            if (iteration, place) in batches_with_overflow:
                pair[place].grad()[:] = math.inf
            trainers[place].step(1)
        scales.append(amp.loss_scale(trainers[0]))
    return scales, [p.data().asscalar() for p in pair], [amp.skipped_steps(t) for t in trainers]


def test_a_loss_scale_of_two_trainers_with_a_loss_each_advances_once_per_iteration():
    scales, values, skipped = separate(DynamicLossScale(8, growth_interval=2))
    assert scales == [8, 16, 16, 32]
    assert values == [0.75, 0.75]
    assert skipped == [0, 0]


@pytest.mark.parametrize("place", [0, 1])
def test_an_overflow_of_one_of_them_skips_its_own_step_and_shrinks_the_scale_once(place):
    scales, values, skipped = separate(DynamicLossScale(8, growth_interval=1), [(1, place)])
    assert scales == [16, 8, 16, 32]
    assert (values[place], values[1 - place]) == (0.8125, 0.75)
    assert skipped[place] == 1
    assert sum(skipped) == 1


def test_a_trainer_that_steps_more_often_shrinks_a_shared_scale_before_its_next_loss():
    order = (0, 0, 0, 1)  # a critic's three steps
    bad = [(0, 0)]  # all three of the first iteration
    scales, _, skipped = separate(DynamicLossScale(64, growth_interval=100), bad, order)
    assert skipped == [3, 0]
    assert scales == [8, 8, 8, 8]


def test_a_trainer_that_accumulates_while_another_one_changes_their_scale_needs_its_own():
    shared = dynamic(8)
    pair, trainers = two_weights(lambda: shared)
    pair[0].grad_req = "add"
    give_gradient(pair[0], trainers[0], 1.0)
    for _ in range(2):  # the second loss finds a larger scale
        give_gradient(pair[1], trainers[1], 1.0)
        trainers[1].step(1)
    with pytest.raises(TrainerStateError, match=r"from 8 to 16 .* steps a loss scale of its own"):
        give_gradient(pair[0], trainers[0], 1.0)


def test_a_copy_of_a_loss_scale_in_use_has_its_state_and_none_of_its_trainers():
    shared = dynamic(8)
    separate(shared)
    for other in (copy.copy(shared), copy.deepcopy(shared), pickle.loads(pickle.dumps(shared))):
        assert (other.state_dict(), repr(other)) == (shared.state_dict(), repr(shared))
        scales, _, _ = separate(other)
        assert scales == [shared.scale * 2**step for step in (1, 2, 3, 4)]


def test_a_trainer_that_never_steps_again_does_not_stop_the_scale():
    scales, _, _ = separate(dynamic(8), order=(0,))
    assert scales == [16, 32, 64, 128]


def test_a_checkpoint_between_the_steps_of_an_iteration_keeps_the_overflow_of_the_first(tmp_path):
    def make():
        net = make_net()
        shared = dynamic(8)
        return net, trainers_of(net, (shared, shared))

    net, trainers = make()
    backward(net, *next(batches()), trainers[0])
    net[0].weight.grad()[:] = math.inf
    trainers[0].step(BATCH_SIZE)
    assert amp.loss_scale(trainers[0]) == 4  # of its next loss
    mpgluon.save_checkpoint(tmp_path / "c.npz", net, trainers[0])
    other, others = make()
    mpgluon.load_checkpoint(tmp_path / "c.npz", other, others[0])
    assert amp.loss_scale(others[0]) == 4
