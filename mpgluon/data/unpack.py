"""Unpack archives that may be damaged or hostile, atomically.

Two functions, one for each layer of a nested data set: one member of a zip file becomes a file,
and one folder of a tar.gz becomes a folder. What is unpacked is written under a temporary name
beside its target and renamed at the end, so a target that exists is complete. Nothing here
keeps owners, permissions or times, and nothing but plain files and folders is ever made.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any, Union

from tqdm import tqdm

from mpgluon.errors import DataError
from mpgluon.files import (
    disk_error,
    file_sha256,
    is_file_with,
    remove_folder,
    sync_folder,
)

_CHUNK_BYTES = 2**18
_DAMAGED = (zipfile.BadZipFile, tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError)


def unpack_zip_member(
    archive: Union[str, Path], member: str, path: Union[str, Path], *, size: int, sha256: str
) -> Path:
    """Write one member of a zip file to ``path``, or verify that it is already there.

    The other members are not touched, whatever their names.

    Parameters
    ----------
    archive : str or Path
        The zip file.
    member : str
        The member's full name inside it.
    path : str or Path
        The file to make.
    size : int
        The length in bytes that the member must have; not one byte more is written.
    sha256 : str
        The SHA-256 that it must have, in hexadecimal.

    Returns
    -------
    Path
        ``path``.

    Raises
    ------
    DataError
        If the archive is damaged, has no such member, or the member is not the one expected; if
        the disk is full. No file is left.
    """
    archive, path = Path(archive), Path(path)
    part = path.with_name(path.name + ".part")
    try:
        if is_file_with(path, size=size, sha256=sha256):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _copy_zip_member(archive, member, part, size)
            received = file_sha256(part)
            if received != sha256.lower():
                raise DataError(
                    f"{member} in {archive} is not the file expected: its sha256 is {received} "
                    f"instead of {sha256}; delete the archive and fetch it again"
                )
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise disk_error(error, path, "run the same command again") from error
    return path


def _copy_zip_member(archive: Path, member: str, part: Path, size: int) -> None:
    try:
        with zipfile.ZipFile(archive) as zipped:
            if member not in zipped.namelist():
                raise DataError(f"{archive} has no member {member}: it is not the archive expected")
            declared = zipped.getinfo(member).file_size
            if declared != size:
                raise DataError(
                    f"{member} in {archive} has {declared:,} bytes instead of {size:,}: it is not "
                    "the archive expected"
                )
            with zipped.open(member) as source, open(part, "wb") as target:
                # `zipfile` itself stops a member at its declared size.
                while chunk := source.read(_CHUNK_BYTES):
                    target.write(chunk)
                target.flush()
                os.fsync(target.fileno())
    except (*_DAMAGED, NotImplementedError, RuntimeError) as error:
        raise DataError(f"{archive} is damaged: {error}; delete it and fetch it again") from error


def unpack_tar_folder(
    archive: Union[str, Path],
    target: Union[str, Path],
    *,
    folder: str,
    max_bytes: int = 2**30,
    max_members: int = 100_000,
    progress: bool = False,
) -> Path:
    """Unpack the top-level folder ``folder`` of a tar.gz to ``target``.

    Parameters
    ----------
    archive : str or Path
        The tar.gz file.
    target : str or Path
        The folder to make; it must not exist, or be empty. A temporary folder
        ``.<name>.unpacking`` beside it is used meanwhile, and one left there by a killed run is
        cleared.
    folder : str
        The name of the folder in the archive that becomes ``target``. What lies beside it in the
        archive is dropped.
    max_bytes : int, optional
        The most bytes that the archive may hold when decompressed, headers included.
    max_members : int, optional
        The most files and folders that it may hold.
    progress : bool, optional
        Whether to show a progress bar on the standard error stream.

    Returns
    -------
    Path
        ``target``.

    Raises
    ------
    DataError
        If the archive is damaged or has no such folder; if any member is a link or a device or
        its name leads out of the archive's folder; if it exceeds a limit; if the disk is full.
        Neither ``target`` nor the temporary folder is left.
    """
    archive, target = Path(archive), Path(target)
    staging = target.with_name(f".{target.name}.unpacking")
    try:
        remove_folder(staging)
        try:
            staging.mkdir(parents=True)
            with tqdm(desc=target.name, unit="file", disable=not progress) as bar:
                _extract(archive, staging, max_bytes, max_members, bar)
            if not (staging / folder).is_dir():
                raise DataError(f"{archive} has no folder {folder}: it is not the archive expected")
            os.rename(staging / folder, target)
        finally:
            remove_folder(staging)
        sync_folder(target.parent)
    except OSError as error:
        raise disk_error(error, target, "run the same command again") from error
    return target


def _extract(
    archive: Path, staging: Path, max_bytes: int, max_members: int, bar: tqdm[Any]
) -> None:
    try:
        with gzip.open(archive) as stream:
            limited = _LimitedReader(stream, max_bytes, archive)
            with tarfile.open(fileobj=limited, mode="r|") as tar:
                for count, member in enumerate(tar, start=1):
                    if count > max_members:
                        raise DataError(
                            f"{archive} holds more than {max_members:,} files and folders: it "
                            "was refused, as the archive expected holds fewer"
                        )
                    _extract_member(tar, member, staging, archive)
                    bar.update()
            # Only at its very end does gzip compare lengths and checksums.
            while limited.read(_CHUNK_BYTES):
                pass
    except (FileExistsError, NotADirectoryError, IsADirectoryError, *_DAMAGED) as error:
        raise DataError(f"{archive} is damaged: {error}; delete it and fetch it again") from error


def _extract_member(
    tar: tarfile.TarFile, member: tarfile.TarInfo, staging: Path, archive: Path
) -> None:
    path = staging / _safe_name(member.name, archive)
    if member.isdir():
        path.mkdir(parents=True, exist_ok=True)
        return
    if not member.isreg():
        kind = "a link" if member.issym() or member.islnk() else "a special file"
        raise DataError(
            f"{archive} was refused: its member {member.name!r} is {kind}, and only plain files "
            "and folders are expected"
        )
    source = tar.extractfile(member)
    assert source is not None, "a regular member has content"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        while chunk := source.read(_CHUNK_BYTES):
            file.write(chunk)


def _safe_name(name: str, archive: Path) -> PurePosixPath:
    """Return ``name`` as a relative path without ``..``, or refuse it."""
    relative = PurePosixPath(name)
    # A backslash or a drive's colon is harmless here and a way out elsewhere: refused everywhere.
    unsafe = relative.is_absolute() or ".." in relative.parts or any(c in name for c in "\\:\0")
    if unsafe or not name:
        raise DataError(
            f"{archive} was refused: its member {name!r} would be written outside the target"
        )
    return relative


class _LimitedReader(io.RawIOBase):
    """A stream that refuses to give more than ``limit`` bytes in all."""

    def __init__(self, stream: gzip.GzipFile, limit: int, archive: Path) -> None:
        self._stream = stream
        self._left = limit
        self._archive = archive
        self._limit = limit

    def readable(self) -> bool:
        """Return True: this stream is read."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill ``buffer`` as far as there is something, and return the count of bytes."""
        chunk = self._stream.read(min(len(buffer), self._left + 1))
        self._left -= len(chunk)
        if self._left < 0:
            raise DataError(
                f"{self._archive} holds more than {self._limit:,} bytes when unpacked: it was "
                "refused, as the archive expected holds fewer"
            )
        buffer[: len(chunk)] = chunk
        return len(chunk)
