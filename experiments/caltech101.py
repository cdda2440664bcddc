"""All of Caltech 101: a run of the field's protocol on small images, and what it costs on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from experiments import parity, step_times
from experiments.experiment import Experiment, Group, Outcome, Place, Record, Section
from experiments.runner import command_for
from experiments.training_runs import config_of, train_or_find
from mpgluon.data import CALTECH101
from mpgluon.tables import Table
from mpgluon.training import TrainingConfig

__all__ = ["GROUP", "PUBLISHED", "SOURCE", "Throughput", "run", "training_hours"]


@dataclass(frozen=True)
class Throughput:
    """A published speed of training ResNet-50 on ImageNet's photographs, on one GPU.

    Attributes
    ----------
    gpu, number_format : str
    images_per_second : float
        At 224 pixels, data loading included.
    """

    gpu: str
    number_format: str
    images_per_second: float


# The rows for one GPU of the tables "Training performance" for DGX-1 and DGX A100.
PUBLISHED = (
    Throughput("V100 16 GB", "FP32", 384),
    Throughput("V100 16 GB", "mixed precision", 1376),
    Throughput("A100 80 GB", "TF32", 1022),
    Throughput("A100 80 GB", "mixed precision", 2180),
)
SOURCE = (
    "[NVIDIA DeepLearningExamples, ResNet50 v1.5 for MXNet](https://github.com/NVIDIA/"
    "DeepLearningExamples/blob/134510b4b7ff6225a76805b809e414fec3163071/MxNet/Classification/"
    "RN50v1.5/README.md), container mxnet-20.12-py3, February 2021"
)
_MODEL = "resnet50_v2"
_FORMATS = ("float32", "float16", "bfloat16")
_TRAIN_PER_CLASS = 30
# A forward pass is about a third of the arithmetic of forward and backward.
_FORWARD_SHARE = 1 / 3


def experiments() -> list[Experiment]:
    """Return a run for each format."""
    return [_experiment(name) for name in _FORMATS]


def _config(number_format: str) -> TrainingConfig:
    (network,) = (one for one in parity.NETWORKS if one.name == _MODEL)
    config = parity.training_config(network, number_format, seed=0)
    return replace(config, train_per_class=_TRAIN_PER_CLASS)


def _experiment(number_format: str) -> Experiment:
    config = _config(number_format)
    return Experiment(
        f"caltech101/{_MODEL}/{number_format}",
        {"photographs": "Caltech 101", **config_of(config)},
        partial(run, config),
        needs_photographs=True,
        categories=CALTECH101.contents.categories,
    )


def run(config: TrainingConfig, place: Place) -> Outcome:
    """Train on all categories that there are."""
    return train_or_find(config, place.data_dir, place)


def training_hours(config: TrainingConfig, images_per_second: float) -> float:
    """Return how long a run takes that trains at such a speed, its tests included."""
    contents = CALTECH101.contents
    training = config.train_per_class * contents.categories
    testing = contents.category_images - training
    images = config.epochs * (training + _FORWARD_SHARE * testing)
    return images / images_per_second / 3600


def section(records: Mapping[str, Record]) -> Section:
    """Return results if there are any, commands and costs."""
    parts = [_results(records), _on_a_gpu(), _on_a_cpu(records)]
    missing = [one.name for one in experiments() if one.name not in records]
    if missing:
        parts.append(f"Not run yet: {', '.join(missing)}.")
    return Section("\n\n".join(part for part in parts if part))


def _results(records: Mapping[str, Record]) -> str:
    rows = []
    for one in experiments():
        if one.name in records:
            figures = records[one.name].outcome.figures
            loss = figures["train_loss"]
            rows.append([
                one.config["dtype"],
                f"{100 * figures['test_accuracy']:.1f}",
                "not finite" if loss is None else f"{loss:.3f}",
                f"{figures['skipped_steps']} of {figures['steps']}",
                f"{figures['final_loss_scale']:g}",
                f"`{command_for(one.name)}`",
            ])  # fmt: skip
    if not rows:
        return ""
    headings = ["format", "test accuracy (points)", "final training loss", "skipped steps",
                "final loss scale", "command"]  # fmt: skip
    config = experiments()[0].config
    return (
        f"{_MODEL} from scratch on {config['image_size']} pixels, {_TRAIN_PER_CLASS} photographs "
        f"per category for training and all others for testing, one seed:\n\n"
        f"{Table(headings, rows).to_markdown()}"
    )


def _on_a_gpu() -> str:
    config = TrainingConfig(train_per_class=_TRAIN_PER_CLASS)  # scripts/train_caltech.py's
    rows = [
        [
            one.gpu,
            one.number_format,
            f"{one.images_per_second:,.0f}",
            f"{60 * training_hours(config, one.images_per_second):.1f}",
        ]
        for one in PUBLISHED
    ]
    table = Table(["GPU", "format", "images/s", "minutes for the run"], rows).to_markdown()
    contents = CALTECH101.contents
    training = config.train_per_class * contents.categories
    testing = contents.category_images - training
    return f"""On a GPU, ResNet-50 v2 at {config.image_size} pixels:

```
python scripts/download_caltech.py --data-dir data
python scripts/train_caltech.py --dtype float16 --devices gpu:0 --output-dir runs/float16
python scripts/train_caltech.py --dtype float32 --devices gpu:0 --output-dir runs/float32
```

What to expect, from published speeds of training ResNet-50 with MXNet ({SOURCE}): {config.epochs}
epochs of {training:,} training images, and after each a test on the other {testing:,}, an image of
which counts as {_FORWARD_SHARE:.2f} of a training image. It is a sum and no measurement: batches of
{config.batch_size} are smaller than those of the source, and JPEG files have to be decoded as fast,
for which `--workers` takes more processes than {config.workers}.

{table}"""


def _on_a_cpu(records: Mapping[str, Record]) -> str:
    config = _config(_FORMATS[0])
    settings = (
        f"{config.image_size} pixels, {config.epochs} epochs, {config.optimizer}, batches of "
        f"{config.batch_size}"
    )
    text = f"""On a CPU a smaller run, with the same photographs: {settings}. If the data set is on
disk already, `--data-dir` says where:

```
python scripts/download_caltech.py --data-dir data
python scripts/evidence.py run caltech101 --data-dir data
```"""
    record = records.get(step_times.run_name(_MODEL))
    if record is None:
        return text
    times = record.outcome.times
    hours = {
        name: training_hours(config, config.batch_size / times[f"{name}/seconds"])
        for name in _FORMATS
    }
    cost = ", ".join(f"{one:.2f} hours in {name}" for name, one in hours.items())
    return (
        f"{text}\n\nBy the times per step below, with {record.threads} threads, and not measured: "
        f"{cost}."
    )


GROUP = Group("caltech101", "All of Caltech 101", experiments, section)
