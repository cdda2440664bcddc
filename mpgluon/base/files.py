"""Files that are complete or absent: atomic writing, locks, disk errors."""

from __future__ import annotations

import errno
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from mpgluon.errors import DataError

try:
    import fcntl
except ImportError:  # pragma: no cover - not on Unix: nothing to lock with
    fcntl = None  # type: ignore[assignment]

_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def sync(path: Path) -> None:
    """Make a file, or renames in a folder, survive a power cut where the system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_error(error: OSError, path: Path, advice: str) -> DataError:
    """Return the `DataError` for a system error while writing ``path``.

    ``advice`` says what to do after freeing space on a full disk, as the end of a sentence.
    """
    if error.errno in _DISK_FULL:
        return DataError(f"the disk is full while writing {path}: free some space, then {advice}")
    reason = error.strerror or str(error)
    return DataError(f"cannot write {path}: {reason}; choose a folder that can be written")


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Yield the empty folder ``path``, and remove it when the block ends.

    Files of a process that was killed in the block are removed first.
    """
    _remove_folder(path)
    try:
        path.mkdir(parents=True)
        yield path
    finally:
        _remove_folder(path)


def _remove_folder(folder: Path) -> None:
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Yield a binary file that takes the place of ``path`` when the block ends.

    A reader finds the old file or the new one, never a part of it, and after a power cut, too. An
    exception leaves the old one. A process that is killed in the block leaves a file
    ``.<name>.<process>.part``, which the next call for that name removes. Of a symbolic link, the
    target is written. A device or a named pipe is written to, not replaced: root could lose
    ``/dev/null``.

    Raises
    ------
    OSError
        If the folder does not exist or cannot be written.
    """
    path = Path(os.path.realpath(path))
    if path.is_char_device() or path.is_fifo():
        with open(path, "wb") as file:
            yield file
        return
    _remove_abandoned_parts(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            if fcntl is not None:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(file, fcntl.LOCK_EX)  # another machine does not see this process
            yield file
            file.flush()
            os.fsync(file.fileno())
        replace(part, path)
    finally:
        with suppress(OSError):
            part.unlink()


def _remove_abandoned_parts(path: Path) -> None:
    """Remove the files of processes that ended while they wrote ``path``."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        process = part.name.removeprefix(f".{path.name}.").removesuffix(".part")
        if fcntl is not None and process.isdecimal() and not _is_running(int(process)):
            with suppress(OSError), open(part, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def replace(part: Path, path: Path) -> None:
    """Rename a complete file; the new name survives a power cut."""
    os.replace(part, path)
    sync(path.parent)


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file ``path`` during the block; wait while another process holds it.

    The system releases the lock of a process that ends. The empty file stays. Without ``flock``,
    nothing is locked.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
