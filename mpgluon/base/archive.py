"""Named arrays and a JSON header in one file, which is whole or absent.

The file is a NumPy ``.npz`` archive. Nothing in it is code, and each array carries a checksum.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple, Optional

from mpgluon.base.files import atomic_write
from mpgluon.errors import CheckpointError

import numpy as np
import numpy.typing as npt

__all__ = ["CHECKPOINT", "RECORDED_STEP", "Arrays", "Kind", "read_archive", "write_archive"]

_npy: Any = np.lib.format  # untyped in NumPy

Arrays = dict[str, npt.NDArray[Any]]


class Kind(NamedTuple):
    """A kind of file: what messages call it, and the version that is read and written."""

    name: str
    version: int

    @property
    def format(self) -> str:
        """The name of the format in the header."""
        return f"mpgluon {self.name}"


CHECKPOINT = Kind("checkpoint", 2)
RECORDED_STEP = Kind("recorded step", 1)  # read before MXNet is imported, too


def write_archive(
    path: Path, header: dict[str, Any], arrays: Arrays, kind: Kind = CHECKPOINT
) -> None:
    """Write a file that appears under its name only when it is complete on the disk.

    Raises
    ------
    CheckpointError
        If the disk is full or the folder cannot be written; an existing file stays as it was.
    TypeError
        If JSON cannot hold ``header``.
    """
    text = json.dumps({"format": kind.format, "version": kind.version, **header})
    arrays = {**arrays, "header": np.frombuffer(text.encode(), dtype=np.uint8)}
    try:
        # What ``np.savez`` does; that one leaves its archive open when the disk is full.
        with atomic_write(path) as file, zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    _npy.write_array(member, array, allow_pickle=False)
    except OSError as error:
        raise CheckpointError(
            f"the {kind.name} {path} could not be written: {error.strerror}; free space or choose "
            f"another folder (an earlier {kind.name} is still as it was)"
        ) from error


def read_archive(
    path: Path, *, only_header: bool = False, kind: Kind = CHECKPOINT
) -> tuple[dict[str, Any], Arrays]:
    """Return the header and the arrays of a file.

    Raises
    ------
    CheckpointError
        If the file is missing, damaged or of another kind.
    """
    arrays = _read_arrays(path, "header" if only_header else None, kind)
    try:
        header: dict[str, Any] = json.loads(arrays.pop("header").tobytes())
        kind_of_file, version = header["format"], header["version"]
    except (KeyError, TypeError, ValueError, RecursionError):
        raise CheckpointError(f"{path} is not an {kind.format}: it has no header") from None
    if (kind_of_file, version) != (kind.format, kind.version):
        raise CheckpointError(
            f"{path} is a {kind_of_file!r} of version {version}; this mpgluon reads version "
            f"{kind.version} of a {kind.format!r}"
        )
    return header, arrays


def _read_arrays(path: Path, only: Optional[str], kind: Kind) -> Arrays:
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
        raise CheckpointError(f"there is no {kind.name} {path}") from None
    except IsADirectoryError:
        raise CheckpointError(f"{path} is a folder, not a {kind.name}") from None
    # RuntimeError: a damaged entry can claim to be encrypted, or of a method unknown to zipfile.
    except (
        *(OSError, ValueError, EOFError, KeyError, RuntimeError),
        *(zipfile.error, zlib.error),
    ) as error:
        raise CheckpointError(
            f"{path} is damaged or not a {kind.name} ({error}); use an earlier one"
        ) from error
