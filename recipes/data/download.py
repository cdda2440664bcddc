"""Download one file over HTTP: complete and verified, or absent."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Union

from mpgluon.base.files import disk_error, temporary_folder
from mpgluon.errors import DataError

import pooch
import requests
from tqdm import tqdm

__all__ = ["download"]

pooch.get_logger().setLevel(logging.WARNING)  # else it prints a line for each download


def download(
    url: str,
    path: Union[str, Path],
    *,
    size: int,
    sha256: str,
    progress: bool = False,
    timeout_s: float = 30.0,
) -> Path:
    """Download an HTTP address to ``path``, unless the right file is there, and return ``path``.

    Missing folders are made, and a file with another hash is replaced. The bytes go to the folder
    ``.<name>.download`` until all have come and been verified; a killed run's files there are
    removed.

    Parameters
    ----------
    url : str
        The address.
    path : str or Path
        The file to write.
    size : int
        The number of bytes of the file, for the progress bar.
    sha256 : str
        The SHA-256 of the file, in hexadecimal.
    progress : bool, optional
        Whether to show a progress bar on the standard error stream.
    timeout_s : float, optional
        For how many seconds the server may be silent.

    Raises
    ------
    DataError
        If the server cannot be reached, refuses, breaks off or sends another file, or the disk is
        full or not writable. What has come is not kept.
    """
    path = Path(path)
    try:
        if path.is_file() and pooch.file_hash(path) == sha256.lower():
            return path
        hidden = None if progress else True  # None: unless stderr is a terminal
        bar = tqdm(total=size, desc=path.name, unit="B", unit_scale=True, disable=hidden)
        with bar, temporary_folder(path.with_name(f".{path.name}.download")) as staging:
            fetch = pooch.HTTPDownloader(progressbar=bar, chunk_size=2**16, timeout=timeout_s)
            pooch.retrieve(url, f"sha256:{sha256}", path.name, staging, downloader=fetch)
            os.replace(staging / path.name, path)
    except (requests.RequestException, ValueError) as error:  # ValueError: a wrong hash
        there = ""
        if path.is_file():
            there = f"; the file there has {path.stat().st_size:,} bytes in place of {size:,}"
            there += "" if path.stat().st_size != size else ", and another SHA-256"
        raise DataError(
            f"cannot fetch {url} ({error}): check the network and run the same command again, or "
            f"fetch the file in another way and place it at {path}{there}"
        ) from error
    except OSError as error:
        raise disk_error(error, path, "run the same command again") from error
    return path
