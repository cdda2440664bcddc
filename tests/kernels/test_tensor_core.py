"""Sums as a Tensor Core makes them: MMA-Sim's bits, and products that consist of such sums.

``mmasim_cases.npz`` holds MMA-Sim's results of small products, written by mmasim 2.1.1 with

    .venv-peers/bin/python tests/kernels/mmasim_side.py tests/kernels/mmasim_cases.npz 8

``make test WITH=peers`` computes a million per kind again. ``h100_cases.npz`` holds results of an
NVIDIA H100, written there by

    python tests/kernels/gpu_side.py tests/kernels/h100_cases.npz 32

with the same operands; of a million for each format (SIZE 320) all had our bits, too.
"""

import subprocess
from pathlib import Path

from mpgluon import kernels
from mpgluon.formats.float_format import BFLOAT16, FLOAT16, round_to
from mpgluon.formats.tensor_core import ACCUMULATIONS

import mxnet as mx
import numpy as np
import pytest
from helpers import module_from
from mxnet import autograd
from native_builds import EACH_KIND_OF_PROCESSOR, program

HERE = Path(__file__).resolve().parent
SIDE = HERE / "mmasim_side.py"
TORCH = HERE.parents[1] / ".venv-peers" / "bin" / "python"
FORMATS = {"float16": FLOAT16, "bfloat16": BFLOAT16}

mmasim_side = module_from(SIDE)
EACH_CASE = pytest.mark.parametrize("case", mmasim_side.CASES, ids="/".join)
pytestmark = pytest.mark.usefixtures("native_operators")


def run(operator, *arrays, fmt=FLOAT16, accumulation="hopper", **options):
    """Return the result of an operator, or with ``head`` also the gradients, as NumPy arrays."""
    head = options.pop("head", None)
    operands = [mx.nd.array(array) for array in arrays]
    for operand in operands:
        operand.attach_grad()
    name = kernels.accumulating_operator(f"on_values_{operator}", fmt, accumulation)
    with autograd.record():
        result = kernels.invoke(name, *operands, **options)
    if head is None:
        return result.asnumpy()
    result.backward(mx.nd.array(head))
    return [result.asnumpy(), *(operand.grad.asnumpy() for operand in operands)]


def assert_equal_bits(one, other):
    np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


def ours(case, size):
    """Return the bits of our dot products of a case."""
    architecture, dtype, character = case
    one, other = mmasim_side.operands(dtype, character, size)
    wide = (mmasim_side.values_of(codes, dtype) for codes in (one, other))
    result = run("dot", *wide, fmt=FORMATS[dtype], accumulation=architecture)
    return result.view(np.uint32)


@EACH_CASE
def test_dot_products_have_the_bits_of_recorded_ones_of_mma_sim(case):
    with np.load(HERE / "mmasim_cases.npz") as recorded:
        theirs = recorded["/".join(case)]
    np.testing.assert_array_equal(ours(case, len(theirs)), theirs)


@pytest.mark.parametrize("character", mmasim_side.CHARACTERS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_dot_products_have_the_bits_of_an_h100(dtype, character):
    with np.load(HERE / "h100_cases.npz") as recorded:
        assert "H100" in str(recorded["device"])
        theirs = recorded[f"{dtype}/{character}"]
    np.testing.assert_array_equal(ours(("hopper", dtype, character), len(theirs)), theirs)


@pytest.fixture(scope="module", params=EACH_KIND_OF_PROCESSOR, ids="-".join)
def multiply(request, tmp_path_factory):
    """Return a function that multiplies two matrices, compiled for one kind of processor."""
    command = program(HERE / "sums.cc", *request.param, tmp_path_factory.mktemp("sums"))

    def run(one, other, *numbers):
        sizes = (len(one), *other.shape)
        done = subprocess.run(
            [*command, *map(str, (*numbers, *sizes))],
            input=one.tobytes() + other.tobytes(),
            capture_output=True,
            check=True,
        )
        return np.frombuffer(done.stdout, np.uint32).reshape(len(one), -1)

    return run


def test_each_kind_of_processor_has_the_bits_of_mma_sim(multiply):
    with np.load(HERE / "mmasim_cases.npz") as recorded:
        for architecture, dtype, character in mmasim_side.CASES:
            theirs = recorded[f"{architecture}/{dtype}/{character}"]
            wide = [
                np.ascontiguousarray(mmasim_side.values_of(codes, dtype))
                for codes in mmasim_side.operands(dtype, character, len(theirs))
            ]
            numbers = (*ACCUMULATIONS[architecture], FORMATS[dtype].min_exponent)
            found = multiply(*wide, *numbers)
            np.testing.assert_array_equal(found, theirs, f"{architecture} {dtype} {character}")


@pytest.fixture(scope="module")
def many_of_mma_sim(tmp_path_factory):
    if not TORCH.exists():
        pytest.skip("PyTorch has no environment here; make test WITH=peers makes one")
    known = subprocess.run([TORCH, "-c", "import mmasim"], capture_output=True, check=False)
    if known.returncode != 0:
        pytest.skip(".venv-peers has no mmasim; remove it, and make test WITH=peers makes it again")
    path = tmp_path_factory.mktemp("mmasim") / "results.npz"
    subprocess.run([TORCH, SIDE, path, "320"], check=True, timeout=900)
    return np.load(path)


@pytest.mark.slow
def test_a_million_dot_products_of_each_kind_have_the_bits_of_mma_sim(many_of_mma_sim):
    compared = dict.fromkeys(mmasim_side.INSTRUCTIONS, 0)
    for case in mmasim_side.CASES:
        theirs = many_of_mma_sim["/".join(case)]
        np.testing.assert_array_equal(ours(case, len(theirs)), theirs, str(case))
        compared[case[:2]] += theirs.size
    assert min(compared.values()) > 10**6


def test_kinds_of_sums_differ_from_one_another_and_from_fp32():
    one, other = mmasim_side.operands("float16", "random", 64)
    wide = [mmasim_side.values_of(codes, "float16") for codes in (one, other)]
    results = [run("dot", *wide, accumulation=name) for name in ACCUMULATIONS]
    results.append(mx.nd.dot(*map(mx.nd.array, wide)).asnumpy())
    for i, result in enumerate(results):
        for after in results[i + 1 :]:
            assert (result != after).any()
            np.testing.assert_allclose(result, after, rtol=0, atol=1e-4)


def test_a_sum_is_cut_off_and_small_terms_are_lost():
    # 1 and seven times 2**-24. Volta keeps 23 fraction bits, and none of the small terms. Ampere
    # and Hopper add all, and cut the sum, seven halves of FP32's last bit, to three whole ones.
    terms = np.array([[1.0, *[2.0**-12] * 7]], "float32")
    once = np.array([[1.0, *[2.0**-12] * 7]], "float32").T
    found = {name: run("dot", terms, once, accumulation=name).item() for name in ACCUMULATIONS}
    assert found == {"volta": 1.0, "ampere": 1 + 3 * 2.0**-23, "hopper": 1 + 3 * 2.0**-23}
    # Towards zero, so in the same way below it.
    assert run("dot", -terms, once, accumulation="hopper").item() == -(1 + 3 * 2.0**-23)


# ---- Products of other shapes are made of such sums.


def on_grid(seed, *shapes):
    draw = np.random.RandomState(seed)
    return [round_to(draw.randn(*shape).astype("float32"), FLOAT16) for shape in shapes]


def dot(one, other):
    return run("dot", np.ascontiguousarray(one), np.ascontiguousarray(other))


def spread_out(head, stride):
    """Return an array with zeros between its rows and columns."""
    n, channels, *size = head.shape
    made = np.zeros((n, channels, *((one - 1) * s + 1 for one, s in zip(size, stride))), head.dtype)
    made[:, :, :: stride[0], :: stride[1]] = head
    return made


def windows(data, kernel, stride, dilate):
    """Return (images, channels, rows, columns, kernel rows, kernel columns)."""
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilate)]
    view = np.lib.stride_tricks.sliding_window_view(data, reach, axis=(2, 3))
    return view[:, :, :: stride[0], :: stride[1], :: dilate[0], :: dilate[1]]


CONVOLUTIONS = {  # shape, filters, kernel, and other options
    "plain": ((2, 3, 6, 7), 5, (3, 3), {}),
    "padded": ((2, 3, 6, 7), 5, (3, 3), {"pad": (1, 1)}),
    "a point": ((2, 20, 3, 3), 9, (1, 1), {}),
    "strided": ((3, 2, 9, 8), 3, (3, 2), {"stride": (2, 3)}),
    "rows left over": ((1, 2, 8, 8), 3, (3, 3), {"stride": (2, 2)}),
    "wide margin": ((2, 2, 4, 4), 3, (2, 2), {"pad": (3, 2)}),
    "dilated": ((2, 2, 9, 9), 3, (3, 2), {"dilate": (2, 3), "pad": (2, 0), "stride": (1, 2)}),
    "in groups": ((2, 6, 5, 5), 4, (3, 3), {"num_group": 2}),
    "depthwise": ((2, 4, 6, 6), 4, (3, 3), {"num_group": 4, "stride": (2, 2), "pad": (1, 1)}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_and_its_gradients_are_dot_products_of_unfolded_images(name):
    shape, filters, kernel, options = CONVOLUTIONS[name]
    case = {"kernel": kernel, "num_filter": filters, **options}
    stride, dilate = case.get("stride", (1, 1)), case.get("dilate", (1, 1))
    pad, groups = case.get("pad", (0, 0)), case.get("num_group", 1)
    data, weight, bias = on_grid(0, shape, (filters, shape[1] // groups, *kernel), (filters,))
    padded = np.pad(data, ((0, 0), (0, 0), *((p, p) for p in pad)))
    size = windows(padded, kernel, stride, dilate)
    (head,) = on_grid(1, (shape[0], filters, *size.shape[2:4]))
    result, *gradients = run("Convolution", data, weight, bias, head=head, **case)
    parts = [np.split(array, groups, axis=1) for array in (padded, head)]
    for group, (x, y) in enumerate(zip(*parts)):
        w = np.split(weight, groups)[group]
        of_group = slice(group * len(w), (group + 1) * len(w))
        seen = windows(x, kernel, stride, dilate)
        # Result: one sum for each filter and place.
        unfolded = seen.transpose(1, 4, 5, 0, 2, 3).reshape(w[0].size, -1)
        expected = dot(w.reshape(len(w), -1), unfolded)
        expected = expected.reshape(len(w), len(data), *head.shape[2:]).transpose(1, 0, 2, 3)
        found = result[:, of_group]
        assert_equal_bits(found, expected + bias[of_group, None, None])
        # Gradient of the weight: one sum over all places of all images.
        flat = y.transpose(1, 0, 2, 3).reshape(len(w), -1)
        assert_equal_bits(gradients[1][of_group], dot(flat, unfolded.T).reshape(w.shape))
        # Gradient of the data: what each point gave to every place, zero where that was none.
        reach = [(k - 1) * d for k, d in zip(kernel, dilate)]
        spread = spread_out(y, stride)
        around = [n + 2 * p - r - s for n, p, r, s in zip(shape[2:], pad, reach, spread.shape[2:])]
        spread = np.pad(spread, ((0, 0), (0, 0), *((r, r + a) for r, a in zip(reach, around))))
        seen = windows(spread, kernel, (1, 1), dilate)[..., ::-1, ::-1]
        unfolded = seen.transpose(1, 4, 5, 0, 2, 3).reshape(y.shape[1] * kernel[0] * kernel[1], -1)
        turned = w.transpose(1, 0, 2, 3).reshape(w.shape[1], -1)
        whole = dot(turned, unfolded).reshape(w.shape[1], len(data), *x.shape[2:])
        inner = [slice(p, p + n) for p, n in zip(pad, shape[2:])]
        expected = whole.transpose(1, 0, 2, 3)[(slice(None), slice(None), *inner)]
        channels = slice(group * w.shape[1], (group + 1) * w.shape[1])
        assert_equal_bits(gradients[0][:, channels], np.ascontiguousarray(expected))
    np.testing.assert_allclose(gradients[2], head.sum((0, 2, 3), np.float64), rtol=1e-6)


@pytest.mark.parametrize("dimensions", [1, 3])
def test_lines_and_volumes_are_convolved_as_images_are(dimensions):
    shape, kernel = (2, 3, 5, 4, 6)[: 2 + dimensions], (3, 2, 2)[:dimensions]
    data, weight = on_grid(2, shape, (4, 3, *kernel))
    options = {"stride": (2, 1, 2), "pad": (1, 0, 1), "dilate": (1, 2, 1)}
    options = {name: value[:dimensions] for name, value in options.items()}
    options |= {"kernel": kernel, "num_filter": 4, "no_bias": True}
    plain = [mx.nd.array(array) for array in (data, weight)]
    for array in plain:
        array.attach_grad()
    with autograd.record():
        expected = mx.nd.Convolution(*plain, **options)
    (head,) = on_grid(3, expected.shape)
    expected.backward(mx.nd.array(head))
    found = run("Convolution", data, weight, head=head, **options)
    for one, other in zip(found, (expected, *(array.grad for array in plain))):
        np.testing.assert_allclose(one, other.asnumpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("flatten", [True, False])
def test_a_dense_layer_and_its_gradients_are_dot_products(flatten):
    data, weight, bias, head = on_grid(4, (3, 2, 20), (70, 40 if flatten else 20), (70,), (6, 70))
    rows = data.reshape(-1, weight.shape[1])
    head = head[: len(rows)].reshape(*((3,) if flatten else (3, 2)), 70)
    found = run("FullyConnected", data, weight, bias, head=head, num_hidden=70, flatten=flatten)
    flat = head.reshape(-1, 70)
    assert_equal_bits(found[0].reshape(-1, 70), dot(rows, weight.T) + bias)
    assert_equal_bits(found[1].reshape(rows.shape), dot(flat, weight))
    assert_equal_bits(found[2], dot(flat.T, rows))
    np.testing.assert_allclose(found[3], flat.sum(0, np.float64), rtol=1e-6)


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_each_matrix_of_batch_dot_and_each_gradient_is_a_dot(transpose_a, transpose_b):
    a, b, head = on_grid(5, (3, 4, 20), (3, 20, 5), (3, 4, 5))
    given = [
        np.ascontiguousarray(array.transpose(0, 2, 1)) if transposed else array
        for array, transposed in ((a, transpose_a), (b, transpose_b))
    ]
    how = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    found = run("batch_dot", *given, head=head, **how)
    for i in range(3):
        alone = run("dot", *(array[i] for array in given), head=head[i], **how)
        of_data = dot(head[i], b[i].T)
        of_other = dot(a[i].T, head[i])
        expected = [dot(a[i], b[i])]
        expected.append(of_data.T if transpose_a else of_data)
        expected.append(of_other.T if transpose_b else of_other)
        for whole, one, sums in zip(found, alone, expected):
            assert_equal_bits(whole[i], np.ascontiguousarray(sums))
            assert_equal_bits(one, np.ascontiguousarray(sums))


def test_dot_contracts_the_last_axis_with_the_first_one():
    a, b = on_grid(6, (2, 3, 8), (8, 4, 5))
    expected = dot(a.reshape(6, 8), b.reshape(8, 20)).reshape(2, 3, 4, 5)
    assert_equal_bits(run("dot", a, b), expected)


def test_gradients_are_added_where_that_is_asked_for():
    data, weight, head = on_grid(7, (2, 3, 5, 5), (4, 3, 3, 3), (2, 4, 3, 3))
    arrays = [mx.nd.array(array) for array in (data, weight)]
    for array in arrays:
        array.attach_grad("add")
    name = kernels.accumulating_operator("on_values_Convolution", FLOAT16, "ampere")
    found = []
    for _ in range(2):
        with autograd.record():
            result = kernels.invoke(name, *arrays, kernel=(3, 3), num_filter=4, no_bias=True)
        result.backward(mx.nd.array(head))
        found.append([array.grad.asnumpy() for array in arrays])
    for once, twice in zip(*found):
        assert_equal_bits(twice, 2 * once)


def test_another_layout_is_refused():
    name = kernels.accumulating_operator("on_values_Convolution", FLOAT16, "hopper")
    data, weight = mx.nd.ones((1, 5, 5, 3)), mx.nd.ones((2, 3, 3, 3))
    options = {"kernel": (3, 3), "num_filter": 2, "no_bias": True, "layout": "NHWC"}
    with pytest.raises(mx.base.MXNetError, match="layouts NCW, NCHW and NCDHW, received NHWC"):
        kernels.invoke(name, data, weight, **options).wait_to_read()
