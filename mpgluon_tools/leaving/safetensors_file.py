"""Files of safetensors, which PyTorch reads, written without the package."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["safetensors"]

_DTYPES = {"float32": "F32", "float64": "F64", "float16": "F16", "int8": "I8", "uint8": "U8",
           "int16": "I16", "int32": "I32", "int64": "I64", "bool": "BOOL"}  # fmt: skip


def safetensors(state: Mapping[str, Any]) -> bytes:
    """Return a file of safetensors with a state dict.

    References
    ----------
    https://github.com/huggingface/safetensors, "Format".
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, place = [], 0
    for name, value in state.items():
        array = np.ascontiguousarray(value).reshape(np.shape(value))
        data = array.astype(array.dtype.newbyteorder("<")).tobytes()
        if array.dtype.name not in _DTYPES:
            raise ValueError(f"{name} has the dtype {array.dtype}, which safetensors lacks here")
        header[name] = {
            "dtype": _DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [place, place + len(data)],
        }
        parts.append(data)
        place += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *parts])
