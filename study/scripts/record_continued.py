"""Train a ResNet-50 in FP16 in MXNet, go on in PyTorch and in MXNet, and record both losses.

    python study/scripts/record_continued.py --torch-python .venv-peers/bin/python \
        --photographs data/caltech101 --output continued.json

The Python of --torch-python has PyTorch and safetensors, and no MXNet. Both libraries see the same
photographs in the same order.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # study/ is not installed

import mpgluon
from mpgluon import amp
from mpgluon.deployment import export_torch
from mpgluon.tools.zoo import build_network

import mxnet as mx
import numpy as np
from matplotlib.figure import Figure
from mxnet import autograd, gluon
from PIL import Image

from study.experiments.figures import WIDTH
from study.experiments.ports import draw_continued

SIZE, BATCH, BEFORE, AFTER = 64, 16, 80, 30
_GO_ON = """
import json
import sys

import numpy as np
import torch
import torch.nn.functional as F
from model import load
from training import training

net = load()
optimizer, scaler = training(net, device="cpu")
batches = np.load("batches.npz")
found = []
for images, labels in zip(batches["images"], batches["labels"]):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(net(torch.from_numpy(images)).float(), torch.from_numpy(labels))
    found.append([float(loss.detach()), scaler.get_scale()])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(json.dumps(found))
"""


def main() -> int:
    """Train, go on, and write the losses and loss scales of each step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch-python", type=Path, required=True, help="with PyTorch")
    parser.add_argument("--photographs", type=Path, required=True, help="a folder a category")
    parser.add_argument("--output", type=Path, required=True, help="the record")
    options = parser.parse_args()
    images, labels, names = _photographs(options.photographs)
    random = np.random.default_rng(0)
    order = np.concatenate([random.permutation(len(images)) for _ in range(40)])
    order = order[: (BEFORE + AFTER) * BATCH].reshape(-1, BATCH)
    mx.random.seed(0)
    np.random.seed(0)
    net = build_network("resnet50_v1", classes=names, image_size=SIZE, devices=[mx.cpu()])
    mpgluon.cast_block(net)
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = gluon.Trainer(
        net.collect_params(), "adam", {"learning_rate": 1e-4, "multi_precision": True}
    )
    amp.init_trainer(trainer)
    before = [_step(net, trainer, images[batch], labels[batch]) for batch in order[:BEFORE]]
    with tempfile.TemporaryDirectory() as name:
        folder = export_torch(net, name, [(BATCH, 3, SIZE, SIZE)], trainer=trainer)
        rest = order[BEFORE:]
        np.savez(folder / "batches.npz", images=images[rest], labels=labels[rest])
        done = subprocess.run(
            [str(options.torch_python), "-c", _GO_ON], cwd=folder, capture_output=True, text=True
        )
    if done.returncode:
        raise RuntimeError(done.stderr)
    in_mxnet = [_step(net, trainer, images[batch], labels[batch]) for batch in rest]
    found = {"before": before, "mxnet": in_mxnet, "torch": json.loads(done.stdout)}
    options.output.write_text(json.dumps(found) + "\n")
    figure = Figure(figsize=(WIDTH, 3), layout="constrained")
    draw_continued(figure, found)
    figure.savefig(options.output.with_suffix(".png"), dpi=160)
    return 0


def _photographs(folder: Path) -> tuple[Any, Any, int]:
    """Return up to 60 photographs of each of the first 10 categories, and their categories."""
    categories = sorted(path for path in folder.iterdir() if path.is_dir())[:10]
    images, labels = [], []
    for number, category in enumerate(categories):
        for path in sorted(category.glob("*.jpg"))[:60]:
            with Image.open(path) as image:
                small = image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR)
            images.append(np.asarray(small, np.float32).transpose(2, 0, 1) / 64 - 2)
            labels.append(number)
    return np.stack(images), np.array(labels), len(categories)


def _step(
    net: gluon.HybridBlock, trainer: gluon.Trainer, images: Any, labels: Any
) -> tuple[float, float]:
    """Make a step, and return its loss and loss scale."""
    scale = amp.loss_scale(trainer)
    with autograd.record():
        logits = net(mx.nd.array(images).astype("float16"))
        loss = gluon.loss.SoftmaxCrossEntropyLoss()(logits.astype("float32"), mx.nd.array(labels))
        with amp.scale_loss(loss, trainer) as scaled_loss:
            autograd.backward(scaled_loss)
    trainer.step(len(images))
    return float(loss.mean().asscalar()), float(scale)


if __name__ == "__main__":
    sys.exit(main())
