"""Asking arrays and symbols for their format, and casting them."""

from mpgluon.formats.float_format import BFLOAT16, FLOAT16, FLOAT32, round_to
from mpgluon.kernels.bfloat16 import has_native_bfloat16
from mpgluon.kernels.dtypes import BFLOAT16_DTYPE, cast, dtype_name, is_array

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon

BITS16 = np.arange(2**16, dtype=np.uint16)
EVERY_FLOAT16 = BITS16.view(np.float16).astype(np.float32)
EVERY_BFLOAT16 = (BITS16.astype(np.uint32) << 16).view(np.float32)
FORMATS = {"float32": FLOAT32, "float16": FLOAT16, "bfloat16": BFLOAT16}
NOT_CAST = ("float64", "int8", "uint8", "int32", "int64")


def float_array(values, dtype="float32"):
    """Return an NDArray of one of the three formats."""
    return cast(mx.nd.array(values, dtype="float32"), dtype)


def numbers_of(array):
    return cast(array, "float32").asnumpy()


def boundaries_of(finite):
    """Return every midpoint of sorted float32 numbers with the float32 numbers on either side."""
    middle = finite[:-1] + (finite[1:] - finite[:-1]) / 2
    infinity = np.float32(np.inf)
    return np.concatenate(
        [np.nextafter(middle, -infinity), middle, np.nextafter(middle, infinity), finite]
    )


def run(symbol, **arrays):
    return symbol.eval(ctx=mx.cpu(), **arrays)[0]


# --- asking ----------------------------------------------------------------------------------


def test_arrays_and_symbols_are_arrays_and_nothing_else_is():
    assert is_array(mx.nd.zeros(1))
    assert is_array(mx.sym.var("x"))
    assert is_array(mx.nd.sparse.zeros("row_sparse", (2, 2)))
    assert not any(is_array(value) for value in (np.zeros(1), 1.0, [mx.nd.zeros(1)], None))


@pytest.mark.parametrize("dtype", ["float16", "float32", *NOT_CAST])
def test_an_array_is_of_the_dtype_that_it_was_made_with(dtype):
    assert dtype_name(mx.nd.zeros(1, dtype=dtype)) == dtype


def test_bfloat16_has_a_name_although_numpy_has_none():
    array = mx.nd.amp_cast(mx.nd.zeros(1), dtype=BFLOAT16_DTYPE)
    assert np.dtype(array.dtype) == BFLOAT16_DTYPE
    assert dtype_name(array) == "bfloat16"


def test_a_sparse_array_has_the_dtype_of_its_rows_and_a_symbol_does_not_know_its_own():
    assert dtype_name(mx.nd.sparse.zeros("row_sparse", (2, 2), dtype="float16")) == "float16"
    assert dtype_name(mx.sym.var("x")) is None
    assert dtype_name(mx.sym.var("x", dtype="float16") + 1) is None


# --- casting arrays --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("kept", [None, *NOT_CAST])
def test_arrays_of_the_dtype_integers_and_float64_are_returned_themselves(kept, dtype):
    array = mx.nd.array([3, 1], dtype=kept) if kept else float_array([1.0], dtype)
    assert cast(array, dtype) is array


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("target", FORMATS)
def test_a_cast_has_the_dtype_that_was_asked_for_and_leaves_its_operand_alone(source, target):
    array = float_array([[1.0, 2.0, 3.0]], source)
    result = cast(array, target)
    assert dtype_name(result) == target
    assert result.shape == (1, 3)
    assert dtype_name(array) == source
    np.testing.assert_array_equal(numbers_of(array), [[1, 2, 3]])


BOTH = [("float16", EVERY_FLOAT16), ("bfloat16", EVERY_BFLOAT16)]


def where_subnormals_are_kept(values, dtype):
    """Leave out bfloat16's subnormals, which a processor with AVX-512-BF16 flushes to zero."""
    return values[(np.abs(values) >= BFLOAT16.smallest_normal) | (dtype == "float16")]


@pytest.mark.parametrize(("dtype", "every"), BOTH, ids=["float16", "bfloat16"])
def test_every_pattern_is_widened_exactly_and_every_tie_rounded_once_and_to_even(dtype, every):
    numbers = where_subnormals_are_kept(every[~np.isnan(every)], dtype)
    assert len(numbers) > 0.99 * 2**16 - 2**11
    widened = numbers_of(float_array(numbers, dtype))
    np.testing.assert_array_equal(widened.view(np.uint32), numbers.view(np.uint32))
    assert np.isnan(numbers_of(float_array(every[np.isnan(every)], dtype))).all()
    values = boundaries_of(np.sort(every[np.isfinite(every)]))
    values = where_subnormals_are_kept(values, dtype)
    rounded = numbers_of(float_array(values, dtype))
    expected = round_to(values, FORMATS[dtype])
    np.testing.assert_array_equal(rounded.view(np.uint32), expected.view(np.uint32))


def test_subnormals_of_bfloat16_are_rounded_or_all_flushed_to_a_zero_of_their_sign():
    tiny = EVERY_BFLOAT16[np.abs(EVERY_BFLOAT16) < BFLOAT16.smallest_normal]
    values = boundaries_of(np.sort(tiny))
    values = values[np.abs(values) < BFLOAT16.smallest_normal]
    result = numbers_of(float_array(values, "bfloat16")).view(np.uint32)
    rounded = round_to(values, BFLOAT16).view(np.uint32)
    flushed = np.copysign(np.float32(0), values).view(np.uint32)
    if not has_native_bfloat16():  # oneDNN's own rounding leaves zeros without their sign
        result, flushed = result & 0x7FFFFFFF, flushed & 0x7FFFFFFF
        rounded &= 0x7FFFFFFF
    assert np.array_equal(result, rounded) or np.array_equal(result, flushed)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_infinity_begins_half_a_spacing_above_the_largest_number(dtype):
    fmt = FORMATS[dtype]
    threshold = np.float32(fmt.max + 2.0 ** (fmt.max_exponent - fmt.significand_bits))
    values = np.array([np.nextafter(threshold, np.float32(0)), threshold, np.inf], dtype=np.float32)
    np.testing.assert_array_equal(numbers_of(float_array(values, dtype)), [fmt.max, np.inf, np.inf])
    np.testing.assert_array_equal(
        -numbers_of(float_array(-values, dtype)), [fmt.max, np.inf, np.inf]
    )


@pytest.mark.parametrize(
    ("source", "target", "every"),
    [("float16", "bfloat16", EVERY_FLOAT16), ("bfloat16", "float16", EVERY_BFLOAT16)],
)
def test_between_the_16_bit_formats_every_pattern_is_rounded_once(source, target, every):
    numbers = every[~np.isnan(every)]
    result = numbers_of(cast(float_array(numbers, source), target))
    expected = round_to(numbers, FORMATS[target])
    if not has_native_bfloat16():  # oneDNN's own rounding leaves zeros without their sign
        result, expected = result + np.float32(0), expected + np.float32(0)
    np.testing.assert_array_equal(result.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_flow_back_and_are_cast_back(dtype):
    weight = mx.nd.array([1.0, 2.0, 3.0])
    weight.attach_grad()
    with autograd.record():
        loss = cast(cast(weight, dtype), "float32") * mx.nd.array([0.1, 2.0**-30, 7.0])
    loss.backward()
    # The gradient of the inner cast is of the 16-bit format, and so rounded once.
    assert dtype_name(weight.grad) == "float32"
    expected = round_to(np.array([0.1, 2.0**-30, 7.0], dtype=np.float32), FORMATS[dtype])
    np.testing.assert_array_equal(weight.grad.asnumpy(), expected)


class Casts(gluon.HybridBlock):
    """The sum of ``count`` casts of its input to ``dtype`` and back to FP32."""

    def __init__(self, dtype, count):
        super().__init__()
        self.dtype, self.count = dtype, count

    def hybrid_forward(self, F, x):
        return sum(cast(cast(x, self.dtype), "float32") for _ in range(self.count))


@pytest.mark.parametrize("hybridize", [False, True], ids=["imperative", "hybridized"])
@pytest.mark.parametrize("source", ["float32", "float16"])
@pytest.mark.parametrize("target", FORMATS)
def test_gradients_accumulate_through_a_cast(target, source, hybridize):
    net = Casts(target, 1)
    net.hybridize(hybridize)
    weight = mx.nd.array([1.0], dtype=source)
    weight.attach_grad(grad_req="add")
    for expected in (1, 2, 3):
        with autograd.record():
            result = net(weight)
        result.backward()
        assert weight.grad.asscalar() == expected


@pytest.mark.parametrize("hybridize", [{"active": False}, {}, {"static_alloc": True}], ids=str)
@pytest.mark.parametrize("count", [2, 7, 8, 12])  # MXNet adds 8 and more gradients in another way
@pytest.mark.parametrize("target", FORMATS)
def test_a_value_that_is_cast_many_times_gets_the_gradient_of_every_cast(target, count, hybridize):
    net = Casts(target, count)
    net.hybridize(**hybridize)
    weight = mx.nd.array([1.0])
    weight.attach_grad()
    with autograd.record():
        result = net(weight)
    result.backward()
    assert weight.grad.asscalar() == count


# --- casting symbols -------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["float32", "float16"])
@pytest.mark.parametrize("source", ["float32", "float16", *NOT_CAST])
def test_a_cast_of_a_symbol_does_what_a_cast_of_its_array_does(source, target):
    array = mx.nd.array([3, 1, 100], dtype=source)
    result = run(cast(mx.sym.var("x"), target), x=array)
    expected = cast(array, target)
    assert dtype_name(result) == dtype_name(expected)
    np.testing.assert_array_equal(result.asnumpy(), expected.asnumpy())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_symbol_is_rounded_like_an_array(dtype):
    values = mx.nd.array([0.1, 65519.0, 65520.0, 2.0**-25, 1 + 2.0**-11, 1 + 2.0**-8])
    rounded = run(cast(cast(mx.sym.var("x"), dtype), "float32"), x=values)
    np.testing.assert_array_equal(rounded.asnumpy(), numbers_of(cast(values, dtype)))


def test_a_symbol_of_unknown_dtype_gets_a_new_node_even_where_that_does_nothing():
    symbol = mx.sym.var("x")
    assert cast(symbol, "float32") is not symbol


def test_equal_casts_in_a_graph_stay_apart_so_that_each_gradient_is_rounded_by_itself():
    spacing = 2.0**-11  # of float16 between 0.5 and 1; half of it between 0.25 and 0.5
    first, second = np.float32(0.5 + 0.4 * spacing), np.float32(0.25 + 0.2 * spacing)
    apart = np.float32(np.float16(first)) + np.float32(np.float16(second))
    merged = np.float32(np.float16(first + second))
    assert (apart, merged) == (0.75, 0.75 + spacing)

    class TwoUses(gluon.HybridBlock):
        def __init__(self, to_float16):
            super().__init__()
            self.to_float16 = to_float16

        def hybrid_forward(self, F, x):
            uses = [
                F.amp_cast(self.to_float16(F, x), dtype="float32") * float(f)
                for f in (first, second)
            ]
            return uses[0] + uses[1]

    def gradient(to_float16, *, hybridize):
        net = TwoUses(to_float16)
        net.hybridize(hybridize)
        x = mx.nd.array([1.0])
        x.attach_grad()
        with autograd.record():
            result = net(x)
        result.backward()
        return x.grad.asscalar()

    def plain(F, x):
        return F.amp_cast(x, dtype="float16")

    def ours(_F, x):
        return cast(x, "float16")

    assert gradient(plain, hybridize=True) == merged  # what MXNet makes of equal nodes
    assert gradient(ours, hybridize=True) == apart
    assert gradient(ours, hybridize=False) == apart
