"""Rounding, exhaustively, against NumPy's float16, against bits, and against exact fractions."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction

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
    round_to,
)

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

pytestmark = pytest.mark.filterwarnings("error")

FLOAT64 = FloatFormat("float64", significand_bits=53, exponent_bits=11)
FORMATS = (FLOAT16, BFLOAT16, FLOAT32)
INPUT_DTYPES = ("float32", "float64")
FINITE_PATTERNS = np.arange(0x7C00, dtype=np.uint16)  # of float16, from 0 to 65504, in order

any_format = st.sampled_from(FORMATS)
any_float = st.floats(allow_nan=False)
any_finite = st.floats(allow_nan=False, allow_infinity=False)


def float16_of(patterns):
    return np.asarray(patterns, dtype=np.uint16).view(np.float16)


def bfloat16_of(patterns):
    """Return the float32 numbers whose upper halves are the patterns: what bfloat16 means."""
    return (np.asarray(patterns, dtype=np.uint32) << 16).view(np.float32)


def cast_to_float16(values):
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(values.dtype)


def round_bits_to_bfloat16(values):
    """Round float32 to bfloat16 with integer arithmetic on the bits alone."""
    bits = values.view(np.uint32)
    tie_to_even = np.uint32(0x7FFF) + ((bits >> 16) & 1)
    return ((bits + tie_to_even) & np.uint32(0xFFFF0000)).view(np.float32)


def same_bits(left, right):
    assert left.dtype == right.dtype
    integers = {4: np.uint32, 8: np.uint64}[left.dtype.itemsize]
    np.testing.assert_array_equal(left.view(integers), right.view(integers))


def neighbours(values):
    """Return the values, and the next number of their dtype on either side of each."""
    infinity = values.dtype.type(np.inf)
    below, above = np.nextafter(values, -infinity), np.nextafter(values, infinity)
    assert (below < values).all()
    assert (values < above).all()
    return np.concatenate([below, values, above])


def float16_ties(dtype):
    """Return every midpoint of neighbouring float16 numbers, 65520 included, both signs."""
    upper_ends = np.append(float16_of(FINITE_PATTERNS[1:]).astype(dtype), dtype(2.0**16))
    positive = (float16_of(FINITE_PATTERNS).astype(dtype) + upper_ends) / 2  # exact: 12 bits
    return np.concatenate([positive, -positive])


@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_each_of_the_65536_float16_patterns_is_a_fixed_point(dtype):
    every = float16_of(np.arange(2**16)).astype(dtype)
    rounded = round_to(every, FLOAT16)
    numbers = ~np.isnan(every)
    assert (~numbers).sum() == 2 * (2**10 - 1)  # NaNs: all nonzero significands, both signs
    same_bits(rounded[numbers], every[numbers])
    assert np.isnan(rounded[~numbers]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_each_float16_tie_and_its_neighbours_round_as_in_numpy(dtype):
    values = neighbours(float16_ties(dtype))
    same_bits(round_to(values, FLOAT16), cast_to_float16(values))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_each_float16_tie_goes_to_the_even_pattern(dtype):
    ties = float16_ties(dtype)[: len(FINITE_PATTERNS)]
    even = FINITE_PATTERNS + (FINITE_PATTERNS & 1)  # of the pattern below and the one above
    same_bits(round_to(ties, FLOAT16), float16_of(even).astype(dtype))


def test_float64_values_just_above_a_tie_round_up_although_float32_cannot_tell_them_from_it():
    ties = float16_ties(np.float64)[: len(FINITE_PATTERNS)]
    values = np.nextafter(ties, np.inf)
    np.testing.assert_array_equal(values.astype(np.float32), ties)  # the trap is there
    twice_rounded = round_to(values.astype(np.float32), FLOAT16)
    once_rounded = round_to(values, FLOAT16)
    same_bits(once_rounded, float16_of(FINITE_PATTERNS + 1).astype(np.float64))
    assert (twice_rounded != once_rounded).sum() == len(ties) / 2  # wrong below each odd pattern


@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_each_of_the_65536_bfloat16_patterns_is_a_fixed_point(dtype):
    every = bfloat16_of(np.arange(2**16))
    numbers = every[~np.isnan(every)].astype(dtype)
    assert len(numbers) == 2**16 - 2 * (2**7 - 1)
    same_bits(round_to(numbers, BFLOAT16), numbers)


def test_each_bfloat16_tie_and_its_neighbours_round_as_their_bits_say():
    below = np.concatenate([np.arange(0x7F80), 0x8000 + np.arange(0x7F80)]).astype(np.uint32) << 16
    ties = below | 0x8000
    values = np.concatenate([ties - 1, ties, ties + 1]).view(np.float32)
    same_bits(round_to(values, BFLOAT16), round_bits_to_bfloat16(values))


def test_float64_values_on_either_side_of_each_bfloat16_tie_go_to_that_side():
    patterns = np.arange(0x7F80, dtype=np.uint32)
    ties = (patterns << 16 | 0x8000).view(np.float32).astype(np.float64)
    lower, upper = bfloat16_of(patterns), bfloat16_of(patterns + 1)
    same_bits(round_to(np.nextafter(ties, 0), BFLOAT16), lower.astype(np.float64))
    same_bits(round_to(np.nextafter(ties, np.inf), BFLOAT16), upper.astype(np.float64))


@given(st.integers(0, 2**32 - 1))
def test_any_float32_rounds_to_bfloat16_as_its_bits_say(pattern):
    value = np.array([pattern], dtype=np.uint32).view(np.float32)
    assume(not np.isnan(value[0]))
    same_bits(round_to(value, BFLOAT16), round_bits_to_bfloat16(value))


@given(any_finite)
def test_float64_rounds_to_float32_as_the_processor_does(value):
    with np.errstate(over="ignore"):
        expected = np.float64(np.float32(value))
    same_bits(round_to([value], FLOAT32), np.array([expected]))


@pytest.mark.parametrize("bits", [(2, 2), (3, 3), (2, 3), (5, 2)])
def test_a_tiny_format_rounds_to_the_nearest_of_all_its_numbers(bits):
    fmt = FloatFormat("tiny", significand_bits=bits[0], exponent_bits=bits[1])
    # All its numbers from the definition: significand times a power of two.
    significands = range(2**fmt.significand_bits)
    bias = 2 ** (fmt.exponent_bits - 1) - 1
    spacings = [Fraction(2) ** (e - fmt.significand_bits + 1) for e in range(1 - bias, bias + 1)]
    numbers = sorted(
        {significand * spacing for significand in significands for spacing in spacings}
    )
    beyond = Fraction(2) ** (bias + 1)  # stands for infinity: the next number, without a limit
    numbers.append(beyond)
    step = numbers[1] / 8
    for value in (n * step for n in range(int((beyond + numbers[1]) / step))):
        distances = [abs(number - value) for number in numbers]
        nearest = [i for i, distance in enumerate(distances) if distance == min(distances)]
        # One of two nearest numbers has an even index, which is its pattern.
        index = next(i for i in nearest if len(nearest) == 1 or i % 2 == 0)
        expected = math.inf if numbers[index] == beyond else float(numbers[index])
        assert round_to(float(value), fmt) == expected
        assert round_to(-float(value), fmt) == -expected


@given(any_float, any_format)
def test_rounding_twice_is_rounding_once(value, fmt):
    once = round_to([value], fmt)
    same_bits(round_to(once, fmt), once)


@given(any_float, any_float, any_format)
def test_rounding_keeps_the_order(left, right, fmt):
    smaller, larger = sorted([left, right])
    assert round_to(smaller, fmt) <= round_to(larger, fmt)


@given(any_float, any_format)
def test_rounding_commutes_with_the_sign(value, fmt):
    same_bits(round_to([-value], fmt), -round_to([value], fmt))


@given(any_finite, any_format)
def test_the_error_is_at_most_the_unit_roundoff_in_the_normal_range(value, fmt):
    assume(fmt.smallest_normal <= abs(value) <= fmt.max)
    error = abs(Fraction(float(round_to(value, fmt))) - Fraction(value))
    assert error <= Fraction(fmt.unit_roundoff) * Fraction(abs(value))


@given(st.floats(-1, 1), any_format)
def test_the_error_is_at_most_half_a_subnormal_below_the_normal_range(share, fmt):
    value = share * fmt.smallest_normal
    error = abs(Fraction(float(round_to(value, fmt))) - Fraction(value))
    assert error <= Fraction(fmt.smallest_subnormal) / 2


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_half_a_spacing_above_the_largest_number_is_where_infinity_begins(fmt):
    threshold = fmt.max + 2.0 ** (fmt.max_exponent - fmt.significand_bits)
    assert round_to(np.nextafter(threshold, 0), fmt) == fmt.max
    assert round_to(threshold, fmt) == np.inf
    assert round_to(-np.nextafter(threshold, 0), fmt) == -fmt.max
    assert round_to(-threshold, fmt) == -np.inf


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_the_largest_float64_numbers_become_infinite_and_the_smallest_zero(fmt):
    huge, tiny = np.finfo(np.float64).max, np.nextafter(0, 1)
    same_bits(round_to([huge, -huge], fmt), np.array([np.inf, -np.inf]))
    same_bits(round_to([tiny, -tiny], fmt), np.array([0.0, -0.0]))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_subnormals_are_kept_and_half_the_smallest_one_is_a_tie_with_zero(fmt):
    smallest = fmt.smallest_subnormal
    values = np.array([1, 0.5, 1.5, 2.5, 3]) * smallest
    same_bits(round_to(values, fmt), np.array([1, 0, 2, 2, 3]) * smallest)
    assert round_to(np.nextafter(smallest / 2, 1), fmt) == smallest


@pytest.mark.parametrize("dtype", INPUT_DTYPES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_signed_zeros_infinities_and_nan_pass_through(fmt, dtype):
    special = np.array([0.0, -0.0, np.inf, -np.inf], dtype=dtype)
    same_bits(round_to(special, fmt), special)
    assert np.isnan(round_to(np.array([np.nan], dtype=dtype), fmt)).all()


@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_shape_and_dtype_are_those_of_the_input_which_stays_as_it_was(dtype):
    values = np.array([[1.0, 1.0001, -3.3]], dtype=dtype)
    before = values.copy()
    rounded = round_to(values, FLOAT16)
    assert (rounded.shape, rounded.dtype) == (values.shape, values.dtype)
    assert not np.shares_memory(rounded, values)
    same_bits(values, before)
    empty = round_to(np.empty((0, 3), dtype=dtype), FLOAT16)
    assert (empty.shape, empty.dtype) == ((0, 3), dtype)


@pytest.mark.parametrize("values", [2049, [2049], True, np.int64(2049), np.uint8([7])])
def test_integers_and_lists_are_taken_as_float64(values):
    rounded = round_to(values, FLOAT16)
    assert isinstance(rounded, np.ndarray)
    assert (rounded.shape, rounded.dtype) == (np.shape(values), np.float64)
    np.testing.assert_array_equal(rounded, np.float16(values))


@pytest.mark.parametrize(
    "values", [np.float16(1), np.complex64(1), np.longdouble(1), "1.0", [2**70], [None]]
)
def test_other_kinds_of_values_are_refused(values):
    with pytest.raises(TypeError, match=r"takes float32 or float64 values, received .*astype"):
        round_to(values, FLOAT16)


def test_float32_values_are_refused_for_a_format_with_longer_significands():
    with pytest.raises(TypeError, match="float32 cannot hold every float64 number; pass float64"):
        round_to(np.float32(1), FLOAT64)
    assert round_to(np.float64(1) / 3, FLOAT64) == np.float64(1) / 3


def test_float32_values_are_refused_for_a_format_with_a_wider_range():
    wide = FloatFormat("wide", significand_bits=11, exponent_bits=11)
    largest = np.finfo(np.float32).max
    assert round_to(np.float64(largest), wide) == 2.0**128  # finite, but not in float32
    with pytest.raises(TypeError, match="float32 cannot hold every wide number"):
        round_to(largest, wide)


@pytest.mark.parametrize("fmt", [FLOAT16, FLOAT32, FLOAT64], ids=str)
def test_the_numbers_of_a_format_equal_numpys(fmt):
    numpy = np.finfo(fmt.name)
    assert (fmt.significand_bits, fmt.exponent_bits) == (numpy.nmant + 1, numpy.iexp)
    assert fmt.max_exponent == numpy.maxexp - 1  # NumPy's is the first that overflows
    assert (fmt.min_exponent, fmt.max) == (numpy.minexp, numpy.max)
    assert fmt.smallest_normal == numpy.smallest_normal
    assert fmt.smallest_subnormal == numpy.smallest_subnormal
    assert fmt.epsilon == numpy.eps
    assert fmt.unit_roundoff == numpy.epsneg


def test_the_numbers_of_bfloat16_are_upper_halves_of_float32_patterns():
    largest, normal, subnormal, one, after_one = bfloat16_of([0x7F7F, 0x0080, 1, 0x3F80, 0x3F81])
    assert (BFLOAT16.max, BFLOAT16.smallest_normal) == (largest, normal)
    assert BFLOAT16.smallest_subnormal == subnormal
    assert one == 1
    assert BFLOAT16.epsilon == after_one - one
    assert BFLOAT16.unit_roundoff == BFLOAT16.epsilon / 2
    assert (BFLOAT16.max_exponent, BFLOAT16.min_exponent) == (127, -126)  # as float32


def test_a_format_prints_as_its_name_and_cannot_be_changed():
    assert [str(fmt) for fmt in FORMATS] == ["float16", "bfloat16", "float32"]
    with pytest.raises(FrozenInstanceError):
        FLOAT16.significand_bits = 8


# --- formats of eight bits and fewer ---------------------------------------------------------

SMALL = {
    FLOAT8_E4M3: "float8_e4m3fn", FLOAT8_E5M2: "float8_e5m2", FLOAT6_E3M2: "float6_e3m2fn",
    FLOAT6_E2M3: "float6_e2m3fn", FLOAT4_E2M1: "float4_e2m1fn",
}  # fmt: skip
small_formats = pytest.mark.parametrize("fmt", SMALL, ids=str)


def ml_dtypes_of(fmt):
    """Return the same format as another library has it."""
    return np.dtype(getattr(pytest.importorskip("ml_dtypes"), SMALL[fmt]))


def numbers_of(fmt):
    """Return all nonnegative numbers of a format, in the order of the codes."""
    significands = range(2 ** (fmt.significand_bits - 1), 2**fmt.significand_bits)
    subnormal = [n * fmt.smallest_subnormal for n in range(significands[0])]
    normal = [
        n * 2.0 ** (exponent - fmt.significand_bits + 1)
        for exponent in range(fmt.min_exponent, fmt.max_exponent + 1)
        for n in significands
    ]
    return np.array(subnormal + normal[: len(normal) - (fmt == FLOAT8_E4M3)], np.float32)


def values_around(fmt):
    """Return all numbers, ties and neighbours, each power of two in FP32, and what overflows."""
    numbers = numbers_of(fmt)
    after = np.float32(2 * numbers[-1] - numbers[-2])  # which would come next
    ends = np.append(numbers, after)
    ties = (ends[1:] + ends[:-1]) / 2
    powers = np.ldexp(np.float32(1), np.arange(-149, 128))
    positive = np.concatenate([ends, ties, powers, 1.75 * powers]).astype(np.float32)
    positive = positive.view(np.uint32)
    positive = np.concatenate([positive, positive[1:] - 1, positive + 1]).view(np.float32)
    return np.concatenate([positive, -positive, np.float32([np.inf, -np.inf])])


@small_formats
def test_every_code_of_a_small_format_is_the_number_that_ml_dtypes_says(fmt):
    other = ml_dtypes_of(fmt)
    bits = 1 + fmt.exponent_bits + fmt.significand_bits - 1
    values = np.arange(2**bits, dtype=np.uint8).view(other).astype(np.float32)
    finite = values[np.isfinite(values)]
    np.testing.assert_array_equal(finite[: finite.size // 2], numbers_of(fmt))
    same_bits(round_to(values[~np.isnan(values)], fmt), values[~np.isnan(values)])
    assert np.isnan(values).any() == fmt.has_nan
    assert np.isinf(values).any() == (fmt.overflow == np.inf)
    assert (finite.max(), finite[1]) == (fmt.max, fmt.smallest_subnormal)


@small_formats
def test_every_tie_neighbour_and_overflow_of_a_small_format_rounds_as_in_ml_dtypes(fmt):
    other, values = ml_dtypes_of(fmt), values_around(fmt)
    expected = values.astype(other).astype(np.float32)
    rounded = round_to(values, fmt)
    np.testing.assert_array_equal(rounded, expected)
    same_bits(np.copysign(np.float32(1), rounded), np.copysign(np.float32(1), values))


@small_formats
def test_a_format_that_saturates_differs_only_where_the_other_overflows(fmt):
    values, saturating = values_around(fmt), replace(fmt, saturates=True)
    plain, saturated = round_to(values, fmt), round_to(values, saturating)
    overflows = ~(np.abs(plain) <= fmt.max)
    assert overflows.any() != fmt.saturates
    same_bits(saturated[~overflows], plain[~overflows])
    same_bits(saturated[overflows], np.copysign(np.float32(fmt.max), values[overflows]))
    assert np.isnan(round_to(np.float32("nan"), saturating))


def test_the_largest_numbers_equal_the_specifications():
    assert [fmt.max for fmt in SMALL] == [448, 57344, 28, 7.5, 6]
    subnormals = [fmt.smallest_subnormal for fmt in SMALL]
    assert subnormals == [2.0**-9, 2.0**-16, 2.0**-4, 2.0**-3, 2.0**-1]
    assert (TFLOAT32.epsilon, TFLOAT32.max_exponent) == (FLOAT16.epsilon, FLOAT32.max_exponent)


@pytest.mark.parametrize(
    ("numbers", "flags", "message"),
    [
        ((0, 4), {}, "significand_bits counts the hidden bit and is 2 to 53 .* received 0 for x"),
        ((1, 4), {}, "is 2 to 53 .* received 1 for x"),
        ((54, 4), {}, "is 2 to 53 .* received 54 for x"),
        ((4, 1), {}, "exponent_bits is 2 to 11 .* received 1 for x"),
        ((4, 12), {}, "exponent_bits is 2 to 11 .* received 12 for x"),
        ((4, 11), {"finite_only": True}, "2 to 10 with finite_only; received 11 for x"),
        ((4, 4), {"finite_only": True, "has_nan": False}, "x has no NaN, so it needs finite_only"),
        ((4, 4), {"saturates": True, "has_nan": False}, "x has no NaN, so it needs finite_only"),
    ],
)
def test_widths_out_of_range_and_overflow_without_a_code_are_refused(numbers, flags, message):
    with pytest.raises(ValueError, match=message):
        FloatFormat("x", *numbers, **flags)


def test_float32_values_are_refused_for_a_finite_only_format_beyond_float32():
    wide = FloatFormat("wide", significand_bits=4, exponent_bits=8, finite_only=True)
    assert round_to(np.float64(2.0**128), wide) == 2.0**128
    with pytest.raises(TypeError, match="float32 cannot hold every wide number"):
        round_to(np.float32(1), wide)


@pytest.mark.parametrize("widths", [(4.0, 4), (4, 4.0), (4.5, 4), ("4", 4)])
def test_widths_are_integers(widths):
    with pytest.raises(TypeError, match=r"must be an int, received .* for x"):
        FloatFormat("x", *widths)
    assert FloatFormat("x", np.int64(4), 4).max == FloatFormat("x", 4, 4).max


def test_a_format_is_not_a_name():
    with pytest.raises(TypeError, match=r"fmt must be a FloatFormat .*, received 'float16'"):
        round_to(0.3, "float16")


@pytest.mark.parametrize("key", [5, None, (), (1.5,)])
def test_a_key_is_a_sequence_of_integers(key):
    with pytest.raises(ValueError, match="key"):
        round_to(0.3, FLOAT16, "stochastic", key=key)
    assert round_to(0.3, FLOAT16, "stochastic", key=np.array([5, 1])) == pytest.approx(
        0.3, rel=1e-3
    )
