"""Helpers for files that must be whole or absent: hashes, locks, disk errors, folders.

It opens no connection and knows no data set and no format.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpgluon.errors import DataError

try:
    import fcntl
except ImportError:  # pragma: no cover - not on Unix: nothing to lock with
    fcntl = None  # type: ignore[assignment]

_CHUNK_BYTES = 2**20
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of the file's content as 64 lower-case hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def is_file_with(path: Path, *, size: int, sha256: str) -> bool:
    """Return whether ``path`` is a file of ``size`` bytes with the hash ``sha256``."""
    return path.is_file() and path.stat().st_size == size and file_sha256(path) == sha256.lower()


def sync_folder(folder: Path) -> None:
    """Make a rename inside ``folder`` survive a power cut, where the system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_error(error: OSError, path: Path, advice: str) -> DataError:
    """Return the `DataError` that says what went wrong while writing ``path``.

    Parameters
    ----------
    error : OSError
        What the system said.
    path : Path
        What was being written.
    advice : str
        What to do about a full disk, as the end of a sentence.
    """
    if error.errno in _DISK_FULL:
        return DataError(f"the disk is full while writing {path}: free some space, then {advice}")
    reason = error.strerror or str(error)
    return DataError(f"cannot write {path}: {reason}; choose a folder that can be written")


def remove_folder(folder: Path) -> None:
    """Remove ``folder`` and all in it; one that does not exist is no error."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)


def atomic_write(path: Path, text: str) -> None:
    """Write a text file so that a reader finds the old one or the new one, never a part.

    Raises
    ------
    OSError
        If the folder, which is made where it is missing, cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file ``path`` during the block; wait while another process holds it.

    The system drops the lock when its holder dies, so a killed process leaves none behind. The
    empty file stays. Where the system has no ``flock`` this does nothing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
