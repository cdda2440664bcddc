"""Devices by name."""

from __future__ import annotations

import mxnet as mx
import pytest

from mpgluon.devices import parse_devices
from mpgluon.errors import PrecisionError


@pytest.mark.parametrize(
    ("text", "indices"),
    [("cpu", [0]), ("cpu:0", [0]), ("cpu:1", [1]), ("cpu:0,1", [0, 1]), ("cpu:2,0,1", [2, 0, 1])],
)
def test_a_text_names_contexts_in_its_order(text, indices):
    assert parse_devices(text) == [mx.cpu(index) for index in indices]


def test_gpus_that_mxnet_sees_are_named_alike(monkeypatch):
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 2)
    assert parse_devices("gpu") == [mx.gpu(0)]
    assert parse_devices("gpu:1") == [mx.gpu(1)]
    assert parse_devices("gpu:1,0") == [mx.gpu(1), mx.gpu(0)]


def test_the_first_gpu_beyond_those_that_mxnet_sees_is_refused_with_advice(monkeypatch):
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 2)
    with pytest.raises(PrecisionError, match=r"'gpu:0,2' names gpu\(2\), .* sees 2 GPUs; use"):
        parse_devices("gpu:0,2")
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 0)
    with pytest.raises(PrecisionError, match=r"'gpu' names gpu\(0\), .* sees 0 GPUs; use"):
        parse_devices("gpu")


@pytest.mark.parametrize(
    "text",
    ["", "tpu", "CPU", "cpu0", "cpu:x", "cpu:0,", "cpu:,0", "cpu:-1", "gpu:1.0", "gpu:0:1", ":0"],
)
def test_a_text_of_another_form_is_refused(text):
    with pytest.raises(ValueError, match=r'^devices are "cpu", "gpu" or like "gpu:0,1"') as error:
        parse_devices(text)
    assert str(error.value).endswith(f"received {text!r}")


@pytest.mark.parametrize("text", ["cpu:0,0", "cpu:1,0,1", "gpu:0,0"])
def test_a_device_named_twice_is_refused(text):
    with pytest.raises(ValueError, match=f"each device can be used once; received {text!r}"):
        parse_devices(text)
