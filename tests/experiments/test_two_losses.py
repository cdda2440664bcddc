"""The GAN: an overflow of one network leaves the other alone, and the page says so if it is so."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

from mpgluon import amp

import mxnet as mx
import numpy as np
import pytest
from matplotlib.figure import Figure
from mxnet import autograd, gluon
from PIL import Image

from experiments.experiment import Place
from experiments.gan import NAMES, GanSettings, cut_crops, make_players, pack, play, train, unpack
from experiments.series import changes, means
from experiments.two_losses import GROUP

TINY = GanSettings(
    dtype="float16",
    steps=12,
    batch_size=4,
    channels=2,
    noise=5,
    init_scale=2.0**8,
    watched_step=7,
    shown=2,
)
OVERFLOW = replace(TINY, overflow=2.0**20)
CROPS = np.random.default_rng(0).integers(256, size=(20, 32, 32, 3), dtype=np.uint8)


def batch(seed):
    rng = np.random.default_rng(seed)
    crops = mx.nd.array(rng.uniform(-1, 1, (TINY.batch_size, 3, 32, 32)))
    return crops, mx.nd.array(rng.standard_normal((TINY.batch_size, TINY.noise)))


@pytest.fixture(scope="module")
def outcomes():
    """Return a tiny run in FP32, one in float16, and one with an overflow."""
    settings = (replace(TINY, dtype="float32"), TINY, OVERFLOW)
    return [train(one, CROPS) for one in settings]


@pytest.fixture
def records(outcomes, record_of):
    return {one.name: record_of(one, outcome) for one, outcome in zip(GROUP.experiments, outcomes)}


def test_an_overflow_of_the_generator_skips_its_step_and_halves_its_scale(outcomes):
    _, undisturbed, disturbed = outcomes
    without, found = undisturbed.figures, disturbed.figures
    before, skipped = (
        [step for step in one.curves["generator_skipped"] if step <= 7]
        for one in (undisturbed, disturbed)
    )
    assert 7 not in before
    assert skipped == [*before, 7]
    assert found["generator_bits_before"] == without["generator_bits_before"]
    assert found["generator_bits_after"] == found["generator_bits_before"]
    assert without["generator_bits_after"] != without["generator_bits_before"]
    assert found["generator_scale_after"] == found["generator_scale_before"] / 2
    assert without["generator_scale_after"] == without["generator_scale_before"]
    assert found["generator_skips_until_then"] == without["generator_skips_until_then"] + 1


def test_an_overflow_of_the_generator_changes_no_bit_of_the_discriminators_step(outcomes):
    _, undisturbed, disturbed = outcomes
    for what in ("bits_before", "bits_after", "scale_before", "scale_after", "skips_until_then"):
        name = f"discriminator_{what}"
        assert disturbed.figures[name] == undisturbed.figures[name]
    assert (
        disturbed.figures["discriminator_bits_before"]
        != disturbed.figures["discriminator_bits_after"]
    )


def test_later_the_discriminator_sees_other_images():
    # So the equality above is one of that step, and would be noticed if it were none.
    longer = replace(TINY, steps=8, watched_step=7)
    last = {}
    for overflow in (1.0, 2.0**20):
        players = make_players(longer)
        for number in range(1, 9):
            play(*players, *batch(number), overflow=overflow if number == 7 else 1.0)
            last[overflow, number] = players[1].fingerprint()
    assert last[1.0, 7] == last[2.0**20, 7]
    assert last[1.0, 8] != last[2.0**20, 8]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("overflow", [1.0, 2.0**20])
def test_gradients_that_the_generator_leaves_in_the_discriminator_are_not_used(dtype, overflow):
    settings = replace(TINY, dtype=dtype)
    generator, discriminator = make_players(settings)
    _, control = make_players(settings)
    loss_fn = gluon.loss.SigmoidBinaryCrossEntropyLoss()
    ones, zeros = mx.nd.ones(TINY.batch_size), mx.nd.zeros(TINY.batch_size)
    for number in range(3):
        crops, noise = batch(number)
        with autograd.train_mode():
            made = generator.net(noise).copy()  # before its step, from the same statistics
        # The control learns from these images, and no generator ever went through it.
        with autograd.record():
            loss = loss_fn(control.net(crops), ones) + loss_fn(control.net(made), zeros)
            with amp.scale_loss(loss, control.trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        control.trainer.step(TINY.batch_size)
        play(generator, discriminator, crops, noise, overflow=overflow)
        assert discriminator.fingerprint() == control.fingerprint()


def test_gradients_that_were_added_up_would_be_noticed():
    bits = []
    for how in ("write", "add"):
        players = make_players(TINY)
        for parameter in players[1].net.collect_params().values():
            if parameter.grad_req != "null":
                parameter.grad_req = how
        play(*players, *batch(0))
        bits.append(players[1].fingerprint())
    assert bits[0] != bits[1]


def test_scales_are_halved_at_skipped_steps_and_the_rest_is_growth(outcomes):
    for outcome in outcomes[1:]:
        for name in NAMES:
            expected, scales = 2.0**8, []
            for step in range(1, TINY.steps + 1):  # too few for growth
                scales.append(expected)
                expected /= 2 if step in outcome.curves[f"{name}_skipped"] else 1
            assert outcome.curves[f"{name}_scale"] == changes(scales)


def test_fp32_has_no_scale_and_skips_nothing(outcomes):
    for name in NAMES:
        assert outcomes[0].curves[f"{name}_scale"] == [(1, 1.0)]
        assert outcomes[0].curves[f"{name}_skipped"] == []


def test_a_run_comes_out_the_same_twice_and_fits_into_json(outcomes):
    again = train(OVERFLOW, CROPS)
    assert (again.figures, again.curves) == (outcomes[2].figures, outcomes[2].curves)
    json.dumps([again.figures, again.curves], allow_nan=False)


def test_the_step_that_is_watched_must_be_one_of_the_run():
    for step in (0, 13):
        with pytest.raises(ValueError, match=f"one of the 12 steps, received {step}"):
            replace(TINY, watched_step=step)


# --- crops and records -----------------------------------------------------------------------


def test_crops_are_windows_of_the_category_s_photographs_some_of_them_mirrored(tmp_path):
    rng = np.random.default_rng(0)
    photographs = {}
    for category in ("sunflower", "watch"):
        (tmp_path / category).mkdir()
        for number in range(2):  # their short side has 40 pixels: nothing is to be scaled
            pixels = rng.integers(256, size=(40, 44 + number, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / category / f"{number}.png")
            photographs[category, number] = pixels
    settings = replace(TINY, crops_per_photograph=6)
    crops = cut_crops(tmp_path, settings)
    assert crops.shape == (12, 32, 32, 3)
    assert (crops == cut_crops(tmp_path, settings)).all()
    mirrored = 0
    for place, crop in enumerate(crops):
        windows = np.lib.stride_tricks.sliding_window_view(
            photographs["sunflower", place // 6], (32, 32, 3)
        ).reshape(-1, 32, 32, 3)
        is_plain = (windows == crop).all(axis=(1, 2, 3)).any()
        is_mirrored = (windows == crop[:, ::-1]).all(axis=(1, 2, 3)).any()
        assert is_plain != is_mirrored
        mirrored += is_mirrored
    assert 0 < mirrored < 12


def test_a_packed_strip_has_its_images_side_by_side():
    images = np.stack([np.full((8, 8, 3), value, dtype=np.uint8) for value in (0, 255, 128)])
    strip = unpack(pack(images))
    assert strip.shape == (8, 24, 3)
    # A flat block of 8 x 8 pixels has one coefficient, 8 times its level, which JPEG's table for
    # quality 80 rounds to multiples of 6 or 7: half a level. Converting colours adds a level.
    for place, value in enumerate((0, 255, 128)):
        assert np.abs(strip[:, 8 * place : 8 * place + 8].astype(int) - value).max() <= 2


def test_a_series_becomes_means_of_windows_and_places_of_change():
    assert means([1.0, 2.0, 3.0, 5.0, 7.0], 2) == [1.5, 4.0, 7.0]
    assert means([1.0, float("inf"), float("nan"), 2.0, 1 / 3], 2) == [None, None, 0.333333]
    assert changes([4.0, 4.0, 2.0, 2.0, 4.0]) == [(1, 4.0), (3, 2.0), (5, 4.0)]


def test_an_experiment_runs_on_the_photographs_of_its_place(caltech101_mini, tmp_path, monkeypatch):
    monkeypatch.setattr("experiments.two_losses.train", lambda _, crops: crops)
    (one, *_) = GROUP.experiments
    assert one.needs_photographs
    crops = one.run(Place(Path(caltech101_mini), tmp_path))
    assert crops.shape == (60 * 8, 32, 32, 3)
    assert crops.std() > 30  # no grey walls


# --- the section -----------------------------------------------------------------------------


def test_the_page_says_that_the_overflow_cost_the_discriminator_nothing(records, page_of):
    text = page_of(records, "Two losses, two scales")
    assert "costs the generator that step and half its loss scale, and the discriminator" in text
    for name in records:
        assert f"`python scripts/evidence.py run {name}`" in text
    bits = records["two_losses/float16"].outcome.figures["discriminator_bits_after"]
    assert text.count(f"`{bits}`") == 2


@pytest.mark.parametrize(
    ("run", "figure", "value"),
    [
        ("float16-overflow", "discriminator_bits_after", "another"),
        ("float16-overflow", "discriminator_scale_after", 1.0),
        ("float16-overflow", "discriminator_skips_until_then", 99),
        ("float16-overflow", "generator_bits_after", "another"),
        ("float16-overflow", "generator_scale_after", 3.0),
        ("float16", "generator_bits_before", "another"),
    ],
)
def test_the_conclusion_is_withdrawn_if_the_overflow_did_anything_else(
    records, page_of, run, figure, value
):
    outcome = records[f"two_losses/{run}"].outcome
    outcome = replace(outcome, figures={**outcome.figures, figure: value})
    records[f"two_losses/{run}"] = replace(records[f"two_losses/{run}"], outcome=outcome)
    text = page_of(records, "Two losses, two scales")
    assert "no longer support the conclusion" in text
    assert "nothing" not in text


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ((512.0, 64.0), "in `float16` the generator's median is 8 times the discriminator's"),
        ((64.0, 64.0), "no longer support the conclusion"),
    ],
)
def test_where_the_scales_settle_is_told_as_it_is(scales, words, records, page_of):
    one = records["two_losses/float16"]
    usual = {f"{name}_usual_scale": scale for name, scale in zip(NAMES, scales)}
    skips = {"generator_skipped": [1, 2, 5], "discriminator_skipped": [2, 5, 7, 8]}
    outcome = replace(
        one.outcome,
        figures={**one.outcome.figures, **usual},
        curves={**one.outcome.curves, **skips},
    )
    text = page_of({**records, one.name: replace(one, outcome=outcome)}, "Two losses, two scales")
    assert words in text
    assert "5 were skipped by at least one network, and 2 by both" in text


def test_the_picture_shows_scales_losses_and_images(records):
    figure = Figure(layout="constrained")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GROUP.pictures["two-losses"](figure, records)
        figure.draw_without_rendering()
    without, losses, disturbed, images = figure.axes
    # Two scales, each with its skipped steps; the overflow besides.
    assert [len(axes.lines) for axes in (without, disturbed, losses)] == [4, 5, 4]
    rows = ["photographs", "made, float32", "made, float16"]
    assert [label.get_text() for label in images.get_yticklabels()] == rows
    assert images.images[0].get_array().shape == (32 * len(rows), 64, 3)
