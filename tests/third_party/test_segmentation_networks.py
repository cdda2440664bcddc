"""gluoncv's segmentation networks with its own loss, which ends in ``SoftmaxOutput``."""

from __future__ import annotations

import mpgluon
from mpgluon import amp

import gluoncv
import mxnet as mx
import numpy as np
import pytest
from gluoncv.loss import MixSoftmaxCrossEntropyLoss
from mxnet import autograd, gluon
from third_party_helpers import change_a_little, distance, length

pytestmark = [pytest.mark.slow, pytest.mark.third_party]

NETWORKS = {"FCN": "get_fcn", "PSPNet": "get_psp", "DeepLab": "get_deeplab"}
SIZE, CLASSES, BATCH_SIZE = 64, 150, 4


WAYS = {
    "FP32": lambda _: None,
    "FP32, changed a little": change_a_little,
    "cast": mpgluon.cast_block,
    "autocast": lambda net: amp.autocast(net, "float16"),
}


def movement(network, way, loss_scale, *, hybridize=False):
    """Take a step, and return by how much each trained parameter has moved."""
    mx.random.seed(0)
    np.random.seed(0)
    net = getattr(gluoncv.model_zoo, NETWORKS[network])(
        dataset="ade20k",
        backbone="resnet50",
        pretrained_base=False,
        aux=True,
        base_size=SIZE,
        crop_size=SIZE,
    )
    net.initialize(mx.init.Xavier(), force_reinit=True)
    net(mx.nd.zeros((1, 3, SIZE, SIZE)))
    mx.nd.waitall()  # inference changes the layout of weights that are being read
    start = {n: p.data().asnumpy() for n, p in net.collect_params().items()}
    WAYS[way](net)
    net.hybridize(hybridize)
    options = {"learning_rate": 0.01, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer, loss_scale)
    mx.random.seed(0)  # dropout
    random = np.random.default_rng(0)
    images = mx.nd.array(random.standard_normal((BATCH_SIZE, 3, SIZE, SIZE)))
    labels = mx.nd.array(random.integers(-1, CLASSES, (BATCH_SIZE, SIZE, SIZE)))
    with autograd.record():
        loss = MixSoftmaxCrossEntropyLoss(aux=True, aux_weight=0.5)(*net(images), labels)
        with amp.scale_loss(loss, trainer) as scaled:
            autograd.backward(scaled)
    if way == "FP32, changed a little":
        start = {n: p.data().asnumpy() for n, p in net.collect_params().items()}
    trainer.step(BATCH_SIZE)
    assert not amp.step_was_skipped(trainer)
    if way == "cast":
        mpgluon.restore(net)  # to its masters
    moved = {n: p.data().asnumpy() - start[n] for n, p in net.collect_params().items()}
    return [moved[n] for n, p in net.collect_params().items() if p.grad_req != "null"]


@pytest.mark.parametrize("network", NETWORKS)
def test_it_trains_in_float16_as_far_from_fp32_as_fp32_after_a_change_of_its_weights(network):
    fp32 = movement(network, "FP32", "none")
    for one, other in zip(movement(network, "FP32", 1024), fp32):
        assert one.tobytes() == other.tobytes()
    noise = distance(movement(network, "FP32, changed a little", "none"), fp32)
    whole = length(fp32)
    for way in ("cast", "autocast"):
        for hybridize in (False, True):
            moved = movement(network, way, 1024, hybridize=hybridize)
            # Weights are rounded by as much, and so is each of a dozen values on the way.
            assert distance(moved, fp32) < 4 * noise
            # These networks are so sensitive that this alone would let one pass that stands still,
            # or moves S times too little.
            assert 0.5 < length(moved) / whole < 2
