"""Deconvolutions of a computed weight: MXNet's results and gradients, and training in 16 bits."""

from __future__ import annotations

from itertools import product

from mpgluon import FLOAT16, amp, cast_block
from mpgluon.cast.deconvolution import deconvolution

import mxnet as mx
import numpy as np
import pytest
from helpers import assert_same_bits, backward_from
from mxnet import autograd
from mxnet.gluon import nn

PADS = (0, 0, 0), (1, 0, 2)  # the second is more than a kernel's side in one direction
MORE = (0, 0, 0), (1, 0, 2)


def results(function, arrays, options):
    for array in arrays:
        array.attach_grad()
    with autograd.record():
        result = function(*arrays, **options)
        loss = result.square().sum()
    loss.backward()
    return [result.asnumpy(), *(array.grad.asnumpy() for array in arrays)]


@pytest.mark.parametrize("as_text", [False, True], ids=["values", "texts"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride", [(1, 1, 1), (2, 1, 3)])
def test_three_dimensions_are_those_of_mxnets_own(stride, groups, as_text):
    random = np.random.default_rng(0)
    tried = 0
    for kernel, pad, more, has_bias in product(((1, 2, 3), (3, 3, 3)), PADS, MORE, (False, True)):
        if any(one >= step for one, step in zip(more, stride)):
            continue
        shapes = [(2, 4, 3, 4, 5), (4, 6 // groups, *kernel), *[(6,)] * has_bias]
        arrays = [mx.nd.array(random.standard_normal(shape)) for shape in shapes]
        options = {
            **{"kernel": kernel, "stride": stride, "pad": pad, "adj": more},
            **{"num_filter": 6, "num_group": groups, "no_bias": not has_bias},
        }
        expected = results(mx.nd.Deconvolution, arrays, options)
        if as_text:
            options = {name: str(value) for name, value in options.items()}
        for ours, mxnets in zip(results(deconvolution, arrays, options), expected):
            # Sums of fewer than 1000 products, in another order.
            size = np.abs(mxnets).max()
            np.testing.assert_allclose(ours, mxnets, rtol=0, atol=1000 * 2.0**-24 * size)
        tried += 1
    assert tried >= 8


@pytest.mark.parametrize("option", [{"dilate": (2, 2, 2)}, {"adj": (1, 0, 0)}])
def test_what_mxnet_refuses_it_refuses_still(option):
    arrays = mx.nd.ones((1, 2, 3, 3, 3)), mx.nd.ones((2, 2, 2, 2, 2))
    with pytest.raises(mx.MXNetError, match=r"Dilate is not supported|adj"):
        deconvolution(*arrays, kernel=(2, 2, 2), num_filter=2, **option).wait_to_read()


def trained(cast, layer, *, hybridize):
    mx.random.seed(0)
    net = layer(4, 3, strides=2, padding=1, output_padding=1, in_channels=2, groups=2)
    net.initialize(mx.init.Normal(1))
    cast(net)
    if hybridize:
        net.hybridize()
    images = mx.nd.random.normal(shape=(2, 2, *[3] * len(net._kwargs["kernel"])))
    images.attach_grad()
    backward_from(lambda: net(images).square().sum())
    arrays = {"images": images.grad, "weight": net.weight.grad(), "bias": net.bias.grad()}
    return {name: array.asnumpy().astype("float32") for name, array in arrays.items()}


@pytest.mark.parametrize("layer", [nn.Conv1DTranspose, nn.Conv2DTranspose, nn.Conv3DTranspose])
@pytest.mark.parametrize("cast", [cast_block, lambda net: amp.autocast(net, "float16")])
def test_a_layer_trains_in_float16_in_each_number_of_dimensions(layer, cast):
    single = trained(lambda _: None, layer, hybridize=False)
    found = trained(cast, layer, hybridize=False)
    for name, expected in single.items():
        # Operands, result and its gradient are rounded: three errors of half a last place, doubled.
        bound = 6 * FLOAT16.epsilon / 2 * np.abs(expected).max()
        assert 0 < np.abs(found[name] - expected).max() <= bound, name
    assert_same_bits(found, trained(cast, layer, hybridize=True))
