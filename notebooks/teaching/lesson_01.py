"""The exercises of lesson 01: sums that stop, a format of one's own, rounding twice."""

from __future__ import annotations

from typing import Any

from mpgluon import BFLOAT16, FLOAT16, FloatFormat, round_to

import numpy as np

from teaching.exercises import Verdict, exercise, number_of


@exercise("01.1")
def where_a_sum_of_thousandths_stops(answer: Any) -> Verdict:
    value = number_of(answer, "the sum at which it stops, without a unit")
    term, total, additions = np.float16(0.001), np.float16(0), 0
    while total + term > total:
        total, additions = total + term, additions + 1
    stop, half = float(total), float(np.spacing(total)) / 2
    if float(round_to(value, FLOAT16)) == stop:
        return Verdict(
            True,
            f"After {additions:,} additions the sum is {stop:g}. Half the spacing there is "
            f"{half:.6f}, more than 0.001, so {stop:g} + 0.001 is rounded back to {stop:g}.",
        )
    if not 0 <= value < stop:
        return Verdict(
            False,
            f"The sum never reaches {value:g}: after {additions:,} additions it is less, and does "
            f"not change any more."
            if value > stop
            else f"The sum never reaches {value:g}: it begins at 0 and grows.",
        )
    at = np.float16(value)
    return Verdict(
        False,
        f"At {float(at):.7g} the sum goes on: half the spacing there is "
        f"{float(np.spacing(at)) / 2:.2g}, less than 0.001, and the next sum is "
        f"{float(at + term):.7g}.",
    )


@exercise("01.2")
def a_format_between_float16_and_bfloat16(answer: Any) -> Verdict:
    if not isinstance(answer, FloatFormat):
        raise TypeError(f"the answer is a FloatFormat, received {answer!r}")
    bits = answer.exponent_bits + answer.significand_bits
    if bits != FLOAT16.exponent_bits + FLOAT16.significand_bits:
        return Verdict(
            False,
            f"The format has {bits} bits: 1 for the sign, {answer.exponent_bits} for the exponent, "
            f"{answer.significand_bits - 1} for the fraction. It needs to have 16.",
        )
    if answer.max < 100_000:
        return Verdict(
            False,
            f"100,000 becomes {float(round_to(100_000, answer)):g}: the largest number of the "
            f"format is {answer.max:g}.",
        )
    weight = float(round_to(1.002, answer))
    if weight == 1:
        return Verdict(
            False,
            "A weight of 1 loses the update: half the spacing above 1 is "
            f"{answer.epsilon / 2:g}, and 1.002 is rounded to 1.",
        )
    return Verdict(
        True,
        f"Its largest number is {answer.max:.4g}, and 1 + 0.002 becomes {weight:.6g}. (In FP16 "
        f"100,000 becomes {float(round_to(100_000, FLOAT16)):g}, and in BF16 1 + 0.002 becomes "
        f"{float(round_to(1.002, BFLOAT16)):g}.)",
    )


@exercise("01.3")
def the_root_that_is_rounded_wrongly(answer: Any) -> Verdict:
    value = number_of(answer, "an FP16 number from 1 up to 4")
    if not 1 <= value < 4 or float(round_to(value, FLOAT16)) != value:
        return Verdict(False, f"{value!r} is not an FP16 number from 1 up to 4.")
    root = float(np.sqrt(value))
    first = float(round_to(root, FloatFormat("23 bits", significand_bits=23, exponent_bits=8)))
    twice, once = float(round_to(first, FLOAT16)), float(round_to(root, FLOAT16))
    return Verdict(
        twice != once,
        f"The root is {root:.9f}..., with 23 bits {first:.9f}. From there it becomes {twice:.9f} "
        + (
            f"in FP16, but rounded once it is {once:.9f}."
            if twice != once
            else "in FP16, the same as if it is rounded once."
        ),
    )
