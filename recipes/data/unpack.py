"""Unpack archives that may be damaged or hostile.

A member of a zip file becomes a file, a folder of a tar.gz a folder. Both are written under a
temporary name beside their target and renamed at the end: a target that exists is complete. Only
plain files and folders are made, without the archive's owners, permissions and times.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Union

from mpgluon.errors import DataError
from mpgluon.files import atomic_write, disk_error, is_file_with, remove_folder, sync_folder

from tqdm import tqdm

_CHUNK_BYTES = 2**18
_MAX_DEPTH = 100  # making and removing folders recurses, and Python stops at about 1,000
_DAMAGED = (zipfile.BadZipFile, tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError)


def unpack_zip_member(
    archive: Union[str, Path], member: str, path: Union[str, Path], *, size: int, sha256: str
) -> Path:
    """Write one member of a zip file to ``path``, unless the right file is there already.

    ``size`` in bytes and ``sha256`` are the expected ones; not one byte more is written. Missing
    folders are made. The other members are not read.

    Raises
    ------
    DataError
        If the archive is damaged or lacks the member, the member is not the expected one, or the
        disk is full. No file is left.
    """
    archive, path = Path(archive), Path(path)
    try:
        if is_file_with(path, size=size, sha256=sha256):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        for part in path.parent.glob(f".{path.name}.*.part"):  # of a call that was killed
            part.unlink()
        with atomic_write(path) as file:
            received = _copy_zip_member(archive, member, file, size)
            if received != sha256.lower():
                raise DataError(
                    f"{member} in {archive} is not the file expected: its sha256 is {received} "
                    f"instead of {sha256}; delete the archive and fetch it again"
                )
    except OSError as error:
        raise disk_error(error, path, "run the same command again") from error
    return path


def _copy_zip_member(archive: Path, member: str, target: BinaryIO, size: int) -> str:
    """Write a member and return its SHA-256."""
    digest = hashlib.sha256()
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
            with zipped.open(member) as source:
                # `zipfile` itself stops a member at its declared size.
                while chunk := source.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    target.write(chunk)
    except (*_DAMAGED, RuntimeError) as error:
        raise DataError(f"{archive} is damaged: {error}; delete it and fetch it again") from error
    return digest.hexdigest()


def unpack_tar_folder(
    archive: Union[str, Path],
    target: Union[str, Path],
    *,
    folder: str,
    max_bytes: int = 2**30,
    max_members: int = 100_000,
    progress: bool = False,
) -> Path:
    """Unpack the top-level folder ``folder`` of a tar.gz to ``target``, and nothing else of it.

    ``target`` must not exist, or be empty. Meanwhile it is called ``.<name>.unpacking``; such a
    folder that a killed run left is removed. ``max_bytes`` limits the decompressed size, headers
    included, and ``max_members`` the number of files and folders.

    Raises
    ------
    DataError
        If the archive is damaged or lacks the folder, a member is a link or a device or its name
        leads out of the archive's folder or through more than 100 folders, a limit is exceeded, or
        the disk is full. Neither
        ``target`` nor the temporary folder is left.
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
            limited: Any = _LimitedReader(stream, max_bytes, archive)  # "r|" only reads
            with tarfile.open(fileobj=limited, mode="r|") as tar:
                for count, member in enumerate(tar, start=1):
                    if count > max_members:
                        raise DataError(
                            f"{archive} holds more than {max_members:,} files and folders: it "
                            "was refused, as the archive expected holds fewer"
                        )
                    _extract_member(tar, member, staging, archive)
                    bar.update()
            # gzip compares lengths and checksums at the end of the stream.
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
    """Return ``name`` as a relative path of few folders and without ``..``, or refuse it."""
    relative = PurePosixPath(name)
    # A backslash or a drive's colon can lead out of the folder on other systems.
    unsafe = relative.is_absolute() or ".." in relative.parts or any(c in name for c in "\\:\0")
    if unsafe or not name:
        raise DataError(
            f"{archive} was refused: its member {name!r} would be written outside the target"
        )
    if len(relative.parts) > _MAX_DEPTH:
        raise DataError(
            f"{archive} was refused: its member {name[:40]!r}… is {len(relative.parts):,} folders "
            f"deep, and the archive expected has at most {_MAX_DEPTH}"
        )
    return relative


class _LimitedReader:
    """A stream that raises DataError after ``limit`` bytes."""

    def __init__(self, stream: gzip.GzipFile, limit: int, archive: Path) -> None:
        self._stream, self._limit, self._archive = stream, limit, archive
        self._left = limit

    def read(self, size: int) -> bytes:
        """Return at most ``size`` bytes, and none at the end."""
        chunk = self._stream.read(min(size, self._left + 1))
        self._left -= len(chunk)
        if self._left < 0:
            raise DataError(
                f"{self._archive} holds more than {self._limit:,} bytes when unpacked: it was "
                "refused, as the archive expected holds fewer"
            )
        return chunk
