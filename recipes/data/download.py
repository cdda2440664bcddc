"""Download one file over HTTP: resumable, verified by its hash, atomic.

The bytes go to ``<path>.part``; only a file of the right size and hash is renamed to ``path``.
`pooch` verifies hashes, too, but starts an interrupted download from its first byte.
"""

from __future__ import annotations

import io
import logging
import os
import re
import time
from pathlib import Path
from typing import Any, Union

from mpgluon.errors import DataError
from mpgluon.files import disk_error, file_sha256, is_file_with, replace

import requests
from tqdm import tqdm

from recipes.options import at_least

__all__ = ["download"]

_logger = logging.getLogger(__name__)

_CHUNK_BYTES = 2**16  # a broken connection loses at most one chunk
_BROKEN = (
    requests.ConnectionError,
    requests.Timeout,
    requests.exceptions.ChunkedEncodingError,
)
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


class _TransientError(Exception):
    """A failure after which another attempt may succeed."""


def download(
    url: str,
    path: Union[str, Path],
    *,
    size: int,
    sha256: str,
    progress: bool = False,
    attempts: int = 4,
    backoff_s: float = 1.0,
    timeout_s: float = 30.0,
) -> Path:
    """Download an HTTP address to ``path``, unless the right file is there already.

    An interrupted download continues where it stopped, in this call or in a later one, if the
    server supports ``Range``; otherwise it starts over. Broken connections, time-outs and server
    errors are retried after ``backoff_s`` seconds, doubled for each further one of ``attempts``.
    Missing folders are made; a file with another size or hash is replaced, with a warning.

    Raises
    ------
    DataError
        If the server refuses, keeps failing or sends another file, or the disk is full or not
        writable. After a wrong hash nothing is kept; otherwise the same call continues the part.
    ValueError
        If ``size`` or ``attempts`` is below 1.
    """
    at_least(1, size=size, attempts=attempts)
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        if is_file_with(path, size=size, sha256=sha256):
            return path
        if path.exists():
            _logger.warning("%s is not the file expected there: fetching it again", path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tqdm(
            total=size, desc=path.name, unit="B", unit_scale=True, disable=not progress
        ) as bar:
            _fetch_with_retries(url, part, size, attempts, backoff_s, timeout_s, bar)
        received = file_sha256(part)
        if received != sha256.lower():
            part.unlink()
            raise DataError(
                f"{url} is not the file expected: its sha256 is {received} instead of {sha256}. "
                "Nothing was kept; run the same command again, and if that changes nothing, the "
                "file at that address has changed"
            )
        replace(part, path)
    except OSError as error:
        raise disk_error(
            error, part, "run the same command again: it continues where it stopped"
        ) from error
    return path


def _fetch_with_retries(
    url: str,
    part: Path,
    size: int,
    attempts: int,
    backoff_s: float,
    timeout_s: float,
    bar: tqdm[Any],
) -> None:
    for attempt in range(1, attempts + 1):
        try:
            _fetch(url, part, size, timeout_s, bar)
            return
        except _TransientError as error:
            _logger.info("attempt %d of %d at %s: %s", attempt, attempts, url, error)
            if attempt == attempts:
                kept = part.stat().st_size if part.exists() else 0
                raise DataError(
                    f"could not fetch {url} in {attempts} attempts: {error}. {kept:,} of "
                    f"{size:,} bytes are kept in {part}: check the network and run the same "
                    "command again to continue"
                ) from error
            time.sleep(backoff_s * 2 ** (attempt - 1))


def _fetch(url: str, part: Path, size: int, timeout_s: float, bar: tqdm[Any]) -> None:
    """Request the missing bytes of ``part`` once and append them."""
    have = part.stat().st_size if part.exists() else 0
    if have > size:
        part.unlink()
        have = 0
    if have == size:
        return
    # Ranges and lengths count the bytes of the file only in a body that is not compressed.
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with requests.get(url, headers=headers, stream=True, timeout=timeout_s) as response:
            have = _offset_of_body(response, part, have, size)
            bar.reset(size)
            bar.update(have)
            # Unbuffered: a full disk is reported by the write, not when the file is closed.
            with open(part, "ab" if have else "wb", buffering=0) as file:
                for chunk in response.iter_content(_CHUNK_BYTES):
                    have += len(chunk)
                    if have > size:
                        break
                    _write_all(file, chunk)
                    bar.update(len(chunk))
                os.fsync(file.fileno())
    except _BROKEN as error:
        raise _TransientError(str(error)) from error
    except requests.RequestException as error:
        raise DataError(f"cannot fetch {url}: {error}; check the address") from error
    if have > size:
        part.unlink()
        raise DataError(
            f"{url} is not the file expected: it is longer than {size:,} bytes; the file at that "
            "address has changed"
        )
    if have < size:
        raise _TransientError(f"the server stopped after {have:,} of {size:,} bytes")


def _offset_of_body(response: requests.Response, part: Path, have: int, size: int) -> int:
    """Return the position in the file at which the response's body starts, or refuse it."""
    status = response.status_code
    if status in _TRANSIENT_STATUS:
        raise _TransientError(f"the server answered HTTP {status} {response.reason}")
    if status == 416:
        part.unlink()
        raise _TransientError("the server refused to continue the file; starting over")
    if status == 206:
        span = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
        if span is None or int(span[1]) != have or span[2] not in ("*", str(size)):
            part.unlink(missing_ok=True)
            raise _TransientError("the server continued from another place; starting over")
        return have
    if status != 200:
        raise DataError(
            f"cannot fetch {response.url}: the server answered HTTP {status} {response.reason}; "
            "check the address, or fetch the file in another way"
        )
    length = response.headers.get("Content-Length", "")
    if length.isdigit() and int(length) != size:
        raise DataError(
            f"{response.url} is not the file expected: the server offers {int(length):,} bytes "
            f"instead of {size:,}; the file at that address has changed"
        )
    return 0


def _write_all(file: io.FileIO, chunk: bytes) -> None:
    """Write all of ``chunk``: an unbuffered write may take only a part of it."""
    view = memoryview(chunk)
    while view:
        view = view[file.write(view) :]
