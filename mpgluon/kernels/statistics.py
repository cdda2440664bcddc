"""Statistics of an array for a recorder: a histogram of exponents, sizes, a checksum, some values.

The native operator computes it in one pass; without native operators, NumPy does in many.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mpgluon import kernels
from mpgluon.kernels.dtypes import cast

import mxnet as mx
import numpy as np
import numpy.typing as npt

__all__ = ["LENGTH", "SAMPLES", "Statistics", "probed", "statistics", "statistics_in_numpy"]

SAMPLES = 16
"""The number of values that are kept of an array."""

# As statistics.h has them.
_ZEROS, _LARGEST, _SQUARES, _LOW_BITS, _HIGH_BITS, _SIZE, _SAMPLE = range(256, 263)
LENGTH = _SAMPLE + SAMPLES
"""The number of float64 numbers that the operators write."""

_PART, _LANES = 4096, 16
_FACTOR = np.uint32(0x9E3779B1)


@dataclass(frozen=True)
class Statistics:
    """The statistics of one array.

    Attributes
    ----------
    numbers : array of float64, shape (LENGTH,)
        As the operator writes them.
    """

    numbers: npt.NDArray[np.float64]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Counts of the exponents from -127 to 127, shape (255,).

        The first one is of the subnormal numbers of FP32, without the zeros.
        """
        counts = self.numbers[:255].astype(np.int64)
        counts[0] -= self.zeros
        return counts

    @property
    def zeros(self) -> int:
        """The number of zeros."""
        return int(self.numbers[_ZEROS])

    @property
    def not_finite(self) -> int:
        """The number of infinities and NaN."""
        return int(self.numbers[255])

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(self.numbers[_SIZE])

    @property
    def largest(self) -> float:
        """The largest absolute value of the finite elements."""
        return float(self.numbers[_LARGEST])

    @property
    def norm(self) -> float:
        """The square root of the sum of the squares of the finite elements."""
        return float(np.sqrt(self.numbers[_SQUARES]))

    @cached_property
    def checksum(self) -> int:
        """A number of 64 bits that changes with any bit of the array."""
        return int(self.numbers[_HIGH_BITS]) << 32 | int(self.numbers[_LOW_BITS])

    @property
    def sample(self) -> npt.NDArray[np.float32]:
        """Elements 0, n / 16, 2 n / 16, ... of n, shape (16,)."""
        return self.numbers[_SAMPLE:].astype(np.float32)


def statistics(*arrays: mx.nd.NDArray) -> mx.nd.NDArray:
    """Return the statistics of arrays of any shapes; where there are native operators, no wait.

    Parameters
    ----------
    *arrays : NDArray
        float32, float16 or bfloat16; at least one.

    Returns
    -------
    NDArray of float64, shape (arrays, LENGTH), on the CPU
        Rows for `Statistics`.
    """
    if kernels.available():
        on_cpu = (array.as_in_context(mx.cpu()) for array in arrays)
        return kernels.invoke("_mpgluon_statistics", *on_cpu, num_arrays=len(arrays))
    values = (cast(array, "float32").asnumpy() for array in arrays)
    return mx.nd.array(np.stack(list(map(statistics_in_numpy, values))), dtype="float64")


def probed(array: mx.nd.NDArray, probe: mx.nd.NDArray) -> mx.nd.NDArray:
    """Return an equal array whose gradient's statistics become the gradient of ``probe``.

    Parameters
    ----------
    array : NDArray on a CPU
        float32, float16 or bfloat16. Native operators are needed.
    probe : NDArray of float64, shape (LENGTH,)
        With a gradient.
    """
    return kernels.invoke("_mpgluon_probed", array, probe)


def statistics_in_numpy(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return the native operator's results, with the same bits but for the sum of squares."""
    flat = np.ascontiguousarray(values, dtype=np.float32).ravel()
    finite = np.isfinite(flat)
    numbers = np.zeros(LENGTH)
    exponents = flat.view(np.uint32) >> 23 & 0xFF
    numbers[:256] = np.bincount(exponents.astype(np.int64), minlength=256)
    numbers[_ZEROS] = (flat == 0).sum()
    numbers[_LARGEST] = np.abs(flat[finite]).max(initial=0.0)
    numbers[_SQUARES] = np.square(flat[finite], dtype=np.float64).sum()
    checksum = _checksum(flat)
    numbers[_LOW_BITS], numbers[_HIGH_BITS] = checksum & 0xFFFFFFFF, checksum >> 32
    numbers[_SIZE] = flat.size
    if flat.size:
        numbers[_SAMPLE:] = flat[np.arange(SAMPLES) * flat.size // SAMPLES]
    return numbers


def _checksum(flat: npt.NDArray[np.float32]) -> int:
    """Return the sum of the checksums of parts, which depend on their numbers."""
    total = 0
    for number, start in enumerate(range(0, flat.size, _PART)):
        bits = flat[start : start + _PART].view(np.uint32)
        rows = np.zeros(-(-bits.size // _LANES) * _LANES, np.uint32)
        rows[: bits.size] = bits
        lanes = np.zeros(_LANES, np.uint32)
        for row in rows.reshape(-1, _LANES):
            lanes = (lanes ^ row) * _FACTOR
            lanes ^= lanes >> np.uint32(15)
        part = _mixed(number + 1)
        for lane in lanes.tolist():
            part = _mixed(part ^ lane)
        total += part
    return total & _ALL


_ALL = 0xFFFFFFFFFFFFFFFF


def _mixed(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _ALL
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _ALL
    return x ^ x >> 31
