"""Unpack a folder of an archive that may be damaged or hostile."""

from __future__ import annotations

import gzip
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Union

from mpgluon.base.files import disk_error, temporary_folder
from mpgluon.errors import DataError

from tqdm import tqdm

__all__ = ["DAMAGED", "unpack_folder"]

_MAX_DEPTH = 100  # making and removing folders recurses, and Python stops at about 1,000
DAMAGED = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    KeyError,  # no such member
    RuntimeError,  # an encrypted member
    ValueError,  # an impossible name
    OverflowError,  # an impossible time
)


def unpack_folder(
    archive: Union[str, Path],
    member: str,
    target: Union[str, Path],
    *,
    folder: str,
    max_bytes: int,
    max_members: int,
    progress: bool = False,
) -> Path:
    """Unpack a folder of a tar.gz that is in a zip file, and return ``target``.

    The folder is called ``.<name>.unpacking`` until it is complete; one that a killed run left is
    removed.

    Parameters
    ----------
    archive : str or Path
        The zip file.
    member : str
        The name of the tar.gz in it.
    target : str or Path
        The folder to make. It must not exist, or be empty.
    folder : str
        The name of the folder at the top of the tar.gz.
    max_bytes, max_members : int
        Limits of the decompressed size, headers included, and of the number of files and folders.
    progress : bool, optional
        Whether to show a progress bar on the standard error stream.

    Raises
    ------
    DataError
        If the archive is damaged or lacks the folder, would write outside of it, holds links or
        devices, is more than 100 folders deep, or exceeds a limit; if the disk is full, or Python's
        `tarfile` has no data filter. Nothing is left then.
    """
    if not hasattr(tarfile, "data_filter"):
        raise DataError(
            "tarfile has no data filter, which makes unpacking safe: use Python 3.9.17, 3.10.12, "
            "3.11.4 or a later version"
        )
    archive, target = Path(archive), Path(target)
    try:
        staging = target.with_name(f".{target.name}.unpacking")
        with zipfile.ZipFile(archive) as zipped, temporary_folder(staging):
            with zipped.open(member) as packed:
                _check_bytes(packed, max_bytes)
            with zipped.open(member) as packed, tarfile.open(None, "r:gz", packed) as tar:
                bar = tqdm(tar, desc=target.name, unit="file", disable=None if progress else True)
                with bar:
                    tar.extractall(staging, _checked(bar, max_members), filter="data")
            if not (staging / folder).is_dir():
                raise tarfile.TarError(f"it has no folder {folder}")
            os.rename(staging / folder, target)
    except DAMAGED as error:
        raise DataError(
            f"{archive} is damaged or not the archive expected: {error}; delete it and fetch it "
            "again"
        ) from error
    except OSError as error:
        raise disk_error(error, target, "run the same command again") from error
    return target


def _check_bytes(packed: IO[bytes], max_bytes: int) -> None:
    """Decompress a whole file, whose checksum is at its end, without writing it."""
    size = 0
    with gzip.open(packed) as stream:
        while chunk := stream.read(2**18):
            size += len(chunk)
            if size > max_bytes:
                raise tarfile.TarError(f"it holds more than {max_bytes:,} bytes when unpacked")


def _checked(members: Iterable[tarfile.TarInfo], max_members: int) -> Iterator[tarfile.TarInfo]:
    """Yield the members that may be unpacked if the data filter agrees, or refuse them."""
    for count, member in enumerate(members, start=1):
        if count > max_members:
            raise tarfile.TarError(f"it holds more than {max_members:,} files and folders")
        if member.name.count("/") >= _MAX_DEPTH:
            raise tarfile.TarError(f"{member.name[:40]!r}… is more than {_MAX_DEPTH} folders deep")
        # A sparse file is larger than its bytes in the archive, and some versions' filter lets
        # links lead outside.
        if member.issparse() or not (member.isreg() or member.isdir()):
            raise tarfile.TarError(f"{member.name!r} is neither a plain file nor a folder")
        yield member
