"""A run's folder, opened again: its network with FP32 values, its config and its categories.

It needs neither the images nor a Trainer. A run is continued by ``train(config, resume=True)``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Union

import mxnet as mx
import numpy as np
from mxnet import gluon

from mpgluon.checkpoint import check_parameters, read_extra, read_parameters
from mpgluon.errors import CheckpointError
from mpgluon.training.config import TrainingConfig
from mpgluon.training.networks import build_network

__all__ = ["OpenedRun", "open_run"]


@dataclass(frozen=True, eq=False)
class OpenedRun:
    """What a run's checkpoint holds.

    Attributes
    ----------
    net : gluon.HybridBlock
        In FP32: master weights where the run had them.
    config : TrainingConfig
    classes : tuple of str
        In the order of the logits.
    step : int
        After how many steps.
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
        The run's folder, or a file in its folder ``checkpoints``. ``history.jsonl`` must lie in the
        run's folder.
    device : Context
        Where the network lives.

    Raises
    ------
    CheckpointError
        If there is no checkpoint, or it is damaged, or does not belong to its history.
    """
    path = Path(path)
    if path.is_dir():
        checkpoints = sorted((path / "checkpoints").glob("step-*.npz"))
        if not checkpoints:
            raise CheckpointError(f"{path} holds no checkpoints/step-*.npz of a run")
        path = checkpoints[-1]
    extra = read_extra(path)
    config = TrainingConfig(**extra["config"])
    classes = _classes(path.parent.parent / "history.jsonl")
    net = build_network(
        config.model, classes=len(classes), image_size=config.image_size, devices=[device]
    )
    parameters = net._collect_params_with_prefix()
    values = {name: value.astype(np.float32) for name, value in read_parameters(path).items()}
    check_parameters(path, parameters, values)
    for name, parameter in parameters.items():
        parameter.set_data(mx.nd.array(values[name], dtype="float32"))
    return OpenedRun(net, config, classes, extra["position"]["step"], path)


def _classes(history: Path) -> tuple[str, ...]:
    try:
        with open(history) as file:
            return tuple(json.loads(file.readline())["dataset"]["classes"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{history} does not name the categories of the run ({error}); keep it in the folder "
            "above that of the checkpoints"
        ) from error
