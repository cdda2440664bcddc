from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments.ablations import ABLATIONS, GROUP
from experiments.ablations.runs import following_words
from experiments.ablations.training import batches
from experiments.experiment import Outcome, Place
from experiments.records import read_records
from experiments.series import means

ROOT = Path(__file__).resolve().parents[2]
FINDINGS = "Ablations: what breaks when a part is left out"

# Every run in a few seconds; what is left out here is as in the evidence.
SHORT = {
    "masters": {"steps": 100, "images_per_class": 4, "image_size": 8, "every": 20},
    "underflow": {"steps": 6, "images_per_class": 1, "batch_size": 8, "every": 3},
    "batch_norm": {"steps": 6, "images_per_class": 4, "every": 2},
    "loss_reduction": {"steps": 4, "vocabulary": 4096, "features": 8, "pairs": 500, "every": 2},
    "labels": {
        "steps": 120,
        "classes": 2200,
        "features": 16,
        "samples_per_class": 4,
        "spread": 0.1,
        "every": 40,
    },
    "back_off": {"steps": 60, "growth_interval": 5, "images_per_class": 8},
}


def short(ablation):
    return replace(ablation, settings={**ablation.settings, **SHORT[ablation.name]})


def run(ablation, variant):
    return ablation.run(variant, Place(Path("none"), Path("none")))


@pytest.fixture(scope="module")
def outcomes():
    """Return the outcomes of short runs, by ablation and variant."""
    return {
        ablation.name: {variant: run(short(ablation), variant) for variant in ablation.variants}
        for ablation in ABLATIONS
    }


@pytest.fixture
def records(outcomes, record_of):
    """Return the records of those runs."""
    experiments = (short(one).experiment(variant) for one in ABLATIONS for variant in one.variants)
    return {
        one.name: record_of(one, outcomes[one.name.split("/")[1]][one.name.split("/")[2]])
        for one in experiments
    }


# MXNet warns of exactly this; the optimizer without masters is what one ablation is about.
pytestmark = pytest.mark.filterwarnings("ignore:Accumulating with float16")


def test_without_masters_most_updates_vanish_and_with_them_the_loss_is_that_of_fp32(outcomes):
    without, full, reference = (
        outcomes["masters"][name].figures for name in ("without", "with", "float32")
    )
    assert without["unchanged"] > 0.9
    assert reference["unchanged"] < 0.1
    far = abs(without["final_loss"] - reference["final_loss"])
    assert abs(full["final_loss"] - reference["final_loss"]) < far / 10


def test_a_learning_rate_of_nearly_nothing_changes_no_float16_weight_without_masters():
    masters = ABLATIONS[0]
    options = {**short(masters).settings, "learning_rate": 1e-12, "steps": 20}
    assert run(replace(masters, settings=options), "without").figures["unchanged"] == 1


def test_without_a_loss_scale_gradients_of_a_mean_over_pixels_are_lost(outcomes):
    unscaled, scaled, reference = (
        outcomes["underflow"][name].figures for name in ("unscaled", "scaled", "float32")
    )
    assert unscaled["elements_of_the_mean"] == 8 * 3 * 224 * 224
    assert unscaled["lost_gradients"] > 0.3
    assert scaled["lost_gradients"] < 0.01
    assert reference["lost_gradients"] == 0
    assert scaled["final_loss"] < unscaled["final_loss"]


def test_batch_norm_in_float16_mistakes_mean_and_variance_or_overflows(outcomes):
    wrong, as_bytes, right = (
        outcomes["batch_norm"][name].figures for name in ("float16", "float16-bytes", "float32")
    )
    assert wrong["values_per_channel"] == 32 * 24 * 24
    # No pixel is above 1, and 1 is lost from a sum of 2048.
    assert wrong["float16_mean"] <= 2048 / (32 * 24 * 24) < wrong["true_mean"]
    assert as_bytes["float16_mean"] is None
    assert as_bytes["first_skipped_step"] == 1
    assert as_bytes["skipped_steps"] == 6
    assert right["skipped_steps"] == 0
    assert right["final_loss"] < wrong["final_loss"]


def test_a_softmax_in_float16_reports_a_loss_that_is_too_small(outcomes):
    wrong, right = (outcomes["loss_reduction"][name] for name in ("float16", "float32"))
    assert right.curves["reported_loss"] == right.curves["true_loss"]
    assert right.figures["first_reported_loss"] == wrong.figures["first_true_loss"]
    # 4,096 words count as 2,048. The first logits are below 0.1, and float16 numbers around the
    # loss of 8 are 2**-8 and 2**-7 apart.
    missing = wrong.figures["first_true_loss"] - wrong.figures["first_reported_loss"]
    assert missing == pytest.approx(math.log(2), abs=0.1 + 2**-7)


def test_classes_whose_label_float16_cannot_hold_are_never_learnt(outcomes):
    wrong, right = (outcomes["labels"][name].figures for name in ("float16", "int32"))
    numbers = np.arange(2049, 2200)
    held = (numbers.astype(np.float16).astype(int) == numbers).mean()
    assert held == pytest.approx(0.5, abs=0.01)
    assert wrong["accuracy_above"] <= held
    assert wrong["accuracy_below"] > held
    assert min(right["accuracy_above"], right["accuracy_below"]) > 0.9


@pytest.mark.parametrize("variant", ["mpgluon", "contrib"])
def test_scales_follow_from_the_skipped_steps_by_the_rule_of_each_library(outcomes, variant):
    curves = outcomes["back_off"][variant].curves
    current = following = 16  # powers of two
    finite_steps, expected = 0, []
    for step in range(1, 61):
        expected.append(current)
        current = following
        if step in curves["skipped_at"]:
            following, finite_steps = current - 1, 0
        else:
            finite_steps += 1
            if finite_steps == 5:
                following, finite_steps = current + 1, 0
        if variant == "mpgluon":
            current = following  # at once
    assert curves["log2_scale"] == expected


def test_only_contrib_amp_tries_a_scale_again_that_has_just_failed(outcomes):
    wasted = "skipped_at_a_scale_that_just_failed"
    assert outcomes["back_off"]["contrib"].figures[wasted] > 0
    assert outcomes["back_off"]["mpgluon"].figures[wasted] == 0
    for outcome in outcomes["back_off"].values():
        assert outcome.figures["skipped_steps"] == len(outcome.curves["skipped_at"]) > 0


def test_outcomes_fit_into_json_and_come_out_the_same_again(outcomes):
    for ablation in ABLATIONS:
        for variant, outcome in outcomes[ablation.name].items():
            text = json.dumps([outcome.figures, outcome.curves], allow_nan=False)
            assert len(text) < 15_000
            if variant == ablation.variants[-1]:
                again = run(short(ablation), variant)
                assert json.dumps([again.figures, again.curves]) == text


def test_each_experiment_runs_with_the_settings_in_its_config(tmp_path):
    names = [experiment.name for experiment in GROUP.experiments]
    assert len(names) == len(set(names)) == sum(len(one.variants) for one in ABLATIONS)
    for experiment in GROUP.experiments:
        json.dumps(experiment.config)
        assert experiment.name.split("/")[0] == GROUP.name
        assert not experiment.needs_photographs
    place = Place(tmp_path, tmp_path)
    (contrib,) = (one for one in GROUP.experiments if one.name == "ablations/back_off/contrib")
    assert len(contrib.run(place).curves["log2_scale"]) == contrib.config["steps"]


def test_the_section_tells_each_ablation_and_draws_it(records, page_of):
    text, findings = page_of(records, "Ablations"), page_of(records, FINDINGS, "results")
    for ablation in ABLATIONS:
        assert f"](results/{ablation.picture}.png)" in text
        assert f"`python scripts/evidence.py run ablations/{ablation.name}`" in findings
        figure = Figure(layout="constrained")
        GROUP.pictures[ablation.picture](figure, records)
        assert all(axes.lines and axes.get_ylabel() for axes in figure.axes)
    assert text.count("](results/") == len(ABLATIONS)


def test_numbers_of_the_section_are_those_of_the_records(records, page_of):
    one = records["ablations/masters/without"]
    outcome = Outcome({**one.outcome.figures, "final_loss": 98.7}, one.outcome.curves)
    changed = {**records, one.name: replace(one, outcome=outcome)}
    for page in ("results", "results-details"):
        assert "98.7" not in page_of(records, template=page)
        assert page_of(changed, template=page).count("98.7") == 1


def test_the_conclusion_is_withdrawn_if_a_run_with_its_measure_is_worse(page_of):
    records = read_records(ROOT / "results" / "evidence")
    words = "**Training gets worse with each part of mixed precision that is left out**"
    assert words in page_of(records, FINDINGS, "results")
    one = records["ablations/underflow/scaled"]
    outcome = Outcome({**one.outcome.figures, "final_loss": 99.0}, one.outcome.curves)
    text = page_of({**records, one.name: replace(one, outcome=outcome)}, FINDINGS, "results")
    assert words not in text
    assert "no longer support the conclusion" in text


def test_a_section_names_what_is_missing_and_shows_the_rest(records, page_of):
    del records["ablations/labels/int32"]
    text = page_of(records, "Ablations")
    assert "Not run yet: ablations/labels/int32." in text
    assert "ablation-labels" not in text
    assert text.count("](results/") == len(ABLATIONS) - 1


def test_a_window_with_something_that_is_not_finite_has_no_mean():
    assert means([1, 2, math.inf, 4, 5], 2) == [1.5, None, 5]
    assert means([math.inf, -math.inf, math.nan, 1], 2) == [None, None]
    assert means([1 / 3], 1) == [0.333333]


def test_every_epoch_has_all_images_once_in_an_order_of_its_own():
    data = batches(np.arange(6.0), np.arange(6, dtype=np.int32), 2)
    epochs = [[int(v) for _ in range(3) for v in next(data)[1].asnumpy()] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(6))
    assert epochs[0] != epochs[1]
    inputs, targets = next(data)
    assert inputs.asnumpy().tolist() == targets.asnumpy().tolist()
    assert targets.dtype == np.int32


def test_each_word_is_followed_by_at_most_eight_others_and_low_numbers_are_frequent():
    words, next_words = following_words(100, 20_000)
    for word in range(100):
        assert len(set(next_words[words == word].tolist())) <= 8
    counts = np.bincount(words, minlength=100)
    # Zipf: half of the mass of 100 words, sum 5.19, is in the first seven, sum 2.59.
    assert counts[:7].sum() / counts.sum() == pytest.approx(2.59 / 5.19, abs=0.02)
