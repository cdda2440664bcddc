"""Histories of delayed scaling, which the native library keeps for each product of a network."""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, ClassVar

from mpgluon import kernels

import mxnet as mx
import numpy as np
import numpy.typing as npt

__all__ = ["ScaleHistories", "ScaleHistory"]


class ScaleHistory:
    """The largest absolute values of one product's operands in earlier steps.

    Its operators note them there and make scales of them. A step ends where a forward pass
    follows a backward pass.

    Parameters
    ----------
    steps : int
        How many are kept.

    Attributes
    ----------
    number : int
        By which the library knows it.
    shape : tuple of int
        (3, steps): of data, weight and gradient, oldest first, 0 where nothing is known.
    """

    _unused: ClassVar[dict[int, list[int]]] = defaultdict(list)  # by steps

    def __init__(self, steps: int) -> None:
        self.shape = (3, steps)
        mx.nd.waitall()
        unused = self._unused[steps]
        with kernels.registering:
            if not unused:
                unused.append(kernels.loaded_library().mpgluon_make_history(steps))
            self.number = unused.pop()
        kernels.loaded_library().mpgluon_clear_history(self.number)
        weakref.finalize(self, unused.append, self.number)

    def values(self, device_id: int) -> npt.NDArray[np.float32]:
        """Return the values of a device; a step without a backward pass has none."""
        values = np.empty(self.shape, np.float32)
        mx.nd.waitall()
        kernels.loaded_library().mpgluon_read_history(
            self.number, device_id, ctypes.c_void_p(values.ctypes.data)
        )
        return values

    def set_values(self, device_id: int, values: npt.NDArray[np.float32]) -> None:
        """Set the values of a device, and discard the values of a step in progress."""
        content = np.array(values, np.float32, order="C").reshape(self.shape)
        mx.nd.waitall()
        address = ctypes.c_void_p(content.ctypes.data)
        kernels.loaded_library().mpgluon_write_history(self.number, device_id, address)


class ScaleHistories(list[ScaleHistory]):
    """The histories of a block's products, in the order of its forward pass."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def values(self, device_ids: Sequence[int]) -> tuple[int, list[dict[int, npt.NDArray[Any]]]]:
        """Return the number of steps, and the values of each history by device."""
        return self.steps, [{one: h.values(one) for one in device_ids} for h in self]

    @classmethod
    def of(cls, steps: int, values: Sequence[Mapping[int, npt.NDArray[Any]]]) -> ScaleHistories:
        """Return histories with values; none without the native operators, which alone use them."""
        histories = cls(steps)
        for of_devices in values if kernels.available() else ():
            histories.append(ScaleHistory(steps))
            for device_id, one in of_devices.items():
                histories[-1].set_values(device_id, one)
        return histories

    def in_turn(self) -> Iterator[int]:
        """Yield their numbers without end, and make missing histories."""
        for product in count():
            if product == len(self):
                self.append(ScaleHistory(self.steps))
            yield self[product].number
