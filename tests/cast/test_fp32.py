"""The FP32 values of float16 parameters: a cast stores them, and restore removes them."""

from __future__ import annotations

import mpgluon
from mpgluon.cast import fp32

import mxnet as mx
import numpy as np
from helpers import in_sequence, initialized
from mxnet.gluon import nn

TENTHS = np.full((3, 4), 0.1, dtype=np.float32)


def dense():
    return initialized(nn.Dense(3, in_units=4, weight_initializer=mx.init.Constant(0.1)))


def test_a_cast_keeps_fp32_values_and_restore_drops_them():
    layer = dense()
    assert fp32.known(layer.weight) is None
    mpgluon.cast_block(layer)
    assert fp32.known(layer.weight).asnumpy().tobytes() == TENTHS.tobytes()
    mpgluon.restore(layer)
    assert fp32.known(layer.weight) is None
    assert layer.weight.data().asnumpy().tobytes() == TENTHS.tobytes()


def test_values_are_remembered_for_parameters_of_cast_networks_only():
    plain, cast = dense(), dense()
    plain.cast("float16")
    mpgluon.cast_block(cast)
    for layer in (plain, cast):
        fp32.remember(layer.weight, mx.nd.array(TENTHS * 2))
    assert fp32.known(plain.weight) is None
    assert fp32.known(cast.weight).asnumpy().tobytes() == (TENTHS * 2).tobytes()


def test_a_weight_that_two_cast_networks_share_gets_its_bits_back_when_either_is_restored():
    layer = dense()
    networks = in_sequence(layer), in_sequence(nn.Dense(3, params=layer.collect_params()))
    for net in networks:
        mpgluon.cast_block(net)
    assert layer.weight.data().dtype == np.float16
    for net in reversed(networks):
        mpgluon.restore(net)
        assert layer.weight.data().asnumpy().tobytes() == TENTHS.tobytes()
        assert networks[0](mx.nd.ones((2, 4))).dtype == np.float32


def test_elements_that_were_written_are_widened_and_the_others_keep_their_values():
    weight = mx.nd.array([0.1, 0.5, 0.1], dtype="float16")
    known = mx.nd.array([0.1, 0.1, np.inf])
    value = fp32.fp32_value(weight, known)
    assert value is known
    assert value.asnumpy().tolist() == [np.float32(0.1), 0.5, np.float32(np.float16(0.1))]


def test_a_weight_that_was_drawn_from_an_array_is_cast_after_a_hybridized_call_and_restored():
    # MXNet's Constant of an array gives a parameter one symbol, and fails at the second.
    values = mx.nd.arange(12).reshape((3, 4))
    layer = initialized(nn.Dense(3, in_units=4, weight_initializer=mx.init.Constant(values)))
    layer.hybridize()
    images = mx.nd.ones((2, 4))
    expected = layer(images).asnumpy()
    for change in (mpgluon.cast_block, mpgluon.restore, mpgluon.cast_block):
        change(layer)
        assert layer(images).asnumpy().tolist() == expected.tolist()
