"""Runs of ``train_caltech.py`` as networks that the commands of ``mpgluon_tools.commands`` take."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Optional

from mpgluon.checkpoint import read_extra
from mpgluon_tools.commands.networks import OpenedNetwork
from mpgluon_tools.diagnostics.observe import Batch
from mpgluon_tools.onnx.metadata import IMAGENET_MEAN, IMAGENET_STD, ServingMetadata

import mxnet as mx
from mxnet import gluon

from recipes.training import TrainingConfig
from recipes.training.dataset import open_dataset
from recipes.training.runs import newest_checkpoint, open_run, restored_network

__all__ = ["RUNS", "open_a_run", "open_a_run_with_images"]

RUNS = "; or the folder of a run of train_caltech.py, or one of its checkpoints (.npz)"


def open_a_run(options: argparse.Namespace, device: mx.Context) -> Optional[OpenedNetwork]:
    """Return the network of a run with its categories; None if ``options.network`` is not a run.

    Raises
    ------
    CheckpointError
        If the folder or file is not that of a run.
    """
    path = Path(options.network)
    if not path.is_dir() and path.suffix != ".npz":
        return None
    run = open_run(path, device)
    about = [f"{run.config.model} after step {run.step:,}, {run.checkpoint}"]
    crop = 1.0 if run.config.shifts else ServingMetadata.centre_crop
    images = {"centre_crop": crop, "mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    size, classes = run.config.size_in_use, run.classes
    return OpenedNetwork(run.net, run.config.model, about, size, classes, preprocessing=images)


def open_a_run_with_images(
    options: argparse.Namespace, device: mx.Context
) -> Optional[OpenedNetwork]:
    """Return the network of a run and a batch of its training images; needs no history.

    Raises
    ------
    CheckpointError
        If the folder or file is not that of a run.
    """
    path = newest_checkpoint(Path(options.network))
    if path.suffix != ".npz":
        return None
    extra = read_extra(path)
    config = TrainingConfig(**extra["config"])
    config = replace(config, workers=0, batch_size=options.batch_size)
    dataset = open_dataset(config)
    net = restored_network(path, config, classes=len(dataset.folder.classes), device=device)
    batches, _ = dataset.loaders(config, 1)
    batches.set_epoch(0, 0)
    images, labels = (one.as_in_context(device) for one in next(iter(batches)))
    about = [
        f"{config.model} after step {extra['position']['step']} of {path.parent.parent} "
        f"({config.dtype}).",
        f"{options.batch_size} training images of {dataset.name}, {config.image_size} pixels.",
    ]
    batch = Batch(images.astype("float32"), labels, gluon.loss.SoftmaxCrossEntropyLoss())
    return OpenedNetwork(net, config.model, about, config.image_size, batch=batch)
