"""Parameters from a file that ``save_parameters`` wrote; which files are state dicts instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Union

from mpgluon.base.blocks import set_value, shape_of
from mpgluon.checkpoint.parameters import check_parameters, completed, is_possible_shape
from mpgluon.errors import CheckpointError

import mxnet as mx
from mxnet import gluon

__all__ = ["is_state_dict_file", "load_parameter_file"]

_STATE_DICTS = (".safetensors", ".pth", ".pt", ".bin")


def is_state_dict_file(path: Union[str, Path]) -> bool:
    """Return whether a file's name ends as a state dict's: .safetensors, .pth, .pt or .bin."""
    return Path(path).suffix.lower() in _STATE_DICTS


def load_parameter_file(net: gluon.Block, path: Path, *, classes: int) -> list[str]:
    """Set a network's parameters from a file, except for a head of another size.

    Parameters
    ----------
    net : gluon.Block
        Initialized, FP32; shapes that wait for the first call are taken from the file.
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
    except (mx.MXNetError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not an MXNet parameter file") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds arrays without names; save with net.save_parameters")
    values = {name.removeprefix("arg:").removeprefix("aux:"): v for name, v in values.items()}
    parameters = net._collect_params_with_prefix()
    if not set(values) & set(parameters):
        parameters = {p.name: p for p in parameters.values()}  # an exported network's names
    fresh = [
        name
        for name, parameter in parameters.items()
        if name in values and _is_another_head(shape_of(parameter), values[name].shape, classes)
    ]
    old = {name: p for name, p in parameters.items() if name not in fresh}
    widened = {n: value.astype("float32") for n, value in values.items() if n not in fresh}
    with completed(old, widened):
        check_parameters(path, old, widened)
    for name, parameter in old.items():
        set_value(parameter, widened[name])
    return fresh


def _is_another_head(shape: tuple[int, ...], of_file: tuple[int, ...], classes: int) -> bool:
    """Whether shapes differ in the number of classes, and there alone."""
    if not shape or not of_file:
        return False
    return shape[0] == classes != of_file[0] and is_possible_shape(shape[1:], of_file[1:])
