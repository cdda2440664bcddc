"""The exercises of lesson 06: what right and wrong answers are told."""

from __future__ import annotations

import numpy as np
import pytest

from teaching import check
from teaching.lesson_06 import make_sounds


def as_it_was(F, x):
    return F.log(F.mean(F.broadcast_mul(x, x), axis=2) + 1)


def of_square(F, x):
    return F.log(F.mean(F.square(x), axis=2) + 1)


def in_fp32(F, x):
    wide = F.cast(x, "float32")
    return F.log(F.mean(F.broadcast_mul(wide, wide), axis=2) + 1)


def of_small_numbers(F, x):
    small = x / 256
    return F.log(256 * 256 * F.mean(F.broadcast_mul(small, small), axis=2) + 1)


def of_small_numbers_only(F, x):
    small = x / 256
    return F.log(F.mean(F.broadcast_mul(small, small), axis=2) + 1)


def of_numbers_that_are_not_small_enough(F, x):
    small = x / 4
    return F.log(16 * F.mean(F.broadcast_mul(small, small), axis=2) + 1)


def over_filters(F, x):
    return F.log(F.mean(F.square(x), axis=1) + 1)


def test_sounds_are_whole_numbers_of_an_audio_file():
    sounds, pitches = make_sounds(20, seed=3)
    assert sounds.shape == (20, 1, 256)
    assert (sounds.asnumpy() == sounds.asnumpy().round()).all()
    assert np.abs(sounds.asnumpy()).max() <= 32768
    assert set(pitches.asnumpy()) <= {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("number", "answer", "right", "words"),
    [
        ("06.1", of_square, True, "until the loss scale has found its place"),
        ("06.1", in_fp32, True, "and the accuracy is"),
        ("06.1", of_small_numbers, True, "and the accuracy is"),
        ("06.1", as_it_was, False, "what broadcast_mul returned in energy is not finite"),
        ("06.1", of_numbers_that_are_not_small_enough, False, "Cast to FP16, it breaks: forward"),
        ("06.1", of_small_numbers_only, False, "In FP32 already its result is another"),
        ("06.1", over_filters, False, "It returns the shape (32, 61), and not (32, 16)"),
        ("06.2", 1, False, "60 of 60 steps are skipped"),
        ("06.2", 300, False, "300 is not a power of two"),
        ("06.2", -256, False, "-256 is not a power of two"),
        ("06.3", 1024, False, "but at 2048 it is so too"),
        ("06.3", 2048, True, "At 4096, backward"),
        ("06.3", 65536, False, "is not finite: the step is skipped"),
        ("06.3", 0, False, "0 is not a power of two"),
    ],
)
def test_an_answer_is_told_what_it_does(number, answer, right, words, capsys):
    assert check(number, answer) == right
    assert words in capsys.readouterr().out


def test_only_the_smallest_divisor_that_saves_all_steps_is_right(capsys):
    divisors = [2**exponent for exponent in range(7, 11)]
    right = [divisor for divisor in divisors if check("06.2", divisor)]
    assert len(right) == 1
    told, place = capsys.readouterr().out.splitlines(), divisors.index(right[0])
    assert all("steps are skipped, and the accuracy is" in line for line in told[:place])
    assert all("none is skipped either" in line for line in told[place + 1 :])


def test_an_answer_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="a function of F and x"):
        check("06.1", 3)
    for number in ("06.2", "06.3"):
        with pytest.raises(TypeError, match=r"a number \(a power of two\)"):
            check(number, "256")
