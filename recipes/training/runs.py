"""Open the folder of a run: its network with FP32 values, its config and its class names.

Neither the images nor a Trainer are needed. ``train(config, resume=True)`` continues a run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Union

from mpgluon.base.blocks import set_value
from mpgluon.base.devices import from_numpy
from mpgluon.checkpoint import check_parameters, read_extra, read_parameters
from mpgluon.errors import CheckpointError

import mxnet as mx
import numpy as np
from mxnet import gluon

from recipes.training.checkpoints import checkpoints_of
from recipes.training.config import TrainingConfig
from recipes.training.networks import build_network

__all__ = ["OpenedRun", "newest_checkpoint", "open_run", "restored_network"]


@dataclass(frozen=True, eq=False)
class OpenedRun:
    """The content of a run's checkpoint.

    Attributes
    ----------
    net : gluon.HybridBlock
        With FP32 parameters: the averages of a run with ``--ema``, otherwise the master weights of
        a run that had them.
    config : TrainingConfig
    classes : tuple of str
        Class names in the order of the logits.
    step : int
        The number of steps before the checkpoint.
    checkpoint : Path
    """

    net: gluon.HybridBlock
    config: TrainingConfig
    classes: tuple[str, ...]
    step: int
    checkpoint: Path


def open_run(path: Union[str, Path], device: mx.Context) -> OpenedRun:
    """Open the newest checkpoint of a run, or a given one.

    Parameters
    ----------
    path : str or Path
        The run's folder, which must contain ``history.jsonl``, or a file in its folder
        ``checkpoints``.
    device : Context
        The device of the parameters.

    Raises
    ------
    CheckpointError
        If there is no checkpoint, or it is damaged or does not belong to its history.
    """
    path = newest_checkpoint(Path(path))
    extra = read_extra(path)
    config = TrainingConfig(**extra["config"])
    classes = _classes(path.parent.parent / "history.jsonl")
    net = restored_network(path, config, classes=len(classes), device=device)
    return OpenedRun(net, config, classes, extra["position"]["step"], path)


def newest_checkpoint(path: Path) -> Path:
    """Return the newest checkpoint of a run's folder, or a path that is not a folder unchanged.

    Raises
    ------
    CheckpointError
        If the folder has no checkpoint.
    """
    if not path.is_dir():
        return path
    checkpoints = checkpoints_of(path)
    if not checkpoints:
        raise CheckpointError(f"{path} holds no checkpoints/step-*.npz of a run")
    return checkpoints[-1]


def restored_network(
    checkpoint: Path, config: TrainingConfig, *, classes: int, device: mx.Context
) -> gluon.HybridBlock:
    """Return the network of a run with the FP32 values of a checkpoint, or their averages.

    Raises
    ------
    CheckpointError
        If the file is damaged, or does not fit the network.
    """
    net = build_network(
        config.model, classes=classes, image_size=config.image_size, devices=[device]
    )
    parameters = net._collect_params_with_prefix()
    values = {name: value.astype(np.float32) for name, value in read_parameters(checkpoint).items()}
    check_parameters(checkpoint, parameters, values)
    for name, parameter in parameters.items():
        set_value(parameter, from_numpy(values[name]))
    return net


def _classes(history: Path) -> tuple[str, ...]:
    try:
        with open(history) as file:
            return tuple(json.loads(file.readline())["dataset"]["classes"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{history} does not name the categories of the run ({error}); keep it in the folder "
            "that contains checkpoints/"
        ) from error
