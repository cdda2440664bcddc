"""Record activation gradients of a ResNet-50 for the live figure ``gradients``.

Run it with ``PYTHONPATH=. python docs/_live/record_gradients.py``; it takes a minute or two.

The network learns ten rendered shapes in FP32, as those of lesson 03 do. Then the gradient of the
mean loss of one batch is computed in FP32. From the gradient that arrives at each convolution, some
blocks of 32 channels at one place of one image are drawn: the blocks that share a scale in MX
formats. Values are rounded to BF16, which halves the file, and are stored as pairs of bytes.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from mpgluon.formats.float_format import BFLOAT16, round_to
from mpgluon_tools.diagnostics.observe import Batch, Seen, observed_batch, values_of

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import autograd, gluon

from recipes.data.shapes import render_image
from recipes.training.networks import build_network

PATH = Path(__file__).with_name("gradients.data.js")
CLASSES, IMAGES_PER_CLASS, SIZE, BATCH_SIZE, EPOCHS = 10, 20, 48, 20, 10
BLOCK, BLOCKS_PER_LAYER = 32, 12

COMMENT = """\
// Gradients that arrive at the {layers} convolutions of a ResNet-50, {each} of each, for the live
// figure `gradients`. Made by record_gradients.py: {steps} steps of training on rendered shapes in
// FP32, from a loss of {first:.2f} to one of {last:.2f}; then the gradient of the mean loss of
// {batch} images of {size} x {size} pixels, in FP32.
// `values`: base64 of little-endian BF16 codes (each value is rounded to BF16), layer after layer
// from the first convolution on, in blocks of {block} channels of one place of one image.
"""


def train() -> tuple[gluon.Block, Batch, list[float]]:
    """Train the network; return it, a batch, and the loss of each step."""
    images, labels = [], []
    for number in range(CLASSES * IMAGES_PER_CLASS):
        picture = render_image(number % CLASSES, number // CLASSES).convert("RGB")
        images.append(np.asarray(picture.resize((SIZE, SIZE))).transpose(2, 0, 1) / 127.5 - 1)
        labels.append(number % CLASSES)
    batches = [
        Batch(
            mx.nd.array(images[first : first + BATCH_SIZE]),
            mx.nd.array(labels[first : first + BATCH_SIZE], dtype="int32"),
            _mean_loss,
        )
        for first in range(0, len(images), BATCH_SIZE)
    ]
    mx.random.seed(0)
    net = build_network("resnet50_v1", classes=CLASSES, image_size=SIZE, devices=[mx.cpu()])
    net.hybridize(static_alloc=True, static_shape=True)
    options = {"learning_rate": 0.02, "momentum": 0.9, "wd": 1e-4}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    losses = []
    for batch in batches * EPOCHS:
        with autograd.record():
            loss = _mean_loss(net(batch.inputs), batch.labels)
        loss.backward()
        trainer.step(1)
        losses.append(float(loss.asscalar()))
    return net, batches[0], losses


def _mean_loss(logits: Any, labels: Any) -> Any:
    return gluon.loss.SoftmaxCrossEntropyLoss()(logits, labels).mean()


def sample(net: gluon.Block, batch: Batch) -> npt.NDArray[np.float32]:
    """Return blocks of each convolution's gradient, shape (layers, blocks, values)."""
    rng = np.random.default_rng(0)
    drawn = []

    def note(seen: Seen) -> None:
        if seen.kind != "output gradient" or not isinstance(seen.block, gluon.nn.Conv2D):
            return
        values = values_of(seen.array).transpose(0, 2, 3, 1).reshape(-1, BLOCK)
        drawn.append(values[rng.choice(len(values), BLOCKS_PER_LAYER, replace=False)])

    observed_batch(net, batch, note)
    return round_to(np.array(drawn[::-1], np.float32), BFLOAT16)


def main() -> None:
    """Write the script with the data."""
    net, batch, losses = train()
    values = sample(net, batch)
    codes = (values.view(np.uint32) >> 16).astype("<u2")
    comment = COMMENT.format(
        layers=len(values),
        each=values[0].size,
        steps=len(losses),
        first=losses[0],
        last=np.mean(losses[-len(losses) // EPOCHS :]),
        batch=BATCH_SIZE,
        size=SIZE,
        block=BLOCK,
    )
    data = {
        "layers": len(values),
        "block": BLOCK,
        "values": base64.b64encode(codes.tobytes()).decode(),
    }
    PATH.write_text(f'{comment}"use strict";\nconst mpgluonGradients = {json.dumps(data)};\n')


if __name__ == "__main__":
    main()
