"""The real experiments: their settings are valid, and each kind runs, shortened, to its end."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

from mpgluon import Policy

import numpy as np
import pytest

from recipes.data import render_shapes
from recipes.training import TrainingConfig
from study.experiments import caltech101, parity
from study.experiments.ablations import ABLATIONS
from study.experiments.experiment import Place
from study.experiments.gan import GanSettings
from study.experiments.gan import train as train_gan
from study.experiments.groups import GROUPS
from study.experiments.loop import FORMATS
from study.experiments.reader import ReaderSettings
from study.experiments.reader import train as train_reader
from study.experiments.training_runs import train_or_find

pytestmark = pytest.mark.slow  # figures are made by hand, and rarely

ALL = {one.name: one for group in GROUPS for one in group.experiments}
SHORT = {
    "masters": {"steps": 100, "images_per_class": 4, "image_size": 8, "every": 20},
    "underflow": {"steps": 6, "images_per_class": 1, "batch_size": 8, "every": 3},
    "batch_norm": {"steps": 6, "images_per_class": 4, "every": 2},
    "loss_reduction": {"steps": 4, "vocabulary": 4096, "features": 8, "pairs": 500, "every": 2},
    "labels": {"steps": 120, "classes": 2200, "features": 16, "samples_per_class": 4,
               "spread": 0.1, "every": 40},
    "back_off": {"steps": 60, "growth_interval": 5, "images_per_class": 8},
}  # fmt: skip
GAN = GanSettings(dtype="float16", steps=12, batch_size=4, channels=2, noise=5,
                  init_scale=2.0**8, watched_step=7, shown=2)  # fmt: skip
CROPS = np.random.default_rng(0).integers(256, size=(20, 32, 32, 3), dtype=np.uint8)


def as_json(outcome):
    return json.dumps([outcome.figures, outcome.curves], allow_nan=False)


def test_every_experiment_has_a_name_of_its_own_and_settings_that_a_run_takes():
    assert len(ALL) == sum(len(group.experiments) for group in GROUPS)
    names = {field.name for field in fields(TrainingConfig)}
    for group in GROUPS:
        for one in group.experiments:
            assert one.name.startswith(f"{group.name}/")
            json.dumps(one.config, allow_nan=False)
            if "epochs" in one.config and "model" in one.config:
                chosen = {name: value for name, value in one.config.items() if name in names}
                assert isinstance(TrainingConfig(**chosen).policy, Policy)


@pytest.mark.parametrize("group", ["parity", "bfloat16_weights", "eight_bits", "tensor_core_sums"])
def test_rows_of_a_network_differ_in_their_arithmetic_alone(group):
    arithmetic = {"dtype", "amp", "loss_scale", "update_rounding"}
    common = {}
    for name, one in ALL.items():
        if name.startswith(f"{group}/"):
            _, network, row, seed = name.split("/")
            config = {key: value for key, value in one.config.items() if key not in arithmetic}
            assert config == common.setdefault((network, seed), config)
            assert f"seed-{config['seed']}" == seed
            if group == "parity":
                assert (one.config["loss_scale"] != "auto") == (row == parity.CONTROL)


# MXNet warns of exactly this; the optimizer without masters is what one ablation is about.
@pytest.mark.filterwarnings("ignore:Accumulating with float16")
@pytest.mark.parametrize("ablation", ABLATIONS, ids=lambda one: one.name)
def test_each_ablation_runs_and_comes_out_the_same_again(ablation):
    short = replace(ablation, settings={**ablation.settings, **SHORT[ablation.name]})
    place = Place(Path("none"), Path("none"))
    outcomes = {variant: as_json(short.run(variant, place)) for variant in short.variants}
    assert len(set(outcomes.values())) == len(short.variants)
    last = short.variants[-1]
    assert as_json(short.run(last, place)) == outcomes[last]


def test_an_overflow_of_the_generator_leaves_the_discriminators_step_alone():
    undisturbed = train_gan(GAN, CROPS)
    disturbed = train_gan(replace(GAN, overflow=2.0**20), CROPS)
    as_json(disturbed)
    assert disturbed.figures["generator_bits_after"] == disturbed.figures["generator_bits_before"]
    for what in ("bits_before", "bits_after", "scale_after", "skips_until_then"):
        name = f"discriminator_{what}"
        assert disturbed.figures[name] == undisturbed.figures[name]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("layer", ["lstm", "cells", "bag"])
def test_the_reader_runs_in_each_format_and_comes_out_the_same_again(dtype, layer):
    tiny = ReaderSettings(dtype=dtype, layer=layer, training_reviews=60, test_reviews=50,
                          batch_size=20, epochs=4, embedding=4, hidden=4)  # fmt: skip
    assert as_json(train_reader(tiny)) == as_json(train_reader(tiny))


def test_a_training_run_is_kept_as_its_figures_and_found_again(tmp_path):
    tree = render_shapes(tmp_path, classes=101, images_per_class=2)
    (tmp_path / "data").mkdir()
    tree.rename(tmp_path / "data" / "101_ObjectCategories")
    small = {"model": "cifar_resnet20_v1", "image_size": 32, "train_per_class": 1, "epochs": 2}
    config = replace(caltech101.RECIPE, dtype="float16", **small, warmup_epochs=1)
    place = Place(tmp_path / "data", tmp_path / "work")
    outcome = train_or_find(config, place.data_dir, place)
    results = json.loads((place.work_dir / "results.json").read_text())
    assert outcome.figures["train_images"] == outcome.figures["test_images"] == 101
    assert outcome.figures["test_accuracy"] == results["test_accuracy"]
    assert train_or_find(config, place.data_dir, place) == outcome
