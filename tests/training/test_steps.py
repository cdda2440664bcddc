"""Steps of the training script: the loss that they minimize, and several batches for one."""

from mpgluon import DynamicLossScale, WeightAverage, amp
from mpgluon.distributed import OneProcess
from mpgluon.distributed.processes import Processes
from mpgluon.errors import DataError

import mxnet as mx
import numpy as np
import pytest
from helpers import STATIC, WAYS, assert_same_bits, in_sequence, parameters_of
from mxnet import autograd, gluon
from mxnet.gluon import nn
from training_helpers import STEPS, run

from recipes.training.steps import Stepper, evaluate

N, BATCH_SIZE, SIDE = 4, 3, 4
IMAGES, CLASSES = 4, 5  # of a batch with smoothed labels
ONE, TWO = [mx.cpu()], [mx.cpu(0), mx.cpu(1)]
ONE_PROCESS = OneProcess()
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def prepared(way: str, devices: list[mx.Context]):
    """Return a network and its Trainer with a loss scale, always the same."""
    mx.random.seed(0)
    np.random.seed(0)
    net = in_sequence(nn.Conv2D(4, 3, in_channels=2), nn.BatchNorm(in_channels=4), nn.Dense(3))
    net.initialize(mx.init.Normal(0.5), ctx=devices)
    net(mx.nd.zeros((1, 2, SIDE, SIDE)))
    if way in WAYS:
        WAYS[way](net)
    net.hybridize(**STATIC)
    options = {"learning_rate": 0.125, "momentum": 0.5, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer, DynamicLossScale(64, growth_interval=2))
    return net, trainer


def steps_of_images(count: int, images_per_step: int):
    """Yield images and labels of each step; the second step overflows, in one batch only."""
    random = np.random.RandomState(0)
    for step in range(count):
        images = random.randn(images_per_step, 2, SIDE, SIDE).astype(np.float32)
        if step == 1:
            images[images_per_step // 2] = np.inf
        yield mx.nd.array(images), mx.nd.array(random.randint(0, 3, images_per_step), dtype="int32")


def accumulated_by_hand(net, trainer, devices, count):
    """Train as docs/migration.md shows; return the scale and the fate of each step."""
    trained = [p for p in net.collect_params().values() if p.grad_req != "null"]
    for parameter in trained:
        parameter.grad_req = "add"
    size, fates = BATCH_SIZE * len(devices), []
    for all_images, all_labels in steps_of_images(count, N * size):
        for begin in range(0, N * size, size):
            images = all_images[begin : begin + size]
            labels = all_labels[begin : begin + size]
            images, labels = (gluon.utils.split_and_load(x, devices) for x in (images, labels))
            with autograd.record():
                losses = [LOSS(net(x), y) for x, y in zip(images, labels)]
                with amp.scale_loss(losses, trainer) as scaled_losses:
                    autograd.backward(scaled_losses)
        trainer.step(N * size)
        for parameter in trained:
            parameter.zero_grad()
        fates.append((amp.loss_scale(trainer), amp.step_was_skipped(trainer)))
    return fates


@pytest.mark.sampled(3)
@pytest.mark.parametrize("devices", [ONE, TWO], ids=["one device", "two devices"])
@pytest.mark.parametrize("way", ["float32", *WAYS])
def test_a_step_of_several_batches_is_the_loop_by_hand_bit_for_bit(way, devices):
    net, trainer = prepared(way, devices)
    expected = accumulated_by_hand(net, trainer, devices, 5)
    own, own_trainer = prepared(way, devices)
    step = Stepper(own, own_trainer, devices, ONE_PROCESS, differentiate_inputs=False, accumulate=N)
    events = []
    for images, labels in steps_of_images(5, N * BATCH_SIZE * len(devices)):
        events.append(step(images, labels, seed=0))
        assert events[-1]["images"] == len(labels)
    # The scale doubles after two real steps, and the overflow in one batch skips the second step.
    assert expected == [(64, False), (32, True), (32, False), (64, False), (64, False)]
    assert [event["loss_scale"] for event in events[1:]] == [scale for scale, _ in expected[:-1]]
    assert [event["skipped"] for event in events[1:]] == [skipped for _, skipped in expected[1:]]
    weights, expected_weights = (
        {n: array for n, array in parameters_of(one).items() if "running" not in n}
        for one in (own, net)
    )
    assert_same_bits(weights, expected_weights)
    assert own_trainer.optimizer.num_update == 4


HALVES = {"batch_size": 5, "accumulate": 2, "dtype": "float16"}


@pytest.mark.slow
def test_steps_of_a_run_are_real_steps(shapes, tmp_path, float16_run):
    done = run(shapes, tmp_path, **HALVES, growth_interval=2)
    steps, others = done.events("step"), float16_run.events("step")
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    assert {event["images"] for event in steps} == {10}
    # The schedule stands still in a skipped step, so that runs may differ by those.
    real = [[e["learning_rate"] for e in events if not e["skipped"]] for events in (steps, others)]
    assert real[0][: len(real[1])] == real[1][: len(real[0])] != []
    scale, since = 2.0**16, 0
    for event in steps:
        assert event["loss_scale"] == scale
        since = 0 if event["skipped"] else since + 1
        if event["skipped"]:
            scale /= 2
        elif since % 2 == 0:
            scale *= 2
    assert done.results["final_loss_scale"] == scale
    assert done.results["global_batch_size"] == 10
    assert done.results["steps"] == STEPS
    assert [event["step"] for event in done.events("epoch")] == [4, 8]


@pytest.mark.parametrize("dtype", ["float32", "mixed_float16"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_cross_entropy_with_smoothed_labels(smoothing, dtype):
    net = nn.Dense(CLASSES, in_units=3)
    net.initialize(mx.init.Normal(1.0))
    if dtype != "float32":
        amp.autocast(net, "float16")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.0})
    amp.init_trainer(trainer, "none")
    step = Stepper(
        net, trainer, ONE, ONE_PROCESS, differentiate_inputs=False,
        label_smoothing=smoothing, classes=CLASSES,
    )  # fmt: skip
    random = np.random.RandomState(0)
    images = mx.nd.array(random.randn(IMAGES, 3))
    labels = random.randint(0, CLASSES, IMAGES)
    with autograd.record():
        logits = net(images)
        of_class = [LOSS(logits, mx.nd.full(IMAGES, one)) for one in range(CLASSES)]
        of_label = LOSS(logits, mx.nd.array(labels))
        expected = (1 - smoothing) * of_label + smoothing / CLASSES * sum(of_class)
    expected.backward()
    expected_gradient = net.bias.grad().asnumpy()
    event = step(images, mx.nd.array(labels, dtype="int32"), seed=0)
    # The same FP32 softmax in another order: a rounding of each of at most nine terms.
    loss = float(expected.asnumpy().sum(dtype=np.float64))
    assert event["loss"] * IMAGES == pytest.approx(loss, rel=9 * 2.0**-24)
    assert event["correct"] == (logits.asnumpy().argmax(axis=1) == labels).sum()
    unit = 2.0**-24 if dtype == "float32" else 2.0**-11  # of the gradient of a logit, at most 1
    np.testing.assert_allclose(
        net.bias.grad().asnumpy(), expected_gradient, rtol=0, atol=9 * IMAGES * unit
    )


def identity(devices=ONE):
    net = in_sequence(nn.Dense(CLASSES, use_bias=False, in_units=CLASSES))
    net.initialize(ctx=devices)
    net[0].weight.set_data(mx.nd.eye(CLASSES))
    return net


def batches_of(logits, labels, size):
    logits, labels = mx.nd.array(logits), mx.nd.array(labels, dtype="int32")
    for begin in range(0, len(labels), size):
        yield logits[begin : begin + size], labels[begin : begin + size]


@pytest.mark.parametrize("devices", [ONE, TWO])
def test_a_test_has_the_accuracy_of_all_images_and_the_mean_of_the_classes_that_it_has(devices):
    # Right are 3 of the 4 images of class 0, and the one of class 3; other classes have none.
    labels, answers = np.array([0, 0, 3, 0, 0]), np.array([0, 1, 3, 0, 0])
    logits = np.log(2) * np.eye(CLASSES)[answers]
    batches = batches_of(logits, labels, 2)  # one image for two devices at the end
    figures, found = evaluate(identity(devices), batches, CLASSES, devices, ONE_PROCESS)
    assert figures == {
        "tested": "weights",
        "test_accuracy": 4 / 5,
        "test_accuracy_per_class": (3 / 4 + 1) / 2,
    }
    assert (found.labels == labels).all()
    assert (found.answers == answers).all()
    # Of 2, 1, 1, …: the answer has twice the probability of each other class.
    np.testing.assert_allclose(found.probabilities, 2 / (CLASSES + 1), rtol=2.0**-20)
    expected = np.where(answers == labels, 2, 1) / (CLASSES + 1)
    np.testing.assert_allclose(found.of_right, expected, rtol=2.0**-20)


def test_the_average_and_the_weights_are_tested():
    net = identity()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0})
    average = WeightAverage(trainer, 0.5)
    with autograd.record():
        loss = (net[0].weight.data() * mx.nd.eye(CLASSES)).sum() * 2
    loss.backward()
    trainer.step(1)  # the weights are now the identity times -1
    average.update()
    average.value_of(net[0].weight)[:] = mx.nd.eye(CLASSES)
    labels = np.arange(CLASSES)
    batches = list(batches_of(np.eye(CLASSES), labels, 3))
    figures, found = evaluate(net, batches, CLASSES, ONE, ONE_PROCESS, average)
    assert figures["tested"] == "average"
    assert (figures["test_accuracy"], figures["test_accuracy_of_weights"]) == (1.0, 0.0)
    assert (found.answers == labels).all()


def test_the_images_of_all_processes_count():
    class WithAnother(Processes):
        """Two processes, of which the other has one image of class 1, answered wrongly."""

        def sum(self, numbers, purpose):
            return [*numbers[:CLASSES], numbers[CLASSES], numbers[CLASSES + 1] + 1, *numbers[-3:]]

    batches = batches_of(np.eye(CLASSES)[:1], [0], 1)
    figures, _ = evaluate(identity(), batches, CLASSES, ONE, WithAnother())
    assert (figures["test_accuracy"], figures["test_accuracy_per_class"]) == (0.5, 0.5)


def test_a_test_without_images_is_refused():
    with pytest.raises(DataError, match="no image for testing can be read"):
        evaluate(identity(), [], CLASSES, ONE, ONE_PROCESS)
