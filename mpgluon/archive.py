"""Named arrays and a JSON header in one file, which is whole or absent.

The file is a NumPy ``.npz`` archive. Nothing in it is code, and each array carries a checksum.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any, Optional

import numpy as np
import numpy.typing as npt

from mpgluon.errors import CheckpointError
from mpgluon.files import atomic_write

__all__ = ["Arrays", "read_archive", "write_archive"]

_FORMAT = "mpgluon checkpoint"
_VERSION = 2
_npy: Any = np.lib.format  # untyped in NumPy

Arrays = dict[str, npt.NDArray[Any]]


def write_archive(path: Path, header: dict[str, Any], arrays: Arrays) -> None:
    """Write a file that appears under its name only when it is complete on the disk.

    Raises
    ------
    CheckpointError
        If the disk is full or the folder cannot be written; an existing file stays as it was.
    TypeError
        If JSON cannot hold ``header``.
    """
    text = json.dumps({"format": _FORMAT, "version": _VERSION, **header})
    arrays = {**arrays, "header": np.frombuffer(text.encode(), dtype=np.uint8)}
    try:
        # What ``np.savez`` does; that one leaves its archive open when the disk is full.
        with atomic_write(path) as file, zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    _npy.write_array(member, array, allow_pickle=False)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {path} could not be written: {error.strerror}; free space or choose "
            "another folder (an earlier checkpoint is still as it was)"
        ) from error


def read_archive(path: Path, *, only_header: bool = False) -> tuple[dict[str, Any], Arrays]:
    """Return the header and the arrays of a file.

    Raises
    ------
    CheckpointError
        If the file is missing, damaged or of another kind.
    """
    arrays = _read_arrays(path, "header" if only_header else None)
    try:
        header: dict[str, Any] = json.loads(arrays.pop("header").tobytes())
        kind, version = header["format"], header["version"]
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path} is no mpgluon checkpoint: it has no header") from None
    if kind != _FORMAT or version != _VERSION:
        raise CheckpointError(
            f"{path} is a {kind!r} of version {version}; this mpgluon reads version {_VERSION}"
        )
    return header, arrays


def _read_arrays(path: Path, only: Optional[str]) -> Arrays:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist() if only is None else [f"{only}.npy"]
            # Each member as a whole: its checksum is then compared before anything is parsed.
            return {
                name.removesuffix(".npy"): _npy.read_array(
                    io.BytesIO(archive.read(name)), allow_pickle=False
                )
                for name in members
            }
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint {path}") from None
    # RuntimeError: a damaged entry can claim to be encrypted, or of a method unknown to zipfile.
    except (
        *(OSError, ValueError, EOFError, KeyError, RuntimeError),
        *(zipfile.error, zlib.error),
    ) as error:
        raise CheckpointError(
            f"{path} is damaged or no checkpoint ({error}); use an earlier one"
        ) from error
