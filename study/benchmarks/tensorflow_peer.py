"""TensorFlow's contestants: ResNet v1 as Gluon's model zoo has it, in Keras.

It imports nothing of this package, since TensorFlow has an interpreter of its own. Each factory
returns a function that does its work once and waits for it, and facts about it; see ``child.py``.
16 bits are Keras' mixed policies, without a loss scale.

References
----------
He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", 2015, table 1.
"""

from __future__ import annotations

import os
from math import prod
from typing import Any, Callable

import keras  # type: ignore[import-not-found]
import tensorflow as tf  # type: ignore[import-untyped]
from keras import layers

__all__ = ["inference", "resnet_v1", "training"]

Prepared = tuple[Callable[[], Any], dict[str, Any]]

# Blocks in each of the four stages, and a block's output channels over its inner ones.
_STAGES = {
    "resnet18_v1": ((2, 2, 2, 2), 1),
    "resnet34_v1": ((3, 4, 6, 3), 1),
    "resnet50_v1": ((3, 4, 6, 3), 4),
    "resnet101_v1": ((3, 4, 23, 3), 4),
    "resnet152_v1": ((3, 8, 36, 3), 4),
}
_CLASSES = 1000
_LEARNING_RATE = 2.0**-20  # as in workloads.py


def resnet_v1(model: str) -> tuple[Any, list[Any]]:
    """Return Gluon's ``resnet18_v1`` to ``resnet152_v1``, and its layers in Gluon's order."""
    stages, expansion = _STAGES[model]
    made: list[Any] = []

    def convolution(x: Any, out: int, kernel: int, stride: int = 1, bias: bool = False) -> Any:
        """Append a convolution and its BatchNorm; both sides are padded alike, as in Gluon."""
        made.append(layers.Conv2D(out, kernel, stride, padding="valid", use_bias=bias))
        made.append(layers.BatchNormalization(momentum=0.9, epsilon=1e-5))
        if kernel > 1:
            x = layers.ZeroPadding2D(kernel // 2)(x)
        return made[-1](made[-2](x))

    def block(x: Any, width: int, stride: int) -> Any:
        out = width * expansion
        if expansion == 1:
            y = layers.ReLU()(convolution(x, width, 3, stride))
            y = convolution(y, out, 3)
        else:
            y = layers.ReLU()(convolution(x, width, 1, stride, bias=True))
            y = layers.ReLU()(convolution(y, width, 3))
            y = convolution(y, out, 1, bias=True)
        if x.shape[-1] != out or stride > 1:
            x = convolution(x, out, 1, stride)
        return layers.ReLU()(layers.Add()([y, x]))

    images = keras.Input((None, None, 3))
    x = layers.ReLU()(convolution(images, 64, 7, 2))
    x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))  # of values that are not negative
    for number, blocks in enumerate(stages):
        for place in range(blocks):
            x = block(x, 64 * 2**number, 2 if number and not place else 1)
    made.append(layers.Dense(_CLASSES, dtype="float32"))
    return keras.Model(images, made[-1](layers.GlobalAveragePooling2D()(x))), made


def training(*, dtype: str, model: str, batch_size: int, image_size: int) -> Prepared:
    """Prepare a training step with SGD and momentum; as ``workloads.training``."""
    net, images, facts = _begin(dtype, model, batch_size, image_size)
    labels = tf.range(batch_size) % _CLASSES
    optimizer = keras.optimizers.SGD(_LEARNING_RATE, momentum=0.9)
    optimizer.build(net.trainable_variables)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def train() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(labels, net(images, training=True))
        optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
        return loss

    step = tf.function(train)
    return lambda: step().numpy(), facts


def inference(
    *, dtype: str, model: str, batch_size: int, image_size: int, calls: int = 1
) -> Prepared:
    """Prepare a prediction; as ``workloads.inference``."""
    net, images, facts = _begin(dtype, model, batch_size, image_size)
    predict = tf.function(lambda: net(images, training=False))
    return lambda: predict().numpy(), {**facts, "calls": calls}


def _begin(
    dtype: str, model: str, batch_size: int, image_size: int
) -> tuple[Any, Any, dict[str, Any]]:
    """Return the network, a batch of noise and the facts; sets threads and format."""
    threads = int(os.environ["OMP_NUM_THREADS"])
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_global_policy("float32" if dtype == "float32" else f"mixed_{dtype}")
    net, _ = resnet_v1(model)
    facts = {
        "images": batch_size,
        "parameters": sum(prod(one.shape) for one in net.trainable_variables),
        "versions": {"tensorflow": tf.__version__, "keras": keras.__version__},
    }
    return net, tf.random.normal((batch_size, image_size, image_size, 3)), facts
