"""The file of :func:`mpgluon.deployment.record_layers`: the layers in it, and how it is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["KINDS", "RecordedLayers", "known_by"]

KINDS: Mapping[str, str] = {
    "Convolution": "Conv", "Deconvolution": "ConvTranspose", "FullyConnected": "Linear",
    "RNN": "RNNBase", "BatchNorm": "BatchNorm", "LayerNorm": "LayerNorm", "GroupNorm": "GroupNorm",
    "InstanceNorm": "InstanceNorm", "Embedding": "Embedding", "LeakyReLU": "PReLU",
}  # fmt: skip
"""MXNet's operators that are recorded, and PyTorch's classes of such layers."""


@dataclass
class RecordedLayers:
    """The content of a file.

    Attributes
    ----------
    layers : sequence of mapping
        The ``name``, ``operator``, ``options`` and ``parameters`` of each; see `known_by`.
    arrays : mapping of str to ndarray
    """

    layers: Sequence[Mapping[str, Any]]
    arrays: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> RecordedLayers:
        """Read a file.

        Raises
        ------
        ValueError
            If it is not such a file.
        """
        try:
            with np.load(path) as file:
                arrays = {name: file[name] for name in file.files}
            return cls(json.loads(str(arrays.pop("layers"))), arrays)
        except (KeyError, ValueError, OSError) as error:
            raise ValueError(
                f"{path} is not a file of mpgluon.deployment.record_layers ({error})"
            ) from error

    def numbered(self, name: str) -> list[Any]:
        """Return the arrays ``name0``, ``name1`` and so on."""
        return [self.arrays[f"{name}{i}"] for i in range(10**6) if f"{name}{i}" in self.arrays]


def known_by(parameters: Sequence[Any]) -> str:
    """Return a hash of a layer's parameters: of their numbers in FP32, in any order."""
    numbers = [np.zeros(0, np.float32), *(one.ravel() for one in parameters)]
    return hashlib.sha256(np.sort(np.concatenate(numbers).astype(np.float32)).tobytes()).hexdigest()
