"""Networks by name, initialized, and started from a parameter file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mxnet as mx
from mxnet import gluon
from mxnet.gluon.model_zoo import vision

from mpgluon.checkpoint import check_parameters
from mpgluon.errors import CheckpointError

__all__ = ["build_network", "load_pretrained"]


def build_network(
    name: str, *, classes: int, image_size: int, devices: Sequence[mx.Context]
) -> gluon.HybridBlock:
    """Return a classifier with FP32 parameters, all of known shape and initialized.

    Parameters
    ----------
    name : str
        In ``mxnet.gluon.model_zoo.vision`` or, failing that, ``gluoncv.model_zoo``.
    classes : int
        Length of the logits.
    image_size : int
        Side of the input in pixels; some networks need a least size.
    devices : sequence of Context
        Where the parameters live.

    Raises
    ------
    ValueError
        If no model zoo has the name, or the network does not work at that image size.
    """
    with mx.cpu():
        try:
            net = vision.get_model(name, classes=classes)
        except ValueError:
            net = _gluoncv_network(name, classes)
    net.initialize(mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2), ctx=devices)
    # One image fixes the shapes that are left open, so that everything after finds values.
    try:
        net(mx.nd.zeros((1, 3, image_size, image_size), ctx=devices[0])).wait_to_read()
    except mx.MXNetError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(
            f"{name} does not work on images of {image_size} x {image_size} pixels ({reason}); "
            "choose a larger --image-size"
        ) from error
    return net


def _gluoncv_network(name: str, classes: int) -> gluon.HybridBlock:
    from gluoncv import model_zoo  # takes a while: only where it is needed

    try:
        return model_zoo.get_model(name, classes=classes)
    except ValueError:
        raise ValueError(
            f"no model zoo has a network called {name!r}; see mxnet.gluon.model_zoo.vision and "
            "gluoncv.model_zoo for the names, for example resnet50_v2 or mobilenet1.0"
        ) from None
    except TypeError as error:
        raise ValueError(f"{name!r} is no image classifier: {error}") from None


def load_pretrained(net: gluon.Block, path: Path, *, classes: int) -> list[str]:
    """Set a network's parameters from a file, except for a head of another size.

    Parameters
    ----------
    net : gluon.Block
        Initialized, FP32.
    path : Path
        A file that ``save_parameters`` wrote; 16-bit values are widened.
    classes : int
        A parameter whose first axis has this length in ``net`` and another in the file belongs
        to the head, and keeps its initial values.

    Returns
    -------
    list of str
        The parameters that kept their initial values.

    Raises
    ------
    CheckpointError
        If the file is no parameter file, or does not fit; every difference is named, and
        nothing is changed.
    """
    try:
        values: Any = mx.nd.load(str(path))
    except mx.MXNetError as error:
        raise CheckpointError(f"{path} is not an MXNet parameter file") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds arrays without names; save with net.save_parameters")
    values = {name.removeprefix("arg:").removeprefix("aux:"): v for name, v in values.items()}
    parameters = net._collect_params_with_prefix()
    if not set(values) & set(parameters):
        parameters = {p.name: p for p in parameters.values()}  # an exported network's names
    fresh = [
        name
        for name, p in parameters.items()
        if name in values
        and values[name].shape != p.shape
        and p.shape[0] == classes
        and values[name].shape[1:] == p.shape[1:]
    ]
    widened = {name: value.astype("float32") for name, value in values.items()}
    check_parameters(
        path,
        {name: p for name, p in parameters.items() if name not in fresh},
        {name: value for name, value in widened.items() if name not in fresh},
    )
    for name, parameter in parameters.items():
        if name not in fresh:
            parameter.set_data(widened[name])
    return fresh
