"""A GAN whose images grow: its networks at each resolution, fading, training, its histograms."""

from __future__ import annotations

import json
from dataclasses import replace

import mxnet as mx
import numpy as np
import pytest

from study.experiments import progressive_gan
from study.experiments.players import NAMES, as_images, play
from study.experiments.progressive_gan import (
    ProgressiveSettings,
    fading_weight,
    make_players,
    shrunk,
    train,
)

TINY = ProgressiveSettings(dtype="float16", batch_size=4, noise=5, channels=2, most_channels=4,
                           resolutions=3, steps_per_resolution=6, fading_steps=3, samples=2,
                           init_scale=2.0**8, growth_interval=2, shown=2)  # fmt: skip
CROPS = np.random.default_rng(0).integers(256, size=(20, 32, 32, 3), dtype=np.uint8)
NOISE = mx.nd.array(np.random.default_rng(1).standard_normal((4, 5)))


def weight(value):
    return mx.nd.full((1, 1, 1, 1), value)


def networks(**changes):
    settings = replace(TINY, dtype="float32", **changes)
    generator, discriminator = (player.net for player in make_players(settings))
    return generator, discriminator


def halved(images):
    return mx.nd.Pooling(images, kernel=(2, 2), stride=(2, 2), pool_type="avg")


def doubled(images):
    return images.repeat(2, axis=2).repeat(2, axis=3)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("stage", range(TINY.resolutions))
def test_images_have_the_size_of_the_resolution_and_lie_in_their_range(dtype, stage):
    generator, discriminator = (one.net for one in make_players(replace(TINY, dtype=dtype)))
    generator.stage = discriminator.stage = stage
    more = (weight(0.25),) if stage else ()
    images = generator(NOISE, *more)
    assert images.shape == (4, 3, TINY.pixels[stage], TINY.pixels[stage])
    assert np.abs(images.asnumpy()).max() <= 1
    assert discriminator(images, *more).shape == (4, 1)


def test_channels_are_doubled_from_resolution_to_resolution_up_to_the_most():
    assert ProgressiveSettings().pixels == (8, 16, 32, 64)
    assert ProgressiveSettings().widths == (64, 64, 32, 16, 8)
    assert ProgressiveSettings(most_channels=20).widths == (20, 20, 20, 16, 8)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_new_block_of_weight_0_leaves_the_networks_of_the_resolution_before(stage):
    generator, discriminator = networks()
    for net in (generator, discriminator):
        net.stage = stage - 1
    old = (weight(1.0),) if stage > 1 else ()
    small = generator(NOISE, *old)
    logits = discriminator(small, *old)
    for net in (generator, discriminator):
        net.stage = stage
    images = generator(NOISE, weight(0.0))
    if stage == 1:
        np.testing.assert_array_equal(images.asnumpy(), doubled(small).asnumpy())
        again = discriminator(images, weight(0.0))
        np.testing.assert_array_equal(again.asnumpy(), logits.asnumpy())
    # A block that is on its way in is halfway at a half.
    whole, half = (generator(NOISE, weight(one)).asnumpy() for one in (1.0, 0.5))
    np.testing.assert_array_equal(half, 0.5 * whole + 0.5 * images.asnumpy())


def test_a_weight_rises_to_1_and_stays():
    settings = ProgressiveSettings(fading_steps=4, steps_per_resolution=8, samples=1)
    found = [fading_weight(settings, step) for step in range(1, 9)]
    assert found == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("wrong", [{"fading_steps": 4}, {"fading_steps": 0}, {"samples": 4}])
def test_more_than_half_of_a_resolution_for_fading_or_samples_is_refused(wrong):
    with pytest.raises(ValueError, match="must be from 1 to 3, half of the 6 steps"):
        replace(TINY, **wrong)


def test_photographs_shrink_to_means_of_squares():
    checks = np.zeros((1, 8, 8, 3), dtype=np.uint8)
    checks[:, ::2, 1::2] = 200  # one of four pixels
    checks[:, 4:] += 8
    expected = np.full((1, 2, 2, 3), 50.0)
    expected[:, 1] += 8
    np.testing.assert_array_equal(shrunk(checks, 2), expected)
    np.testing.assert_array_equal(shrunk(CROPS, 32), CROPS)


def test_photographs_are_faded_as_generated_images_are():
    images = as_images(CROPS[:4])
    for value, expected in ((1.0, images), (0.0, doubled(halved(images)))):
        faded = progressive_gan._faded(images, weight(value))
        np.testing.assert_array_equal(faded.asnumpy(), expected.asnumpy())


def weights_of(net):
    return {
        name: one.data().asnumpy()
        for name, one in net._collect_params_with_prefix().items()
        if one.grad_req != "null"
    }


@pytest.mark.parametrize("stage", range(TINY.resolutions))
def test_a_step_changes_the_blocks_of_its_resolution_and_the_smaller_ones(stage):
    generator, discriminator = players = make_players(replace(TINY, dtype="float32"))
    before = [weights_of(player.net) for player in players]
    for player in players:
        player.net.stage = stage
    more = (weight(0.5),) if stage else ()
    play(generator, discriminator, as_images(shrunk(CROPS[:4], TINY.pixels[stage])), NOISE, *more)
    blocks = {f"blocks.{one}" for one in range(stage + 1)}
    rgb = range(max(stage - 1, 0), stage + 1)
    for player, old, edge, end in zip(players, before, ("to_rgb", "from_rgb"), ("first", "last")):
        new = weights_of(player.net)
        changed = {name for name in new if (new[name] != old[name]).any()}
        expected = blocks | {f"{edge}.{one}" for one in rgb} | {end}
        assert changed == {name for name in new if any(name.startswith(f"{e}.") for e in expected)}


def as_json(outcome):
    return json.dumps([outcome.figures, outcome.curves], allow_nan=False)


@pytest.mark.slow
def test_a_run_comes_out_the_same_again_and_its_figures_agree_with_its_curves():
    outcome = train(TINY, CROPS)
    assert as_json(train(TINY, CROPS)) == as_json(outcome)
    figures, curves = outcome.figures, outcome.curves
    assert figures["steps"] == 18
    for name in NAMES:
        assert figures[f"{name}_is_finite"]
        skipped = [figures[f"{name}_{pixels}_skipped_steps"] for pixels in TINY.pixels]
        counted = np.histogram(curves[f"{name}_skipped"], bins=[1, 7, 13, 19])[0]
        assert skipped == counted.tolist()
        for pixels in TINY.pixels:
            exponents, counts = np.array(curves[f"{name}_{pixels}_exponents"]).T
            middle = np.sort(np.repeat(exponents, counts))[(counts.sum() - 1) // 2]
            assert figures[f"{name}_{pixels}_median_exponent"] == middle
            lost = counts[exponents < -24].sum() / counts.sum()
            assert figures[f"{name}_{pixels}_lost"] == pytest.approx(lost, rel=1e-5)


@pytest.mark.slow
def test_a_static_scale_that_is_too_large_skips_every_step_and_one_of_1_loses_gradients():
    large = train(replace(TINY, static_scale=2.0**40), CROPS)
    small = train(replace(TINY, static_scale=2.0**-12), CROPS)
    for name in NAMES:
        assert large.curves[f"{name}_skipped"] == list(range(1, 19))
        assert large.curves[f"{name}_scale"] == [(1, 2.0**40)]
        assert small.curves[f"{name}_skipped"] == []
        for pixels in TINY.pixels:
            key = f"{name}_{pixels}"
            assert large.figures[f"{key}_too_large_at_scale"] > 0.5
            assert small.figures[f"{key}_lost_at_scale"] > small.figures[f"{key}_lost"]


def test_gradients_are_counted_in_float32_at_the_weights_of_the_cast_networks():
    cast = dict(zip(NAMES, make_players(TINY)))
    counter = progressive_gan._Counter(TINY, cast)
    for player in cast.values():
        player.net.stage = 1
    images = as_images(shrunk(CROPS[:4], 16))
    counter.count(images, NOISE, weight(0.5))
    for name, player in cast.items():
        total = counter.true[name].total
        assert total == counter.scaled[name].total > 0
        shifted = counter.true[name].times(2.0**8)  # the scale of both
        np.testing.assert_array_equal(shifted.counts, counter.scaled[name].counts)
        fp32 = counter._fp32[name]
        assert fp32.stage == 1
        copied = weights_of(fp32)
        for key, values in weights_of(player.net).items():
            assert copied[key].dtype == np.float32
            np.testing.assert_array_equal(copied[key], values.astype(np.float32))
