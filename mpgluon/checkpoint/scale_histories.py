"""The histories of delayed scaling: largest values of earlier steps, kept by the network."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from mpgluon.base.archive import Arrays
from mpgluon.base.blocks import blocks_of, device_ids
from mpgluon.cast.forward import forward_of
from mpgluon.kernels.scale_histories import ScaleHistories, ScaleHistory

import numpy as np
import numpy.typing as npt
from mxnet import gluon

__all__ = ["scale_histories", "set_scale_histories", "validated_scale_histories"]


def scale_histories(net: gluon.Block) -> Arrays:
    """Return the largest values of earlier steps, from which a network's scales follow.

    Waits for the devices if there are any.

    Returns
    -------
    dict from "block/product" to an array of shape (devices, 3, steps)
        The place of the block among the network's, and of the product in its forward pass.
    """
    delayed = _delayed(net)
    devices = device_ids(net) if delayed else []  # a flight recorder asks in each step
    return {
        f"{block}/{product}": np.stack([history.values(device) for device in devices])
        for block, histories in delayed
        for product, history in enumerate(histories)
    }


def set_scale_histories(net: gluon.Block, values: Mapping[str, npt.NDArray[Any]]) -> None:
    """Set values from :func:`scale_histories`, whatever the numbers of devices and steps.

    Products without values know of no earlier steps. A network without such scales stays as it is.
    """
    delayed = _delayed(net)
    devices = device_ids(net) if delayed else []
    for block, histories in delayed:
        content: list[npt.NDArray[Any]] = []
        while (key := f"{block}/{len(content)}") in values:
            content.append(values[key])
        histories += [ScaleHistory(histories.steps) for _ in content[len(histories) :]]
        for history, of_devices in zip_longest(histories, content):
            for place, device in enumerate(devices):
                fitted = np.zeros(history.shape, np.float32)
                if of_devices is not None:
                    latest = of_devices[place % len(of_devices)][:, -histories.steps :]
                    fitted[:, -latest.shape[1] :] = latest
                history.set_values(device, fitted)


def validated_scale_histories(values: Arrays) -> Arrays:
    """Return the values of a file.

    Raises
    ------
    ValueError
        If they are not such values.
    """
    for name, value in values.items():
        usable = value.dtype == np.float32 and value.ndim == 3 and value.shape[1] == 3
        if not usable or not (value.size and (value >= 0).all() and np.isfinite(value).all()):
            raise ValueError(
                f"the largest values of {name} in earlier steps are not FP32 numbers of shape "
                "(devices, 3, steps) from 0 upward"
            )
    return values


def _delayed(net: gluon.Block) -> list[tuple[int, ScaleHistories]]:
    """Return the histories of the blocks that have any, with the places of the blocks."""
    return [
        (number, forward.histories)
        for number, forward in enumerate(map(forward_of, blocks_of(net)))
        if forward is not None and forward.histories is not None
    ]
