"""MXNet's RecordIO files read with NumPy alone: a ``.rec`` with its ``.idx``.

References
----------
dmlc-core's recordio.h; MXNet 1.9.1: python/mxnet/recordio.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Optional

from mpgluon_tools.leaving.mxnet_files import FileFormatError, Reader, Source

__all__ = ["RecordFile", "RecordHeader", "unpack"]

_RECORD = 0xCED7230A
_LENGTH = 2**29 - 1  # the lower bits of a record's second word; the others say which part it is
_WHOLE, _FIRST, _MIDDLE, _LAST = 0, 1, 2, 3


class RecordHeader(NamedTuple):
    """The header of a record of ``mx.recordio.pack``; ``label`` is a float, or float32 of (N,)."""

    label: Any
    id: int
    id2: int


class RecordFile:
    """The records of a ``.rec``, in order, or by the keys of its ``.idx``.

    Parameters
    ----------
    source : path or bytes
    index : path or bytes, optional
        Lines of a key, a tab and a place. Default: the file with the name of ``source`` that ends
        in ``.idx``, if there is one.

    Raises
    ------
    FileFormatError
        If the index is damaged; a damaged record raises it when it is read.
    OSError
        If a file cannot be read.
    """

    def __init__(self, source: Source, index: Optional[Source] = None) -> None:
        if index is None and not isinstance(source, bytes):
            same_name = Path(source).with_suffix(".idx")
            index = same_name if same_name.is_file() else None
        self.places = {} if index is None else _read_index(index)
        self._reader = Reader(source)

    def __enter__(self) -> RecordFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.file.close()

    def __iter__(self) -> Iterator[bytes]:
        place = 0
        while place < self._reader.size:
            record = self._read(place)
            place = self._reader.file.tell()
            yield record

    def __getitem__(self, key: int) -> bytes:
        """Return the record of a key of the index."""
        if key not in self.places:
            raise KeyError(f"the index has {len(self.places)} keys, and none is {key!r}")
        return self._read(self.places[key])

    def _read(self, place: int) -> bytes:
        """Return a record; one that holds the word that begins a record was divided there."""
        self._reader.file.seek(min(place, self._reader.size))
        parts = [self._part((_WHOLE, _FIRST))]
        while parts[-1][0] in (_FIRST, _MIDDLE):
            parts.append(self._part((_MIDDLE, _LAST)))
        return struct.pack("<I", _RECORD).join(data for _, data in parts)

    def _part(self, kinds: tuple[int, ...]) -> tuple[int, bytes]:
        reader = self._reader
        if reader.number("I", "the first word of a record") != _RECORD:
            raise reader.error("no record begins here; the file is damaged, or no RecordIO")
        kind, length = divmod(reader.number("I", "the length of a record"), _LENGTH + 1)
        if kind not in kinds:
            raise reader.error("a part of a record is missing")
        data = reader.bytes(length, "a record")
        reader.bytes(-length % 4, "the padding of a record")
        return kind, data


def _read_index(index: Source) -> dict[int, int]:
    with Reader(index) as file:
        data = file.file.read()
    try:
        lines = [line.split("\t") for line in data.decode().splitlines()]
        return {int(key): abs(int(place)) for key, place in lines}
    except ValueError as error:
        raise FileFormatError(f"{file.name}: lines are a key, a tab and a place: {error}") from None


def unpack(record: bytes) -> tuple[RecordHeader, bytes]:
    """Return the header of a record of ``mx.recordio.pack``, and the data behind it.

    Raises
    ------
    FileFormatError
        If the record is too short.
    """
    with Reader(record) as file:
        count = file.number("I", "the flag of a record")
        label: Any = struct.unpack("<f", file.bytes(4, "the label of a record"))[0]
        numbers = [file.number("Q", "the number of a record") for _ in range(2)]
        if count:
            label = file.array("float32", (count,), "the labels of a record")
        return RecordHeader(label, *numbers), file.file.read()
