"""Our float16 on a CPU against what Tensor Cores computed.

A recording holds operands and results of one device; ``study/scripts/record_tensor_core_truth.py``
makes it. With FP32 sums the results agree within the effect of the order of sums; the bound is
derived at `bound`, and ``--log-cli-level=INFO`` shows the share of equal bits and the largest
difference of each case. With the sums of its generation they have the GPU's bits.

References
----------
Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, 3.1 and 4.2; Fasi, Higham,
Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021, for what these round and how;
Xie, Wang, Yang, Yang, "MMA-Sim", 2025, for the sums of FP8.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import mpgluon
from mpgluon import kernels
from mpgluon.formats.float_format import FLOAT16, format_named, round_to

import mxnet as mx
import numpy as np
import pytest
from helpers import module_from
from mxnet.gluon import nn

logger = logging.getLogger(__name__)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCRIPT = ROOT / "study" / "scripts" / "record_tensor_core_truth.py"
TORCH = ROOT / ".venv-peers" / "bin" / "python"
RECORDINGS = sorted((HERE / "tensor_core_truth").glob("*.npz"))
H100 = HERE / "tensor_core_truth" / "nvidia_h100_80gb_hbm3.npz"

KINDS = ("dense", "long", "convolution")
CHARACTERS = ("random", "subnormal", "cancellation", "overflow")
CASES = [f"{kind}/{character}" for kind in KINDS for character in CHARACTERS]
EACH_CASE = pytest.mark.parametrize("case", CASES)
BOTH_WAYS = pytest.mark.parametrize("hybridized", [False, True], ids=["imperative", "hybridized"])


def windows_of(kind, data):
    """Return the terms of each sum: (results, terms), with what follows from it by a product."""
    if kind != "convolution":
        return data
    padded = np.pad(data, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    n, channels, rows, columns = windows.shape[:4]
    return windows.transpose(0, 2, 3, 1, 4, 5).reshape(n * rows * columns, channels * 9)


def as_rows(kind, output):
    """Return results in the order of `windows_of`: one row for each place, a column per filter."""
    if kind != "convolution":
        return output
    return output.transpose(0, 2, 3, 1).reshape(-1, output.shape[1])


def half_an_ulp(values):
    """Return how far a number that was rounded to these float16 values may have been from them.

    From 2**15 on float16 numbers are 32 apart, up to the end.
    """
    return np.spacing(np.minimum(abs(values), np.float16(2**15))).astype(np.float64) / 2


def on_the_grid_beyond(values):
    """Return float16 values in float64, with 65536, the next one, for infinity.

    Numbers from 65520 on become infinity: as if they were rounded to 65536, or less than they are.
    """
    return np.clip(values.astype(np.float64), -65536, 65536)


def bound(magnitudes, terms, one, other):
    """Return how far two results of one sum may be apart.

    Products of float16 numbers are exact in FP32. Adding n of them in FP32, in any order, errs by
    at most gamma_n * sum |a||b|, gamma_n = n u / (1 - n u). A CPU rounds to nearest, u = 2**-24;
    Tensor Cores cut off, u = 2**-23. Then both sums are rounded to float16, each by at most half
    the spacing of float16 at the result.
    """
    gammas = sum(terms * u / (1 - terms * u) for u in (2.0**-24, 2.0**-23))
    return gammas * magnitudes + half_an_ulp(one) + half_an_ulp(other)


def ulps_between(one, other):
    """Return how many float16 numbers lie between two, counted over zero, infinity being one."""
    ranks = []
    for values in (one, other):
        bits = np.ascontiguousarray(values).view(np.int16).astype(np.int64)
        ranks.append(np.where(bits < 0, -(bits & 0x7FFF), bits))
    return abs(ranks[0] - ranks[1])


def ours(kind, data, weight, *, hybridized):
    """Return the results of a cast layer, in float16."""
    if kind != "convolution":
        layer = nn.Dense(weight.shape[0], in_units=weight.shape[1], use_bias=False)
    else:
        filters, channels, *size = weight.shape
        layer = nn.Conv2D(filters, size, padding=1, in_channels=channels, use_bias=False)
    layer.initialize()
    layer.weight.set_data(mx.nd.array(weight, dtype="float32"))
    mpgluon.cast_block(layer, "float16")
    if hybridized:
        layer.hybridize(static_alloc=True, static_shape=True)
    result = layer(mx.nd.array(data, dtype="float16")).asnumpy()
    rounded = result.astype(np.float16)
    assert np.array_equal(rounded.astype(np.float32), result)
    return rounded


def beyond_bound(kind, data, weight, one, other):
    """Return how many of two results are further apart than the order of sums allows."""
    terms = windows_of(kind, data.astype(np.float64))
    filters = weight.astype(np.float64).reshape(len(weight), -1)
    magnitudes = abs(terms) @ abs(filters).T
    one, other = as_rows(kind, one), as_rows(kind, other)
    apart = abs(on_the_grid_beyond(one) - on_the_grid_beyond(other))
    # Not `apart > bound`, which is false for NaN.
    return int((~(apart <= bound(magnitudes, filters.shape[1], one, other))).sum())


def assert_alike(recording, case, hybridized):
    kind = case.partition("/")[0]
    data, weight, theirs = (recording[f"{case}/{part}"] for part in ("data", "weight", "output"))
    assert {array.dtype for array in (data, weight, theirs)} == {np.dtype(np.float16)}
    found = ours(kind, data, weight, hybridized=hybridized)
    assert found.shape == theirs.shape
    equal = (found.view(np.int16) == theirs.view(np.int16)).mean()
    logger.info(
        "%s, %s: %.2f %% of %d results have equal bits, the largest difference is %d ulp",
        *(recording["device"], case, 100 * equal, found.size, ulps_between(found, theirs).max()),
    )
    assert beyond_bound(kind, data, weight, found, theirs) == 0


@pytest.fixture(scope="module")
def recording_of_pytorch(tmp_path_factory):
    """Return the script's record of PyTorch on this CPU."""
    if not TORCH.exists():
        pytest.skip("PyTorch has no environment here; make test WITH=peers makes one")
    folder = tmp_path_factory.mktemp("truth")
    command = [str(TORCH), str(SCRIPT), "--device", "cpu", "--output", str(folder)]
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    finished = subprocess.run(
        command, env=own, capture_output=True, text=True, timeout=300, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert "cpu.npz: cpu, " in finished.stdout
    with np.load(folder / "cpu.npz") as recording:
        return dict(recording)


@BOTH_WAYS
@EACH_CASE
@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_tensor_cores_and_we_differ_by_no_more_than_the_order_of_sums(path, case, hybridized):
    with np.load(path) as recording:
        assert str(recording["device"]) != "cpu"
        assert_alike(recording, case, hybridized)


def summed_as_hopper_does(data, weight):
    """Return the FP32 products of two float16 matrices' rows, as one chain each."""
    name = kernels.accumulating_operator("on_values_dot", FLOAT16, "hopper")
    operands = (mx.nd.array(values, dtype="float32") for values in (data, weight.T))
    return kernels.invoke(name, *operands).asnumpy()


@pytest.mark.usefixtures("native_operators")
@pytest.mark.parametrize("character", CHARACTERS)
# cuBLAS took 4,608 terms in three parts of equal length, and added their sums in FP32.
@pytest.mark.parametrize(("kind", "parts"), [("dense", 1), ("long", 3)])
def test_the_sums_of_an_h100_have_our_bits(kind, parts, character):
    with np.load(H100) as recording:
        data, weight, output, sums = (
            recording[f"{kind}/{character}/{part}"] for part in ("data", "weight", "output", "sums")
        )
    pieces = zip(*(np.split(values, parts, axis=1) for values in (data, weight)))
    first, *others = (summed_as_hopper_does(*piece) for piece in pieces)
    for other in others:
        first = first + other
    np.testing.assert_array_equal(first.view(np.int32), sums.view(np.int32))
    with np.errstate(over="ignore"):
        rounded = first.astype(np.float16)
    np.testing.assert_array_equal(rounded.view(np.int16), output.view(np.int16))


def summed_in_eight_bits(data, weight, lowest, in_fp32=10**9):
    """Return the sums of FP8 products as Hopper makes them, 32 products at a time.

    They and the sum so far are shifted to the largest exponent, and cut off after 13 fraction bits;
    the result is cut off to a number with 13 fraction bits too. After so many groups the sum is
    added to one in FP32, and begins again.
    """
    lowest_of_none = -1000
    exponents = [
        np.maximum(np.frexp(values)[1] - 1, least) for values, least in zip((data, weight), lowest)
    ]
    chain, total = np.zeros((len(data), len(weight))), np.zeros((len(data), len(weight)), "float32")
    for group, start in enumerate(range(0, data.shape[1], 32), 1):
        part = slice(start, start + 32)
        products = data[:, None, part] * weight[None, :, part]
        tops = exponents[0][:, None, part] + exponents[1][None, :, part]
        tops = np.where(products == 0, lowest_of_none, tops).max(axis=-1)
        largest = np.maximum(tops, np.where(chain == 0, lowest_of_none, np.frexp(chain)[1] - 1))
        unit = 2.0 ** (np.where(largest == lowest_of_none, 0, largest) - 13)
        chain = (np.trunc(products / unit[..., None]).sum(axis=-1) + np.trunc(chain / unit)) * unit
        mantissa, exponent = np.frexp(chain)
        chain = np.ldexp(np.trunc(np.ldexp(mantissa, 14)), exponent - 14)
        if group % in_fp32 == 0:
            total, chain = total + chain.astype("float32"), np.zeros_like(chain)
    return total + chain.astype("float32")


@pytest.mark.parametrize("character", ["random", "cancellation"])
@pytest.mark.parametrize("terms", [32, 256, 4608])
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_the_fp8_sums_of_an_h100_keep_13_fraction_bits(name, terms, character):
    with np.load(H100) as recording:
        data, weight, fast, precise = (
            recording[f"{name}/{terms}/{character}/{part}"]
            for part in ("data", "weight", "fast", "precise")
        )
    wide = [values.astype(np.float64) for values in (data, weight)]
    formats = (format_named(f"float8_{name}"), format_named("float8_e4m3"))
    for values, fmt in zip(wide, formats):
        np.testing.assert_array_equal(round_to(values, fmt), values)
    lowest = [fmt.min_exponent for fmt in formats]
    np.testing.assert_array_equal(summed_in_eight_bits(*wide, lowest), fast)
    # Where accuracy is asked for, after 128 terms.
    np.testing.assert_array_equal(summed_in_eight_bits(*wide, lowest, in_fp32=4), precise)


@BOTH_WAYS
@EACH_CASE
def test_pytorch_on_a_cpu_and_we_differ_by_no_more_than_the_order_of_sums(
    recording_of_pytorch, case, hybridized
):
    assert_alike(recording_of_pytorch, case, hybridized)


@pytest.fixture(scope="module")
def script():
    return module_from(SCRIPT)


def operands_of(script, case):
    kind, _, character = case.partition("/")
    return kind, *script.operands(*script._SHAPES[kind])[character]


def exact(kind, data, weight):
    """Return the sums in float64, rounded once."""
    rows = windows_of(kind, data.astype(np.float64))
    with np.errstate(over="ignore"):
        sums = (rows @ weight.astype(np.float64).reshape(len(weight), -1).T).astype(np.float16)
    if kind != "convolution":
        return sums
    n, _, height, width = data.shape
    return sums.reshape(n, height, width, -1).transpose(0, 3, 1, 2)


@BOTH_WAYS
@EACH_CASE
def test_we_and_the_exact_sums_differ_by_no_more_than_that_either(script, case, hybridized):
    kind, data, weight = operands_of(script, case)
    found = ours(kind, data, weight, hybridized=hybridized)
    assert beyond_bound(kind, data, weight, found, exact(kind, data, weight)) == 0


# Of 4,608 terms the bound is wider than what most float16 sums err.
@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("long")])
def test_sums_in_float16_would_be_beyond_the_bound(script, case):
    kind, data, weight = operands_of(script, case)
    rows, filters = windows_of(kind, data), weight.reshape(len(weight), -1)
    sums = np.zeros((len(rows), len(filters)), np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        for term in range(rows.shape[1]):
            sums += np.multiply.outer(rows[:, term], filters[:, term])
    truth = as_rows(kind, exact(kind, data, weight))
    assert beyond_bound("dense", rows, filters, sums, truth) > sums.size // 100


def test_the_cases_are_what_their_names_say(script):
    for kind in KINDS:
        for character in CHARACTERS:
            _, data, weight = operands_of(script, f"{kind}/{character}")
            result = abs(exact(kind, data, weight).astype(np.float64))
            magnitudes = abs(windows_of(kind, data.astype(np.float64)))
            magnitudes = magnitudes @ abs(weight.astype(np.float64)).reshape(len(weight), -1).T
            if character == "subnormal":
                assert (abs(data) < 2.0**-14).mean() > 0.99
                assert 0.2 < (result < 2.0**-14).mean() < 0.8
            if character == "cancellation":
                assert np.median(as_rows(kind, result) / magnitudes) < 2.0**-9
            if character == "overflow":
                assert 0.01 < np.isinf(result).mean() < 0.1


def test_without_a_gpu_the_script_says_so(tmp_path):
    if not TORCH.exists():
        pytest.skip("PyTorch has no environment here; make test WITH=peers makes one")
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [str(TORCH), str(SCRIPT), "--output", str(tmp_path)]
    finished = subprocess.run(
        command, env=hidden, capture_output=True, text=True, timeout=300, check=False
    )
    assert finished.returncode == 2
    assert finished.stderr.startswith("error: PyTorch sees no NVIDIA GPU; ")
    assert list(tmp_path.iterdir()) == []


def test_without_pytorch_the_script_says_so(script, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert script.main([]) == 2
    assert "error: this needs PyTorch" in capsys.readouterr().err
