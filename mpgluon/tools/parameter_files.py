"""A network's parameters from a file that ``save_parameters`` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpgluon.blocks import set_value
from mpgluon.checkpoint import check_parameters
from mpgluon.errors import CheckpointError

import mxnet as mx
from mxnet import gluon

__all__ = ["load_parameter_file"]


def load_parameter_file(net: gluon.Block, path: Path, *, classes: int) -> list[str]:
    """Set a network's parameters from a file, except for a head of another size.

    Parameters
    ----------
    net : gluon.Block
        Initialized, FP32.
    path : Path
        Written by ``save_parameters`` or ``export``; 16-bit values are widened.
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
        If the file is not a parameter file, or does not fit; every difference is named, and
        nothing is changed.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no parameter file {path}")
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
            set_value(parameter, widened[name])
    return fresh
