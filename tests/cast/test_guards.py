"""Gluon's own ``cast`` on a cast network: FP32 values come back, or it is refused."""

from __future__ import annotations

import copy

import mpgluon
from mpgluon import amp

import mxnet as mx
import numpy as np
import pytest
from helpers import in_sequence, with_loss_scale
from mxnet import autograd, gluon
from mxnet.gluon import nn

DOORS = {
    "the network": lambda net, dtype: net.cast(dtype),
    "a network around it": lambda net, dtype: in_sequence(net).cast(dtype),
    "a copy": lambda net, dtype: copy.deepcopy(net).cast(dtype),
    "a part": lambda net, dtype: net[0].cast(dtype),
    "a parameter": lambda net, dtype: net[0].weight.cast(dtype),
    "all parameters": lambda net, dtype: net.collect_params().setattr("dtype", dtype),
}


def trained(cast, *, steps, hybridize=False):
    """Return a network of two layers with one weight, and its FP32 value: NumPy's."""
    layer = nn.Dense(1, in_units=1, use_bias=False)
    net = in_sequence(layer, nn.Dense(1, in_units=1, use_bias=False, params=layer.params))
    net.initialize(mx.init.One())
    cast(net)
    if hybridize:
        net.hybridize()
    sgd = {"learning_rate": 1e-5, "multi_precision": True}
    value = np.ones((1, 1), np.float32)
    for step in range(steps):
        if step == 0:
            trainer = with_loss_scale(gluon.Trainer(net.collect_params(), "sgd", sgd), 64)
        with autograd.record(), amp.scale_loss(net(mx.nd.ones((1, 1))), trainer) as scaled:
            scaled.backward()
        trainer.step(1)
        value -= np.float32(1e-5) * 2  # a 16-bit weight is 1 all the time, and the gradient 2
    return net, value


def to(dtype, cast=mpgluon.cast_block):
    return lambda net: cast(net, dtype)


@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("cast", [to("float16"), to("bfloat16"), to("float16", amp.autocast)])
@pytest.mark.parametrize("dtype", ["float32", np.float64])
def test_a_network_that_gluon_casts_has_its_fp32_values_and_computes_with_them(
    dtype, cast, hybridize, steps, caplog
):
    net, value = trained(cast, steps=steps, hybridize=hybridize)
    inside = in_sequence(net)
    inside.cast(dtype)
    assert np.dtype(net[0].weight.dtype) == dtype
    assert net[1].weight.data().asnumpy().astype("float32").tobytes() == value.tobytes()
    assert "mpgluon.restore" in caplog.text
    result = inside(mx.nd.ones((1, 1), dtype=dtype))
    assert result.dtype == np.dtype(dtype)
    assert result.asnumpy() == pytest.approx(value.astype("float64") ** 2, rel=2**-23)
    net.cast("float16")  # of a plain network now: Gluon's own
    assert np.dtype(net[0].weight.dtype) == "float16"


@pytest.mark.parametrize("cast", [to("float16"), to("bfloat16")])
def test_a_part_that_gluon_casts_to_fp32_is_fp32_in_a_cast_network(cast):
    net, value = trained(cast, steps=4)
    net[0].cast("float32")
    assert net[0].weight.data().asnumpy().tobytes() == value.tobytes()
    assert net(mx.nd.ones((1, 1))).asnumpy() == 1  # the other layer rounds the weight
    net.cast("float32")
    assert net(mx.nd.ones((1, 1))).asnumpy() == pytest.approx(value**2, rel=2**-23)


@pytest.mark.parametrize("steps", [0, 4])
@pytest.mark.parametrize("cast", [to("float16"), to("bfloat16"), to("float16", amp.autocast)])
@pytest.mark.parametrize(
    ("door", "dtype"),
    [
        *((door, "float16") for door in list(DOORS)[:4]),
        *((door, "bfloat16") for door in list(DOORS)[:4]),
        *((door, "float64") for door in list(DOORS)[3:]),
    ],
)
def test_a_cast_that_would_lose_fp32_values_is_refused_and_changes_nothing(
    door, dtype, cast, steps
):
    net, value = trained(cast, steps=steps)
    before = net[0].weight.dtype
    with pytest.raises(mpgluon.PrecisionError, match=r"call mpgluon\.restore on hybridsequential"):
        DOORS[door](net, dtype)
    assert net[0].weight.dtype == before
    mpgluon.restore(net)
    assert net[1].weight.data().asnumpy().tobytes() == value.tobytes()


def test_a_file_of_fp32_parameters_does_not_change_the_format_of_a_cast_network(tmp_path):
    path = str(tmp_path / "fp32.params")
    net, _ = trained(mpgluon.restore, steps=0)
    net.save_parameters(path)
    net, value = trained(to("float16"), steps=4)
    with pytest.raises(mpgluon.PrecisionError, match=r"mpgluon\.restore"):
        net.load_parameters(path, cast_dtype=True, dtype_source="saved")
    mpgluon.restore(net)
    assert net[0].weight.data().asnumpy().tobytes() == value.tobytes()
