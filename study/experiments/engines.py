"""The fine-tuned network in four engines: what each answers, how long it takes, and its memory.

The network is from :mod:`study.experiments.imagenet_weights`, trained in FP16 with seed 0.
OpenVINO has an environment of its own, which ``make test WITH=peers`` makes.
"""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mpgluon.errors import DataError
from mpgluon_tools.deployment import inference_network
from mpgluon_tools.onnx import export_onnx

import mxnet as mx
import numpy as np
import onnxruntime  # type: ignore[import-untyped]

from recipes.data import CALTECH101
from recipes.training.dataset import open_dataset
from recipes.training.runs import open_run
from study.benchmarks.cases import CaseOptions, inference
from study.benchmarks.machine import usable_cores
from study.experiments import figures, imagenet_weights
from study.experiments.experiment import Experiment, Group, Outcome, Place, Records
from study.experiments.photographs import whole_tree
from study.experiments.races import complete_race, times_of
from study.experiments.training_runs import run_beside

__all__ = ["ENGINES", "GROUP"]

_NAME = f"engines/{imagenet_weights.RECIPE.model}"
_OPENVINO = Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"
_PER_CATEGORY = 10  # test images
_BATCHES = (1, 8)
_ROUNDS = 15
_CONFIG = {
    "run": imagenet_weights.FLOAT16.name,
    "test_images_per_category": _PER_CATEGORY,
    "batches": list(_BATCHES),
    "rounds": _ROUNDS,
}
ENGINES = {
    "Gluon float32": "MXNet, FP32",
    "mpgluon float32, folded": "`inference_network`, FP32",
    "mpgluon float16, folded": "`inference_network`, FP16",
    "mpgluon bfloat16, folded": "`inference_network`, BF16",
    "onnxruntime float32": "ONNX Runtime, FP32",
    "OpenVINO float32": "OpenVINO, FP32",
    "OpenVINO bfloat16": "OpenVINO, BF16",
}
"""The benchmark's contestants, in words."""

_IN_OPENVINO = """
import sys
import numpy, openvino

folder, core = sys.argv[1], openvino.Core()
images = numpy.load(f"{folder}/images.npy", mmap_mode="r")
for precision in ("f32", "bf16"):
    network = core.compile_model(
        f"{folder}/net.onnx", "CPU", {"INFERENCE_PRECISION_HINT": precision}
    )
    parts = [network([images[begin:begin + 32]])[0] for begin in range(0, len(images), 32)]
    numpy.save(f"{folder}/{precision}.npy", numpy.concatenate(parts))
"""


def _measure(place: Place) -> Outcome:
    if not _OPENVINO.exists():
        raise DataError("OpenVINO's own environment is not there; `make test WITH=peers` makes it")
    folder, _ = run_beside(place, imagenet_weights.FLOAT16)
    logits, labels = _answers(folder, place)
    reference = logits["Gluon float32"]
    found: dict[str, Any] = {"images": len(labels)}
    for name, one in logits.items():
        best = one.argmax(axis=1)
        found[f"{name}/correct"] = int((best == labels).sum())
        found[f"{name}/same"] = int((best == reference.argmax(axis=1)).sum())
    return Outcome(figures=found, times=_times())


def _answers(folder: Path, place: Place) -> tuple[dict[str, Any], Any]:
    """Return the logits of each engine for some test images, and their labels."""
    opened = open_run(folder, mx.cpu())
    config = replace(
        opened.config,
        dtype="float32",
        data_dir=str(whole_tree(place)),
        workers=0,
        test_per_class=_PER_CATEGORY,
    )
    _, batches = open_dataset(config).loaders(config, 1)
    parts = [(images.asnumpy(), labels.asnumpy()) for images, labels in batches]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts))

    def by_mxnet(net: Any) -> Any:
        return np.concatenate([net(mx.nd.array(part)).asnumpy() for part, _ in parts])

    net = opened.net
    net.hybridize(static_alloc=True)
    typical = mx.nd.array(parts[0][0])
    logits = {"Gluon float32": by_mxnet(net)}
    for dtype in ("float32", "float16", "bfloat16"):
        fast = inference_network(net, dtype, fuse_for=typical)
        logits[f"mpgluon {dtype}, folded"] = by_mxnet(fast)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        export_onnx(net, scratch / "net.onnx", input_shapes=[images[:1].shape])
        np.save(scratch / "images.npy", images)
        session = onnxruntime.InferenceSession(
            str(scratch / "net.onnx"), providers=["CPUExecutionProvider"]
        )
        logits["onnxruntime float32"] = np.concatenate(
            [session.run(None, {"data": part})[0] for part, _ in parts]
        )
        subprocess.run([str(_OPENVINO), "-c", _IN_OPENVINO, name], check=True)
        for dtype, precision in (("float32", "f32"), ("bfloat16", "bf16")):
            logits[f"OpenVINO {dtype}"] = np.load(scratch / f"{precision}.npy")
    return logits, labels


def _times() -> dict[str, float]:
    """Return seconds of a batch, over MXNet's in FP32, and peaks of memory, by batch and engine."""
    recipe, threads = imagenet_weights.RECIPE, usable_cores()
    options = CaseOptions(
        model=recipe.model,
        image_size=recipe.test_image_size,
        batch_sizes=_BATCHES,
        openvino_python=str(_OPENVINO),
    )
    times: dict[str, float] = {"threads": threads}
    for batch, case in zip(_BATCHES, inference(options)):
        chosen = [one for one in case.contestants if one.name in ENGINES]
        result = complete_race(replace(case, contestants=chosen), threads=threads, rounds=_ROUNDS)
        for one in result.results:
            times.update(times_of(result, one, f"{one.name}/{batch}"))
    return times


@dataclass(frozen=True)
class _Engines:
    """The record, and values computed from it."""

    records: Records
    batches = _BATCHES

    @property
    def outcome(self) -> Outcome:
        """The outcome of the record."""
        return self.records[_NAME].outcome

    def table(self) -> list[list[str]]:
        """Return the cells of the table of all engines; none without a record."""
        if _NAME not in self.records:
            return []
        found, times = self.outcome.figures, self.outcome.times
        return [
            [
                words,
                f"{100 * found[f'{name}/correct'] / found['images']:.1f}",
                f"{found[f'{name}/same']:,} of {found['images']:,}",
                *(f"{1000 * times[f'{name}/{batch}/seconds']:.1f}" for batch in _BATCHES),
                *(f"{times[f'{name}/{batch}/relative']:.2f}" for batch in _BATCHES),
                f"{times[f'{name}/{_BATCHES[-1]}/peak_memory_mib']:.0f}",
            ]
            for name, words in ENGINES.items()
        ]

    @property
    def fewest_same(self) -> float:
        """The least share of images that an engine puts into the category of MXNet in FP32."""
        found = self.outcome.figures
        return float(min(found[f"{name}/same"] for name in ENGINES) / found["images"])

    def fastest(self, batch: int) -> str:
        """Return the engine with the shortest time of a batch, in words."""
        times = self.outcome.times
        return ENGINES[min(ENGINES, key=lambda name: times[f"{name}/{batch}/relative"])]


def _draw(figure: Any, records: Records) -> None:
    times = _Engines(records).outcome.times
    points = {
        words.replace("`", ""): [times[f"{name}/{batch}/relative"] for batch in _BATCHES]
        for name, words in ENGINES.items()
    }
    figures.draw_engines(figure, points, _BATCHES)


GROUP = Group(
    "engines",
    [
        Experiment(
            _NAME,
            _CONFIG,
            _measure,
            needs_photographs=True,
            categories=CALTECH101.contents.categories,
            needs_quiet=True,
        )
    ],
    _Engines,
    {"engines": _draw},
)
