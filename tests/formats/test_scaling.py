"""Scaled rounding, against the definition of the scale and against another library's rounding."""

from __future__ import annotations

from mpgluon.formats.float_format import FLOAT4_E2M1, FLOAT8_E4M3, FLOAT8_E5M2, SMALL, round_to
from mpgluon.formats.scaling import round_scaled

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

any_format = st.sampled_from(SMALL)
moderate = st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False)
rows = arrays.arrays(
    np.float32, st.tuples(st.integers(1, 3), st.integers(1, 70)), elements=moderate
)


def scale_of(values, fmt):
    """Return the largest power of two that keeps the largest value within the format, by trying."""
    largest = float(np.max(np.abs(values)))
    if largest == 0:
        return 1.0
    return max(2.0**k for k in range(-100, 101) if largest * 2.0**k <= fmt.max)


@settings(deadline=None)
@given(rows, any_format)
@example(np.float32([[448, 2.0**-9]]), FLOAT8_E4M3)  # its largest number, and its smallest
def test_values_are_multiplied_by_a_power_of_two_rounded_and_divided_again(values, fmt):
    scale = scale_of(values, fmt)
    expected = (round_to(values.astype(np.float64) * scale, fmt) / scale).astype(np.float32)
    np.testing.assert_array_equal(round_scaled(values, fmt), expected)


@settings(deadline=None)
@given(rows, any_format, st.integers(-60, 60))
def test_a_power_of_two_in_front_of_all_values_changes_nothing_else(values, fmt, exponent):
    values = round_to(values, FLOAT8_E5M2)  # its range, so that FP32 holds all products exactly
    values[~np.isfinite(values)] = 0
    factor = np.float32(2.0**exponent)
    np.testing.assert_array_equal(
        round_scaled(values * factor, fmt), round_scaled(values, fmt) * factor
    )


@settings(deadline=None)
@given(rows, any_format)
def test_each_block_of_32_is_rounded_as_an_array_of_its_own(values, fmt):
    rounded = round_scaled(values, fmt, block=32)
    for row, row_rounded in zip(values, rounded):
        for start in range(0, row.size, 32):
            block = slice(start, start + 32)
            np.testing.assert_array_equal(row_rounded[block], round_scaled(row[block], fmt))
    np.testing.assert_array_equal(round_scaled(values.T, fmt, block=32, axis=0), rounded.T)


@pytest.mark.parametrize(
    ("fmt", "theirs"), [(FLOAT8_E4M3, "float8_e4m3fn"), (FLOAT8_E5M2, "float8_e5m2")]
)
def test_the_largest_value_never_saturates(fmt, theirs):
    dtype = getattr(pytest.importorskip("ml_dtypes"), theirs)
    for mantissa in np.linspace(1, 2, 257)[:-1].astype(np.float32):
        values = mantissa * np.float32([1, -0.3, 2.0**-7, 2.0**-20])
        scale = np.float32(scale_of(values, fmt))
        assert fmt.max / 2 < values[0] * scale <= fmt.max
        expected = (values * scale).astype(dtype).astype(np.float32) / scale
        np.testing.assert_array_equal(round_scaled(values, fmt), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_infinity_or_nan_makes_nan_of_all_that_share_its_scale(bad):
    values = np.ones((2, 64), np.float32)
    values[1, 40] = bad
    assert np.isnan(round_scaled(values, FLOAT8_E4M3)).all()
    in_blocks = round_scaled(values, FLOAT8_E4M3, block=32)
    np.testing.assert_array_equal(np.isnan(in_blocks), np.repeat([[0, 0], [0, 1]], 32, axis=1))


def test_zeros_keep_their_sign_and_empty_arrays_their_shape():
    zeros = np.float32([[0.0, -0.0]])
    assert np.signbit(round_scaled(zeros, FLOAT4_E2M1)).tolist() == [[False, True]]
    for block in (None, 32):
        assert round_scaled(np.empty((2, 0), np.float32), FLOAT8_E4M3, block=block).shape == (2, 0)


def test_scales_end_where_fp32_could_not_hold_the_numbers():
    tiny = np.float32([2.0**-120, 2.0**-140])
    unit = FLOAT8_E4M3.smallest_subnormal * 2.0**-100
    np.testing.assert_array_equal(round_scaled(tiny, FLOAT8_E4M3), np.rint(tiny / unit) * unit)
    huge = np.float32([2.0**127, -(2.0**100)])
    largest = FLOAT8_E4M3.max * 2.0**100
    np.testing.assert_array_equal(round_scaled(huge, FLOAT8_E4M3), [largest, -(2.0**100)])


@pytest.mark.parametrize(
    ("values", "options", "error", "message"),
    [
        (np.float16([60000, 65504]), {}, TypeError, "round_scaled takes float32 or float64 values"),
        (["a"], {}, TypeError, "round_scaled takes float32 or float64 values"),
        (np.ones(4), {"block": 0}, ValueError, "at least 1; received block=0 and axis=-1"),
        (np.ones(4), {"block": -1}, ValueError, "at least 1; received block=-1 and axis=-1"),
        (np.ones(4), {"block": 2, "axis": 1}, ValueError, r"axis=1 for values of shape \(4,\)"),
        (0.5, {"block": 2}, ValueError, r"for values of shape \(\)"),
    ],
)
def test_values_and_blocks_that_cannot_be_scaled_are_refused(values, options, error, message):
    with pytest.raises(error, match=message):
        round_scaled(values, FLOAT8_E4M3, **options)


def test_integers_are_scaled_as_float64():
    assert round_scaled([1, 3], FLOAT8_E4M3).tolist() == [1, 3]
