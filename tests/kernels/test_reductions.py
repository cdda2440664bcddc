"""Finiteness and norms over arrays of any format and device, against NumPy in float64."""

import math

from mpgluon import kernels
from mpgluon.formats.float_format import FLOAT32
from mpgluon.kernels.dtypes import cast
from mpgluon.kernels.reductions import all_finite, global_norm, sums_of_squares

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd

DTYPES = ("float16", "float32", "float64")
BAD = (math.inf, -math.inf, math.nan)


@pytest.fixture(autouse=True, params=[False, True], ids=["MXNet's own", "native operators"])
def _operators(request, monkeypatch):
    if request.param:
        request.getfixturevalue("native_operators")
    monkeypatch.setattr(kernels, "available", lambda: request.param)


def array(values, dtype="float32", ctx=None):
    return mx.nd.array(values, dtype=dtype, ctx=ctx or mx.cpu(0))


def mixture():
    """Return finite arrays in two formats on two devices, as gradients of a cast network are."""
    return [
        array([[1.0, -2.0], [0.0, 65504.0]], "float16"),
        array([1.0, -2.0, 3e18], "float32"),
        array([0.5], "float32", mx.cpu(1)),
        array([[2.0**-24, -1.0]], "float16", mx.cpu(1)),
    ]


def row_sparse(rows, indices, dtype="float32"):
    rows = np.asarray(rows, dtype=dtype)
    return mx.nd.sparse.row_sparse_array((rows, indices), shape=(8, rows.shape[1]), dtype=dtype)


def gamma(count):
    """Return the bound of the relative error of `count` float32 roundings (Higham 2002, 3.1)."""
    return count * FLOAT32.unit_roundoff / (1 - count * FLOAT32.unit_roundoff)


# --- all_finite ------------------------------------------------------------------------------


FINITE = {
    "mixed formats and devices": mixture,
    "the largest FP16 numbers": lambda: [array([65504, -65504], "float16")],
    "the largest FP32 numbers": lambda: [array([FLOAT32.max, -FLOAT32.max])],
    "squares that overflow FP32 only together": lambda: [array(np.full(1000, 1e19))],
    "a sparse gradient without rows": lambda: [mx.nd.sparse.zeros("row_sparse", (8, 2))],
    "float64 beyond FP32": lambda: [array([1e200], "float64")],
}


@pytest.mark.parametrize("arrays", FINITE.values(), ids=FINITE)
def test_finite_arrays_are_finite(arrays):
    assert all_finite(arrays()) is True


@pytest.mark.parametrize("bad", BAD)
def test_one_bad_element_is_found_wherever_it_is(bad):
    for which, shape in enumerate(one.shape for one in mixture()):
        for position in np.ndindex(shape):
            arrays = mixture()
            arrays[which][position] = bad
            assert all_finite(arrays) is False, (which, position)


def test_elements_whose_squares_overflow_float32_are_finite():
    with np.errstate(over="ignore"):
        assert np.square(np.float32(1e30)) == np.inf
    assert all_finite([array([1.0, 1e30]), array([1.0], "float16")])


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_element_is_found_behind_one_whose_square_overflows(bad):
    assert not all_finite([array([1e30]), array([1.0, bad], "float16", mx.cpu(1))])


@pytest.mark.parametrize("where", [0, 199, 200, 201, 399, 400, 449])
def test_a_bad_element_is_found_among_more_arrays_than_an_operator_takes(where):
    arrays = [array([1.0, 2.0], ("float32", "float16")[i % 2]) for i in range(450)]
    assert all_finite(arrays)
    arrays[where][1] = math.inf
    assert not all_finite(arrays)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_stored_rows_of_a_sparse_gradient_are_looked_at(dtype, bad):
    assert all_finite([array([1.0]), row_sparse([[1, 2], [3, 4]], [0, 5], dtype)])
    assert not all_finite([array([1.0]), row_sparse([[1, 2], [3, bad]], [0, 5], dtype)])


@pytest.mark.parametrize("first", DTYPES)
@pytest.mark.parametrize("second", DTYPES)
def test_any_two_float_formats_can_be_mixed(first, second):
    arrays = [array([3.0, 0.0], first), array([4.0], second)]
    assert all_finite(arrays)
    assert global_norm(arrays) == 5
    arrays[1][0] = math.nan
    assert not all_finite(arrays)
    assert math.isnan(global_norm(arrays))


@pytest.mark.parametrize(("value", "finite"), [(1.0, True), (1e30, True), (math.inf, False)])
def test_bfloat16_arrays_can_be_asked_too(value, finite):
    assert all_finite([cast(array([value]), "bfloat16"), array([1.0])]) is finite


# --- global_norm -----------------------------------------------------------------------------


def test_the_norm_of_float16_elements_of_256_is_not_infinite():
    values = np.full((4, 4), 256, dtype=np.float16)
    with np.errstate(over="ignore"):
        assert np.sqrt(np.sum(values**2)) == np.inf  # summed in float16
    assert global_norm([array(values, "float16")]) == 4 * 256  # exact: powers of two


NORMS = {
    "arrays, formats and devices": (
        lambda: [array([[1, 2]], "float16"), array([4]), array([10, 2], ctx=mx.cpu(1))],
        math.sqrt(125),
    ),
    "more arrays than an operator takes": (lambda: [array([1.0])] * 401, math.sqrt(401)),
    "infinity": (lambda: [array([1.0, math.inf]), array([1.0], "float16")], math.inf),
    "-infinity": (lambda: [array([1.0, -math.inf]), array([1.0], "float16")], math.inf),
    "NaN": (lambda: [array([1.0], "float16"), array([math.nan, math.inf])], math.nan),
    "zeros": (lambda: [array([0.0, -0.0]), array([0.0], "float16")], 0),
    "sparse": (lambda: [row_sparse([[1, 2], [4, 10]], [0, 5]), array([2.0])], math.sqrt(125)),
    "sparse FP16": (
        lambda: [row_sparse([[1, 2], [4, 10]], [0, 5], "float16"), array([2.0])],
        math.sqrt(125),
    ),
    "no rows": (lambda: [mx.nd.sparse.zeros("row_sparse", (8, 2)), array([2.0])], 2),
}


@pytest.mark.parametrize(("arrays", "norm"), NORMS.values(), ids=NORMS)
def test_the_norm_runs_over_all_that_is_given(arrays, norm):
    np.testing.assert_equal(global_norm(arrays()), norm)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("exponent", [-8, 0, 8])
def test_the_norm_is_numpys_up_to_the_roundings_of_a_float32_sum(dtype, exponent):
    rng = np.random.default_rng(0)
    shapes = [(1,), (3, 5), (64, 7, 3), (4096,)]
    values = [(rng.standard_normal(shape) * 2.0**exponent).astype(dtype) for shape in shapes]
    expected = math.sqrt(math.fsum(float(x) ** 2 for one in values for x in one.ravel()))
    norm = global_norm([array(one, dtype) for one in values])
    # n squares, and n - 1 additions in any order: the sum of positive terms is off by at most
    # gamma(n), and so is its root. float64 adds less than one float32 rounding to that.
    count = sum(one.size for one in values)
    assert abs(norm - expected) <= gamma(count + 1) * expected


@pytest.mark.parametrize("value", [1e30, 1e-22, 1e-30])
def test_the_norm_of_a_single_finite_element_is_its_magnitude(value):
    element = float(np.float32(-value))
    assert math.isclose(global_norm([array([element])]), -element, rel_tol=gamma(3))


def test_scaled_gradients_have_exactly_the_scaled_norm():
    values = np.random.default_rng(1).standard_normal(100).astype(np.float32)
    assert global_norm([array(values * 2**10)]) == 2**10 * global_norm([array(values)])


# --- both ------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", [all_finite, global_norm])
@pytest.mark.parametrize("nothing", [[], ()])
def test_an_empty_list_of_arrays_is_refused(question, nothing):
    with pytest.raises(ValueError, match=r"received no arrays; .* is a mistake: does any"):
        question(nothing)


@pytest.mark.parametrize("question", [all_finite, global_norm])
def test_a_question_changes_no_array_and_is_not_recorded(question):
    arrays = [*mixture(), array([1e30])]
    before = [one.asnumpy() for one in arrays]
    arrays[1].attach_grad()
    with autograd.record():
        result = arrays[1] * 2
        question(arrays)
        assert autograd.is_recording()
    result.backward()
    for one, old in zip(arrays, before):
        np.testing.assert_array_equal(one.asnumpy(), old)
    np.testing.assert_array_equal(arrays[1].grad.asnumpy(), [2, 2, 2])


# --- sums_of_squares -------------------------------------------------------------------------


@pytest.mark.usefixtures("native_operators")
def test_a_native_sum_does_not_depend_on_the_other_sums_of_the_call(monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda: True)
    rng = np.random.default_rng(0)
    sizes = (1, 15, 4095, 4096, 4097, 70000, 3)
    arrays = [array(rng.standard_normal(size).astype(np.float32)) for size in sizes]
    together = sums_of_squares(arrays, in_any_order=True).asnumpy()
    alone = [sums_of_squares([one], in_any_order=True).asnumpy() for one in arrays]
    assert together.tobytes() == np.concatenate(alone).tobytes()
    for one, total in zip(arrays, together):
        expected = math.fsum(float(x) ** 2 for x in one.asnumpy())
        # At most 256 numbers are added in FP32, and the sums in float64.
        assert abs(total - expected) <= gamma(258) * expected
