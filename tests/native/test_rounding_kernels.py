"""float16.h alone, compiled for each kind of processor: every number and every tie, as in NumPy."""

import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mpgluon.native import processor

HEADERS = Path(processor.__file__).parent
OPTIONS = ("-std=c++14", "-O3", "-ffp-contract=off", "-Wall", "-Wextra", f"-I{HEADERS}")
AARCH64_COMPILER, AARCH64_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def here(*names):
    for name in names:
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.fixture(
    scope="module",
    params=[
        *((compiler, level) for compiler in ("g++", "clang++") for level in processor.LEVELS),
        (AARCH64_COMPILER, "armv8-a"),
    ],
    ids="-".join,
)
def convert(request, tmp_path_factory):
    """Return a function that converts an array in one way, by each of the functions for it."""
    compiler, architecture = request.param
    command, static = [], []
    if compiler == AARCH64_COMPILER:
        here(compiler, AARCH64_EMULATOR)
        command, static = [AARCH64_EMULATOR], ["-static"]
    else:
        here(compiler)
        if platform.machine() != "x86_64" or architecture not in processor.levels():
            pytest.skip(f"this processor cannot run {architecture}: it is {processor.level()}")
    program = tmp_path_factory.mktemp("rounding") / "rounding"
    source = Path(__file__).with_name("rounding.cc")
    building = [compiler, f"-march={architecture}", *static, *OPTIONS, source, "-o", program]
    done = subprocess.run(building, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

    def run(way, array, dtype):
        done = subprocess.run(
            [*command, program, way], input=array.tobytes(), capture_output=True, check=True
        )
        return np.frombuffer(done.stdout, dtype).reshape(-1, array.size)

    return run


def singles():
    """Return FP32 bits: every float16 number and tie, FP32 beside the ties, extremes, NaN.

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


def test_every_number_and_tie_is_narrowed_to_the_nearest_even(convert):
    bits = singles()
    for found in convert("narrow", bits, np.uint16):
        np.testing.assert_array_equal(found, narrowed(bits))


def test_every_float16_number_is_widened_exactly(convert):
    bits = np.arange(2**16, dtype=np.uint16)
    for found in convert("widen", bits, np.uint32):
        np.testing.assert_array_equal(found, widened(bits))


def test_rounding_is_narrowing_and_widening(convert):
    bits = singles()
    for found in convert("round", bits, np.uint32):
        np.testing.assert_array_equal(found, widened(narrowed(bits)))
