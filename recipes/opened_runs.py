"""Training, its runs and state dicts, as commands of ``mpgluon`` take them from ``recipes``.

``mpgluon_tools.commands.checkout`` finds this module by the entry point in ``pyproject.toml``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mpgluon.checkpoint import read_extra
from mpgluon_tools.commands.networks import OpenedNetwork
from mpgluon_tools.diagnostics.observe import Batch
from mpgluon_tools.onnx.metadata import IMAGENET_MEAN, IMAGENET_STD, ServingMetadata

import mxnet as mx
from mxnet import gluon

from recipes.finetune import finetune
from recipes.training import TrainingConfig
from recipes.training.dataset import open_dataset
from recipes.training.networks import load_pretrained
from recipes.training.runs import newest_checkpoint, open_run, restored_network

__all__ = ["finetune", "load_pretrained", "open_a_run", "open_a_run_with_images"]


def open_a_run(path: Path, device: mx.Context) -> OpenedNetwork:
    """Return the network of a run, named by its folder or a checkpoint, with its categories.

    Raises
    ------
    CheckpointError
        If the folder or file does not belong to a run.
    """
    run = open_run(path, device)
    about = [f"{run.config.model} after step {run.step:,}, {run.checkpoint}"]
    crop = 1.0 if run.config.shifts else ServingMetadata.centre_crop
    images = {"centre_crop": crop, "mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    size, classes = run.config.size_in_use, run.classes
    return OpenedNetwork(run.net, run.config.model, about, size, classes, preprocessing=images)


def open_a_run_with_images(path: Path, device: mx.Context, batch_size: int) -> OpenedNetwork:
    """Return the network of a run and a batch of its training images; needs no history.

    Raises
    ------
    CheckpointError
        If the folder or file does not belong to a run.
    """
    path = newest_checkpoint(path)
    extra = read_extra(path)
    config = TrainingConfig(**extra["config"])
    config = replace(config, workers=0, batch_size=batch_size)
    dataset = open_dataset(config)
    net = restored_network(path, config, classes=len(dataset.folder.classes), device=device)
    batches, _ = dataset.loaders(config, 1)
    batches.set_epoch(0, 0)
    images, labels = (one.as_in_context(device) for one in next(iter(batches)))
    about = [
        f"{config.model} after step {extra['position']['step']} of {path.parent.parent} "
        f"({config.dtype}).",
        f"{batch_size} training images of {dataset.name}, {config.image_size} pixels.",
    ]
    batch = Batch(images.astype("float32"), labels, gluon.loss.SoftmaxCrossEntropyLoss())
    return OpenedNetwork(net, config.model, about, config.image_size, batch=batch)
