"""Rounding toward zero, exhaustively, and stochastic rounding, whose bits follow from a key."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

from mpgluon import kernels
from mpgluon.formats.float_format import (
    BFLOAT16,
    FLOAT4_E2M1,
    FLOAT6_E2M3,
    FLOAT6_E3M2,
    FLOAT8_E4M3,
    FLOAT8_E5M2,
    FLOAT16,
    FLOAT32,
    TFLOAT32,
    FloatFormat,
    random_key,
    round_to,
)
from mpgluon.kernels.dtypes import round_array, round_stochastically

import mxnet as mx
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

SMALL = (FLOAT8_E4M3, FLOAT8_E5M2, FLOAT6_E3M2, FLOAT6_E2M3, FLOAT4_E2M1, FLOAT16)
FORMATS = (*SMALL, BFLOAT16, TFLOAT32, FloatFormat("e7m3", 4, 7))
KEY = (7, 3, 1)
MODES = [("toward_zero", None), ("stochastic", KEY)]

any_format = st.sampled_from(FORMATS)
any_finite = st.floats(allow_nan=False, allow_infinity=False)
any_key = st.lists(st.integers(0, 2**64), min_size=1, max_size=4)


def positive_numbers(fmt):
    """Return all numbers of a format from 0 to its largest, from the definition."""
    steps = np.arange(2**fmt.significand_bits, dtype=np.float64)
    exponents = np.arange(fmt.min_exponent, fmt.max_exponent + 1) - fmt.significand_bits + 1
    numbers = np.unique(np.ldexp(steps, exponents[:, None]))
    return numbers[numbers <= fmt.max]


def with_parts_between(numbers):
    """Return numbers, and values an eighth, a half and seven eighths of the way to the next."""
    gaps = np.diff(numbers)
    return np.concatenate([numbers, *(numbers[:-1] + part * gaps for part in (0.125, 0.5, 0.875))])


def same_bits(one, other):
    assert (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_toward_zero_is_the_largest_number_that_is_not_beyond_the_value(fmt, dtype):
    numbers = positive_numbers(fmt)
    values = with_parts_between(numbers)
    values = np.concatenate([values, np.nextafter(numbers[1:].astype(dtype), 0), [2 * fmt.max]])
    values = values.astype(dtype)
    expected = numbers[np.searchsorted(numbers, values, side="right") - 1].astype(dtype)
    same_bits(round_to(values, fmt, "toward_zero"), expected)
    same_bits(round_to(-values, fmt, "toward_zero"), -expected)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_finite_values_never_overflow_toward_zero(fmt):
    huge = np.array([np.finfo(np.float32).max, -1e38], np.float32)
    assert list(round_to(huge, fmt, "toward_zero")) == [
        fmt.max,
        -min(fmt.max, float(round_to(np.float32(1e38), fmt, "toward_zero"))),
    ]
    infinite = round_to(np.float32([np.inf, -np.inf]), fmt, "toward_zero")
    np.testing.assert_array_equal(np.abs(infinite), [fmt.overflow] * 2)


@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_stochastic_rounding_keeps_the_numbers_of_the_format(fmt):
    numbers = np.float32(positive_numbers(fmt))
    for sign, step in product((1, -1), range(8)):
        same_bits(round_to(sign * numbers, fmt, "stochastic", key=(0, step)), sign * numbers)


@given(any_finite, any_format, any_key)
def test_stochastic_rounding_takes_one_of_the_two_neighbours(value, fmt, key):
    assume(abs(value) < fmt.max)
    found = float(round_to([value], fmt, "stochastic", key=key)[0])
    below = float(round_to(value, fmt, "toward_zero"))
    if below == value:
        assert found == value
        return
    exponent = max(math.frexp(below)[1] - 1 if below else -math.inf, fmt.min_exponent)
    above = below + math.copysign(2.0 ** (exponent - fmt.significand_bits + 1), value)
    assert found in (below, above if abs(above) <= fmt.max else math.copysign(fmt.overflow, value))


@pytest.mark.parametrize(("mode", "key"), MODES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_zeros_infinities_and_nan_are_as_when_rounded_to_nearest(fmt, dtype, mode, key):
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], dtype=dtype)
    np.testing.assert_array_equal(round_to(special, fmt, mode, key=key), round_to(special, fmt))
    assert list(np.signbit(round_to(special[:2], fmt, mode, key=key))) == [False, True]


@pytest.mark.parametrize("part", [2.0**-12, 0.125, 1 / 3, 0.5, 0.999])
@pytest.mark.parametrize("start", ["normal", "subnormal"])
@pytest.mark.parametrize("fmt", [BFLOAT16, FLOAT16, FLOAT8_E4M3, FLOAT4_E2M1], ids=str)
def test_stochastic_rounding_is_right_in_the_mean(fmt, start, part):
    n = 2**18
    low = 1.0 if start == "normal" else 0.0
    spacing = fmt.epsilon if start == "normal" else fmt.smallest_subnormal
    value = np.float32(low + part * spacing)
    share = float((Fraction(float(value)) - Fraction(low)) / Fraction(spacing))  # as FP32 has it
    for sign in (1, -1):
        found = round_to(np.full(n, sign * value), fmt, "stochastic", key=(5, sign + 1))
        went_on = np.mean(found != sign * low)
        # Six standard deviations of the mean of n draws: once in 5e8 keys; and a step of 2^-24.
        assert abs(went_on - share) <= 6 * math.sqrt(share * (1 - share) / n) + 2.0**-24


def test_the_smallest_excess_goes_on_with_its_own_probability_in_bfloat16():
    # 2^-23 above 1 is 2^-16 of the spacing: of 2^22 draws, 64 +- 48 (six standard deviations).
    found = round_to(np.full(2**22, np.float32(1 + 2.0**-23)), BFLOAT16, "stochastic", key=KEY)
    assert 16 <= np.count_nonzero(found > 1) <= 112


def draws(key, n=2**16, bits=12):
    """Return n uniform numbers of 12 or 24 bits, as the rounding of single spacings shows them.

    An element goes on exactly if its draw is below the part cut off: bisection finds the draw.
    """
    low = np.zeros(n)
    for bit in 2.0 ** -np.arange(1, bits + 1):
        values = 1 + (low + bit) * BFLOAT16.epsilon  # exact: 7 + 24 bits behind the first
        went_on = round_to(values, BFLOAT16, "stochastic", key=key) > 1
        low += np.where(went_on, 0, bit)
    return (low * 2**bits).astype(int)


def chi_square_is_plausible(counts, expected):
    """Whether counts fit within six standard deviations of the statistic."""
    statistic, freedom = ((counts - expected) ** 2 / expected).sum(), counts.size - 1
    return abs(statistic - freedom) < 6 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("key", [(0,), (0, 0, 0), (1, 2, 3), (2**63, 10**6, 161)], ids=str)
def test_draws_are_uniform_and_independent_of_their_neighbours(key):
    drawn = draws(key)
    assert chi_square_is_plausible(np.bincount(drawn, minlength=2**12), len(drawn) / 2**12)
    upper = drawn >> 8  # 16 values
    for distance in (1, 2, 15, 16, 17, 63, 64, 65, 1024):
        pairs = np.bincount(upper[distance:] * 16 + upper[:-distance], minlength=256)
        assert chi_square_is_plausible(pairs, (len(upper) - distance) / 256), distance


@pytest.mark.parametrize(
    "other", [(1, 5, 9), (0, 6, 9), (0, 5, 8), (0, 5), (0, 5, 9, 0), (9, 5, 0)], ids=str
)
def test_every_number_of_a_key_counts_and_so_does_its_place(other):
    one, two = draws((0, 5, 9)) >> 8, draws(other) >> 8
    assert chi_square_is_plausible(np.bincount(one * 16 + two, minlength=256), len(one) / 256)


def test_lanes_of_a_row_are_independent_of_each_other():
    lanes = (draws((4, 2), 2**18) >> 8).reshape(-1, 64)
    for one, other in product(range(0, 64, 7), range(64)):
        if one != other:
            pairs = np.bincount(lanes[:, one] * 16 + lanes[:, other], minlength=256)
            assert chi_square_is_plausible(pairs, len(lanes) / 256), (one, other)


@given(any_key, st.integers(0, 200), st.integers(0, 200))
def test_an_elements_bits_depend_on_its_place_and_not_on_the_length(key, n, more):
    values = np.linspace(1, 2, n + more, dtype=np.float32)
    whole = round_to(values, BFLOAT16, "stochastic", key=key)
    same_bits(round_to(values[:n], BFLOAT16, "stochastic", key=key), whole[:n])
    same_bits(whole, round_to(values, BFLOAT16, "stochastic", key=tuple(key)))


def test_the_bits_stay_as_they_are_so_that_old_runs_can_be_continued():
    assert int(random_key((1, 2, 3))) == 0xB53FECBB601DD943
    drawn = [7935798, 10748724, 11759541, 13613765, 7479932, 67171]
    assert list(draws((1, 2, 3), 70, bits=24)[[0, 1, 16, 63, 64, 69]]) == drawn


@pytest.mark.parametrize(
    ("mode", "key"),
    [("up", None), ("stochastic", None), ("nearest", (1,)), ("toward_zero", (1,)), (None, None)],
)
def test_a_mode_without_what_it_needs_is_refused(mode, key):
    with pytest.raises(ValueError, match=r"one of nearest, toward_zero, stochastic.*received"):
        round_to([1.0], BFLOAT16, mode, key=key)


@pytest.mark.parametrize("key", [(), (-1,), (0, 1.5), ("a",), (None,)], ids=str)
def test_a_key_of_anything_but_counters_is_refused(key):
    with pytest.raises(ValueError, match=r"integers from 0 on, such as .*received"):
        round_to([1.0], BFLOAT16, "stochastic", key=key)


def hostile(fmt):
    """Return numbers, parts between them at each exponent of FP32, FP32's extremes, and noise."""
    random = np.random.RandomState(0)
    steps = 1 + np.arange(64) / 64
    scaled = np.ldexp(np.concatenate([steps, np.nextafter(np.float32(steps), np.float32(0))]),
                      np.arange(-149, 128)[:, None]).ravel()  # fmt: skip
    near = [fmt.max * part for part in (1 - 1e-6, 1, 1 + 1e-3, 1.1, 2)]
    noise = random.randint(0, 2**32, 10007, dtype=np.uint32).view(np.float32)
    with np.errstate(over="ignore"):
        found = np.concatenate([scaled, near, [0, np.inf]]).astype(np.float32)
    return np.concatenate([found, -found, noise[np.isfinite(noise)]])


@pytest.mark.usefixtures("native_operators")
@pytest.mark.parametrize("fmt", [*FORMATS, FLOAT32], ids=str)
def test_native_operators_give_the_bits_of_python(fmt):
    values = hostile(fmt)
    array = mx.nd.array(values)
    toward_zero = kernels.invoke(kernels.operator("toward_zero", fmt), array)
    same_bits(toward_zero.asnumpy(), round_to(values, fmt, "toward_zero"))
    for step in range(4):
        one, other = array.copy(), mx.nd.array(values[:77].reshape(7, 11))
        keys = [(3, step, 0), (3, step, 1)]
        round_stochastically([one, other], fmt, keys)
        same_bits(one.asnumpy(), round_to(values, fmt, "stochastic", key=keys[0]))
        expected = round_to(values[:77], fmt, "stochastic", key=keys[1]).reshape(7, 11)
        same_bits(other.asnumpy(), expected)


@pytest.mark.usefixtures("native_operators")
def test_native_operators_pass_nan_and_round_arrays_of_every_length():
    nan = mx.nd.array([np.nan, -np.nan, 1.0])
    round_stochastically([nan], BFLOAT16, [KEY])
    assert list(np.isnan(nan.asnumpy())) == [True, True, False]
    for n in (*range(1, 140), 4096, 4099):
        values = np.linspace(1, 2, n, dtype=np.float32)
        array = mx.nd.array(values)
        round_stochastically([array], BFLOAT16, [KEY])
        same_bits(array.asnumpy(), round_to(values, BFLOAT16, "stochastic", key=KEY))


@pytest.mark.parametrize("fmt", [BFLOAT16, FLOAT8_E4M3, FLOAT16], ids=str)
def test_without_native_operators_arrays_have_the_same_bits(fmt, monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda: False)
    values = hostile(fmt)[:5000]
    array = mx.nd.array(values)
    same_bits(round_array(array, fmt).asnumpy(), round_to(values, fmt))
    assert round_array(array, fmt, out=array) is array
    array = mx.nd.array(values)
    round_stochastically([array], fmt, [KEY])
    same_bits(array.asnumpy(), round_to(values, fmt, "stochastic", key=KEY))
