"""One step of the training script: what it minimizes."""

from mpgluon import amp
from mpgluon.distributed import OneProcess

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

from recipes.training.steps import Stepper

IMAGES, CLASSES = 4, 5
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


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
        net, trainer, [mx.cpu()], OneProcess(), differentiate_inputs=False,
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
