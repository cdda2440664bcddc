"""float16.h alone, compiled for each kind of processor: every number and every tie, as in NumPy."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from native_builds import EACH_KIND_OF_PROCESSOR, program


@pytest.fixture(scope="module", params=EACH_KIND_OF_PROCESSOR, ids="-".join)
def convert(request, tmp_path_factory):
    """Return a function that converts an array in one way, by each of the functions for it."""
    source = Path(__file__).with_name("rounding.cc")
    command = program(source, *request.param, tmp_path_factory.mktemp("rounding"))

    def run(way, array, dtype):
        done = subprocess.run([*command, way], input=bytes(array), capture_output=True, check=True)
        return np.frombuffer(done.stdout, dtype).reshape(-1, array.size)

    return run


def singles():
    """Return FP32 bits: every float16 number and tie, FP32 next to the ties, extremes, NaN.

    As many as a multiple of 16.
    """
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = np.append((halves[1:] + halves[:-1]) / 2, np.float32(65520))
    extremes = np.array([1e-45, 1e-38, 3e-8, 65535, 65536, 1e30, np.inf], np.float32)
    beside = [(ties.view(np.uint32) + step).view(np.float32) for step in (-1, 1)]
    positive = np.concatenate([halves, ties, *beside, extremes]).view(np.uint32)
    payloads = np.arange(1, 0x400, dtype=np.uint32) << 13
    nans = 0x7F800000 | np.concatenate([payloads, payloads | 0x1FFF, [1, 0x1FFF]])
    positive = np.concatenate([positive, nans]).astype(np.uint32)
    bits = np.concatenate([positive, positive | 0x80000000])
    return np.pad(bits, (0, -len(bits) % 16))


def narrowed(bits):
    """Return float16 bits: NumPy's, and for NaN a quiet one with the upper bits of its payload."""
    with np.errstate(over="ignore", invalid="ignore"):
        halves = bits.view(np.float32).astype(np.float16).view(np.uint16)
    quiet = (bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x3FF)
    return np.where(np.isnan(bits.view(np.float32)), quiet, halves).astype(np.uint16)


def widened(bits):
    singles = bits.view(np.float16).astype(np.float32).view(np.uint32)
    sign, payload = np.uint32(bits & 0x8000) << 16, np.uint32(bits & 0x3FF) << 13
    quiet = sign | 0x7FC00000 | payload
    return np.where(np.isnan(bits.view(np.float16)), quiet, singles).astype(np.uint32)


@pytest.mark.parametrize(
    ("way", "bits", "expected"),
    [
        ("narrow", singles(), narrowed),
        ("widen", np.arange(2**16, dtype=np.uint16), widened),
        ("round", singles(), lambda bits: widened(narrowed(bits))),
    ],
    ids=["narrow", "widen", "round"],
)
def test_every_number_and_tie_is_converted_as_in_numpy(convert, way, bits, expected):
    for found in convert(way, bits, expected(bits).dtype):
        np.testing.assert_array_equal(found, expected(bits))
