"""The exercises of lesson 11: what right and wrong answers are told."""

from __future__ import annotations

from mpgluon import FLOAT6_E2M3, FLOAT8_E4M3, FloatFormat

import pytest

from teaching import check


def format_of(exponent_bits, significand_bits):
    return FloatFormat("mine", significand_bits=significand_bits, exponent_bits=exponent_bits)


@pytest.mark.parametrize(
    ("number", "answer", "words"),
    [
        ("11.1", 2**24, "With twice that scale the largest become infinite"),
        ("11.2", format_of(4, 2), "no value becomes zero"),
        ("11.3", 32, "after 32 steps on average"),
    ],
)
def test_right_answers_are_told_what_they_do(number, answer, words, capsys):
    assert check(number, answer)
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "answer", "words"),
    [
        ("11.1", 57344 / 0.003, "not a power of two: dividing by it would round a second time"),
        ("11.1", -(2.0**24), "not a power of two"),
        ("11.1", 2**25, "2^25 is 100,663, and the largest E5M2 number is 57,344"),
        ("11.1", 2**16, "With twice that scale nothing overflows"),
        ("11.2", format_of(3, 3), "become zero"),
        ("11.2", FLOAT6_E2M3, "become zero"),
        ("11.2", FLOAT8_E4M3, "are 8 bits, not 6"),
        ("11.3", 16, "had moved after 16 steps; the first move came after 32"),
        ("11.3", 128, "99% had moved after 128 steps"),
    ],
)
def test_wrong_answers_are_told_what_they_would_do(number, answer, words, capsys):
    assert not check(number, answer)
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("number", ["11.1", "11.3"])
def test_no_number_is_no_answer(number):
    with pytest.raises(TypeError, match="the answer is a number"):
        check(number, "2**24")


def test_a_name_is_no_format():
    with pytest.raises(TypeError, match="the answer is a FloatFormat, received 'e4m1'"):
        check("11.2", "e4m1")
