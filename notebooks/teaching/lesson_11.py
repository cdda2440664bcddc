"""Exercises of lesson 11: a scale, a format of six bits, and the steps of stochastic rounding."""

from __future__ import annotations

import math
from typing import Any

from mpgluon import BFLOAT16, FLOAT8_E5M2, FloatFormat, round_to
from mpgluon.formats.scaling import round_scaled

import numpy as np

from teaching.exercises import Verdict, exercise, number_of

_LARGEST = 0.003
_GRADIENTS = _LARGEST * 2.0 ** -np.linspace(0, 40, 4001)  # evenly over forty powers of two
_SPREAD = 2.0 ** np.linspace(-12, 0, 1201)
_UPDATE, _RUNS, _LONGEST = 2.0**-12, 2000, 500


def _scaled(scale: float) -> tuple[float, float]:
    """Return which shares of the gradients become infinite and zero."""
    rounded = round_to(_GRADIENTS * scale, FLOAT8_E5M2)
    return float(np.isinf(rounded).mean()), float((rounded == 0).mean())


@exercise("11.1")
def _scale(answer: Any) -> Verdict:
    scale = number_of(answer, "a scale, without a unit")
    if scale <= 0 or math.frexp(scale)[0] != 0.5:
        return Verdict(
            False, f"{scale:g} is not a power of two: dividing by it would round a second time."
        )
    infinite, zero = _scaled(scale)
    power = f"2^{round(math.log2(scale))}"
    if infinite:
        return Verdict(
            False,
            f"0.003 times {power} is {_LARGEST * scale:,.0f}, and the largest E5M2 number is "
            f"{FLOAT8_E5M2.max:,.0f}: the largest gradients become infinite.",
        )
    twice_infinite, twice_zero = _scaled(2 * scale)
    found = (
        f"0.003 times {power} is {_LARGEST * scale:,.6g}, and of gradients over forty powers of "
        f"two {zero:.0%} become zero"
    )
    if twice_infinite:
        return Verdict(True, f"{found}. With twice that scale the largest become infinite.")
    return Verdict(
        False, f"{found}. With twice that scale nothing overflows, and {twice_zero:.0%} do."
    )


@exercise("11.2")
def _format(answer: Any) -> Verdict:
    if not isinstance(answer, FloatFormat):
        raise TypeError(f"the answer is a FloatFormat, received {answer!r}")
    bits = answer.exponent_bits + answer.significand_bits
    if bits != 6:
        fields = f"{answer.exponent_bits} exponent bits and {answer.significand_bits - 1} stored"
        return Verdict(False, f"with the sign, {fields} fraction bits are {bits} bits, not 6.")
    rounded = round_scaled(_SPREAD, answer)
    zero, error = float((rounded == 0).mean()), float(np.abs(rounded / _SPREAD - 1).max())
    if zero:
        return Verdict(False, f"{zero:.0%} of the values become zero: an error of 100 %.")
    return Verdict(True, f"no value becomes zero, and the largest error is {error:.0%}.")


def _first_moves() -> Any:
    """Return in which step each of many weights moves first, at most the last one tried."""
    moves = np.full(_RUNS, _LONGEST)
    for step in range(_LONGEST, 0, -1):
        moved = round_to(np.full(_RUNS, 1 + _UPDATE), BFLOAT16, "stochastic", key=(11, step))
        moves[moved > 1] = step
    return moves


@exercise("11.3")
def _patience(answer: Any) -> Verdict:
    steps = number_of(answer, "steps")
    moves = _first_moves()
    mean, share = float(moves.mean()), float((moves <= steps).mean())
    return Verdict(
        abs(steps / mean - 1) < 0.1,
        f"of {_RUNS:,} weights that were run, {share:.0%} had moved after {steps:g} steps; "
        f"the first move came after {mean:.0f} steps on average.",
    )
