"""The exercises of lesson 05."""

from __future__ import annotations

import mpgluon

import pytest

from teaching import check
from teaching.lesson_05 import (
    enough_test_images,
    fp16_network_from_an_fp32_file,
    interval_for_both,
)


def load_then_cast(net, path):
    net.load_parameters(path)
    mpgluon.cast_block(net)


def load_then_cast_by_gluon(net, path):
    net.load_parameters(path)
    net.cast("float16")


def cast_then_load(net, path):
    mpgluon.cast_block(net)
    net.load_parameters(path)


def cast_then_load_rounded(net, path):
    mpgluon.cast_block(net)
    net.load_parameters(path, cast_dtype=True)


def only_cast(net, _):
    mpgluon.cast_block(net)


def only_load(net, path):
    net.load_parameters(path)


def test_05_1_nine_thousand_test_images_tell_two_points_from_luck(capsys):
    assert check("05.1", 9450)
    assert "0.3% of 20000 simulated pairs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("images", "meaning"),
    [
        (200, "can be luck"),  # the lesson's own test
        (4725, "can be luck"),  # one accuracy's standard error, not the difference's
        (1050, "can be luck"),  # one standard error, not three
        (20_000, "fewer images are enough"),
        (0, "no accuracy"),
    ],
)
def test_05_1_other_numbers_of_images_are_told_what_luck_does_there(images, meaning):
    verdict = enough_test_images(images)
    assert not verdict.right
    assert meaning in verdict.meaning


@pytest.mark.parametrize("interval", [60, 75, 98])
def test_05_2_an_interval_between_the_two_demands_is_right(interval):
    assert interval_for_both(interval).right


@pytest.mark.parametrize(
    ("interval", "meaning"),
    [
        (5, "tries the next scale too often"),
        (2000, "never in this run"),  # the default
        (200, "Until then small gradients become zero"),  # train()'s tenth of the run
        (0.5, "a whole number of steps"),
        (0, "a whole number of steps"),
    ],
)
def test_05_2_other_intervals_are_told_what_they_cost(interval, meaning):
    verdict = interval_for_both(interval)
    assert not verdict.right
    assert meaning in verdict.meaning


def test_05_3_loading_before_the_cast_brings_every_number_to_the_masters():
    verdict = fp16_network_from_an_fp32_file(load_then_cast)
    assert verdict.right
    assert verdict.meaning.startswith("212 of the file's 212 numbers")


@pytest.mark.parametrize(
    ("function", "meaning"),
    [
        (cast_then_load_rounded, "rounded to FP16 first: load, then cast"),
        (cast_then_load, "ends in an error: Failed loading Parameter"),
        (load_then_cast_by_gluon, "does not train afterwards: MXNetError"),
        (only_cast, "not from the file"),
        (only_load, "are float32, not float16"),
    ],
)
def test_05_3_other_orders_are_told_what_arrives(function, meaning):
    verdict = fp16_network_from_an_fp32_file(function)
    assert not verdict.right
    assert meaning in verdict.meaning


def test_05_3_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match="a function of a network and a path, received 'load'"):
        fp16_network_from_an_fp32_file("load")
