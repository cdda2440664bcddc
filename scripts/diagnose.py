"""Show the effect of 16 bits on a network: ranges, errors, shapes, on one HTML page."""

from __future__ import annotations

import argparse
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # recipes/ is not installed

from mpgluon.checkpoint import read_extra
from mpgluon.devices import parse_devices
from mpgluon.diagnostics.observe import Batch
from mpgluon.errors import MpgluonError
from mpgluon.tools.report import diagnose

import mxnet as mx
import numpy as np
from mxnet import gluon
from tqdm import tqdm

from recipes.options import positive
from recipes.training import TrainingConfig
from recipes.training.dataset import open_dataset
from recipes.training.networks import build_network, load_pretrained
from recipes.training.runs import newest_checkpoint, restored_network

STEPS = 7  # of diagnose


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Parse the command line, examine the network, print the tables, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "network",
        help="the name of a network in a model zoo; module:function that returns an initialized "
        "network; or a checkpoint (.npz) of train_caltech.py or the folder of such a run, which is "
        "examined on images of its data set",
    )
    parser.add_argument("--parameters", metavar="FILE", help="a .params file for a zoo's network")
    parser.add_argument("--classes", type=positive, default=101)
    parser.add_argument("--image-size", type=positive, default=224, help="pixels; not for a run")
    parser.add_argument("--batch-size", type=positive, default=8)
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
    parser.add_argument("--device", default="cpu", help="cpu or gpu:0")
    parser.add_argument("--seed", type=int, default=0, help="seed of random weights and images")
    parser.add_argument("--output", metavar="FILE", default="report.html")
    options = parser.parse_args(arguments)
    try:
        (device,) = parse_devices(options.device)
        mx.random.seed(options.seed)
        np.random.seed(options.seed)
        net, images, labels, about = _network_and_batch(options, device)
        loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
        with tqdm(total=STEPS, leave=False, disable=None) as bar:

            def progress(what: str) -> None:
                bar.set_description(what)
                bar.update()

            page = diagnose(
                net,
                Batch(images, labels, loss_fn),
                title=f"{options.network} in {options.dtype}",
                about=about,
                dtype=options.dtype,
                progress=progress,
            )
        print(page)
        page.write(Path(options.output))
    except (ValueError, TypeError, ImportError, AttributeError, OSError, MpgluonError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\nwritten to {options.output}")
    return 0


def _network_and_batch(
    options: argparse.Namespace, device: mx.Context
) -> tuple[gluon.HybridBlock, mx.nd.NDArray, mx.nd.NDArray, list[str]]:
    path = newest_checkpoint(Path(options.network))
    if path.suffix == ".npz":
        return _of_a_run(path, options.batch_size, device)
    if ":" in options.network:
        sys.path.insert(0, "")  # modules of the current folder, as with python -m
        net: Any = pkgutil.resolve_name(options.network)()
        if not isinstance(net, gluon.HybridBlock):
            raise TypeError(f"{options.network} returned {type(net).__name__}, not a HybridBlock")
        if any(p._data is None and not p._deferred_init for p in net.collect_params().values()):
            raise ValueError(f"{options.network} must initialize its network: net.initialize()")
        about = [f"{type(net).__name__} from {options.network}."]
    else:
        net = build_network(
            options.network,
            classes=options.classes,
            image_size=options.image_size,
            devices=[device],
        )
        about = [f"{options.network} of the model zoo with {options.classes} classes."]
    if options.parameters:
        load_pretrained(net, Path(options.parameters), classes=options.classes)
        about.append(f"Parameters from {options.parameters}.")
    else:
        about.append("Weights as they were drawn: an untrained network.")
    shape = (options.batch_size, 3, options.image_size, options.image_size)
    images = mx.nd.random.normal(shape=shape, ctx=device)
    classes = net(images).shape[1]
    labels = mx.nd.arange(options.batch_size, ctx=device) % classes
    about.append(f"Images of normal noise, {shape}: no data set.")
    return net, images, labels, about


def _of_a_run(
    path: Path, batch_size: int, device: mx.Context
) -> tuple[gluon.HybridBlock, mx.nd.NDArray, mx.nd.NDArray, list[str]]:
    extra = read_extra(path)
    config = replace(TrainingConfig(**extra["config"]), workers=0, batch_size=batch_size)
    dataset = open_dataset(config)
    net = restored_network(path, config, classes=len(dataset.folder.classes), device=device)
    batches, _ = dataset.loaders(config, 1)
    batches.set_epoch(0, 0)
    images, labels = next(iter(batches))
    step = extra["position"]["step"]
    about = [
        f"{config.model} after step {step} of {path.parent.parent} ({config.dtype}).",
        f"{batch_size} training images of {dataset.name}, {config.image_size} pixels.",
    ]
    return net, images.astype("float32").as_in_context(device), labels.as_in_context(device), about


if __name__ == "__main__":
    sys.exit(main())
