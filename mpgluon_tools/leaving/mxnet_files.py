"""MXNet's parameters and graphs read with NumPy alone.

:func:`read_params` reads files of ``save_parameters``, ``export``, ``mx.nd.save`` and
``mx.npx.save`` of every version of MXNet; :func:`read_symbol` a ``-symbol.json``. This file needs
neither MXNet nor the rest of this package and may be copied: Python 3.9 or later, NumPy 1.21 to 2.

Every number is as in the file, to the bit. NumPy has no bfloat16: such arrays become float32, which
holds their values exactly.

References
----------
MXNet 1.9.1: src/ndarray/ndarray.cc (NDArray::Save and its older forms).
"""

from __future__ import annotations

import ast
import io
import json
import os
import struct
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Optional, Union

import numpy as np

__all__ = ["FileFormatError", "Graph", "Node", "read_params", "read_symbol"]

Source = Union[str, "os.PathLike[str]", bytes]
"""A path, or the bytes of a file."""

_LIST = 0x112  # the first word of a file of arrays
_V1, _V2, _V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA  # of an array; older ones begin with a shape
_DTYPES = ("float32", "float64", "float16", "uint8", "int32", "int8", "int64", "bool", "int16",
           "uint16", "uint32", "uint64", "bfloat16")  # fmt: skip
_MOST_AXES = 32  # as in NumPy 1


class FileFormatError(ValueError):
    """A file is damaged, or of another kind; the message names the byte."""


class Reader:
    """A file that is read in order, and refuses lengths that it does not have."""

    def __init__(self, source: Source) -> None:
        self.name = "the bytes" if isinstance(source, bytes) else os.fspath(source)
        self.file: BinaryIO
        if isinstance(source, bytes):
            self.file = io.BytesIO(source)
        else:
            self.file = open(source, "rb")  # noqa: SIM115  # __exit__ closes it
        self.size = self.file.seek(0, os.SEEK_END)
        self.file.seek(0)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    @property
    def left(self) -> int:
        """The bytes behind the place where it is read next."""
        return self.size - self.file.tell()

    def error(self, words: str) -> FileFormatError:
        """Return an error that names the file and the place."""
        return FileFormatError(f"{self.name}, byte {self.file.tell()}: {words}")

    def bytes(self, length: int, words: str) -> bytes:
        """Return the next bytes; ``words`` name them in an error."""
        if not 0 <= length <= self.left:
            raise self.error(
                f"{words} would take {length} bytes, and {self.left} are left; the file is cut "
                "off or damaged"
            )
        return self.file.read(length)

    def number(self, form: str, words: str) -> int:
        """Return the next number, of one of the forms of `struct`."""
        (value,) = struct.unpack(f"<{form}", self.bytes(struct.calcsize(f"<{form}"), words))
        return int(value)

    def count(self, words: str, least: int) -> int:
        """Read how many entries follow, of so many bytes each at least."""
        count = self.number("Q", f"the number of {words}")
        if count > self.left // least:
            raise self.error(f"{count} {words} would follow, and {self.left} bytes are left")
        return count

    def array(self, dtype: str, shape: tuple[int, ...], words: str) -> Any:
        """Return the next numbers as an array."""
        stored = np.dtype("uint16" if dtype == "bfloat16" else dtype).newbyteorder("<")
        length = stored.itemsize
        for side in shape:
            length *= side
        data = np.frombuffer(self.bytes(length, words), stored)
        data = data.astype(stored.newbyteorder("="))  # a copy, which may be written to
        if dtype == "bfloat16":
            data = (data.astype(np.uint32) << 16).view(np.float32)
        return data.reshape(shape)


def read_params(source: Source) -> Union[dict[str, Any], list[Any]]:
    """Read a file of arrays, such as ``net.params``.

    Parameters
    ----------
    source : path or bytes

    Returns
    -------
    dict of str to ndarray, or list of ndarray
        By the names in the file (``export`` writes ``arg:`` and ``aux:`` in front of them), or a
        list if it has none. ``None`` stands for an array without a shape.

    Raises
    ------
    FileFormatError
        If the file is damaged, holds sparse arrays, or is not a file of arrays.
    OSError
        If it cannot be read.
    """
    with Reader(source) as file:
        if file.size < 24 or file.number("Q", "the first word") != _LIST:
            raise FileFormatError(
                f"{file.name} is not a file of MXNet's arrays: it does not begin with {_LIST:#x}; "
                "numpy.load reads files of mx.npx.savez and checkpoints of mpgluon"
            )
        file.number("Q", "a reserved word")
        arrays = [_array(file, f"array {number}") for number in range(file.count("arrays", 4))]
        names = [_name(file, f"name {number}") for number in range(file.count("names", 8))]
        if file.left:
            raise file.error(f"{file.left} bytes follow the last name")
    if names and not len(names) == len(arrays) == len(set(names)):
        raise FileFormatError(
            f"{file.name} has {len(arrays)} arrays and {len(set(names))} different names"
        )
    return dict(zip(names, arrays)) if names else arrays


def _name(file: Reader, words: str) -> str:
    data = file.bytes(file.number("Q", f"the length of {words}"), words)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise file.error(f"{words} is not text in UTF-8: {error.reason}") from None


def _array(file: Reader, words: str) -> Optional[Any]:
    magic = file.number("I", f"the version of {words}")
    if magic == _V1:
        shape = _shape(file, file.number("I", f"the axes of {words}"), "q", words)
    elif magic in (_V2, _V3):
        storage = file.number("i", f"the storage of {words}")
        if storage:
            raise file.error(
                f"{words} has the storage {storage}, and 0, dense, is read here; in MXNet, save "
                "array.tostype('default')"
            )
        shape = _shape(file, file.number("i", f"the axes of {words}"), "q", words)
    else:  # the number of axes, before there were versions
        shape = _shape(file, magic, "I", words)
    if shape is None or (not shape and magic != _V3):
        return None
    file.bytes(8, f"the device of {words}")
    number = file.number("i", f"the dtype of {words}")
    if not 0 <= number < len(_DTYPES):
        raise file.error(f"{words} has the dtype {number}, and MXNet 1.9.1 has 0 to 12")
    return file.array(_DTYPES[number], shape, words)


def _shape(file: Reader, axes: int, form: str, words: str) -> Optional[tuple[int, ...]]:
    if axes == -1:
        return None
    if not 0 <= axes <= _MOST_AXES:
        raise file.error(f"{words} has {axes} axes; the file is damaged, or no file of arrays")
    shape = tuple(file.number(form, f"the shape of {words}") for _ in range(axes))
    if any(side < 0 for side in shape):
        raise file.error(f"{words} has the shape {shape}")
    return shape


@dataclass(frozen=True)
class Node:
    """A node of a graph.

    Attributes
    ----------
    op : str
        The operator's name; ``"null"`` is a variable.
    name : str
    attrs : dict of str to str
        As in the file; :meth:`value` parses one.
    inputs : tuple of (int, int)
        Number of a node, and which of its results.
    """

    op: str
    name: str
    attrs: dict[str, str]
    inputs: tuple[tuple[int, int], ...]

    def value(self, name: str, default: Any = None) -> Any:
        """Return an attribute as a Python value: ``"(3, 3)"`` as a tuple, a word as a text.

        ``default`` stands for ``"None"`` too, as in MXNet.
        """
        text = self.attrs.get(name, "None").strip()
        if text == "None":
            return default
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        if text.lower().lstrip("+-") in ("inf", "infinity", "nan"):
            return float(text)
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text


@dataclass(frozen=True)
class Graph:
    """A network's graph: nodes, each after its inputs, and which results are the network's.

    Attributes
    ----------
    nodes : tuple of Node
    heads : tuple of (int, int)
        Number of a node, and which of its results.
    attrs : dict
        Such as ``mxnet_version``.
    """

    nodes: tuple[Node, ...]
    heads: tuple[tuple[int, int], ...]
    attrs: dict[str, Any] = field(default_factory=dict)


def read_symbol(source: Source) -> Graph:
    """Read a ``-symbol.json``.

    Raises
    ------
    FileFormatError
        If it is not a graph, or a node takes one that does not come before it.
    OSError
        If it cannot be read.
    """
    with Reader(source) as file:
        name, data = file.name, file.file.read()
    try:
        content = json.loads(data.decode())
        nodes = tuple(
            Node(str(one["op"]), str(one["name"]), _attrs(one), _entries(one["inputs"]))
            for one in content["nodes"]
        )
        graph = Graph(nodes, _entries(content["heads"]), dict(content.get("attrs", {})))
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        words = f"{type(error).__name__}: {error}"
        raise FileFormatError(f"{name} is not a graph of MXNet ({words})") from None
    for number, node in enumerate([*nodes, Node("result", "", {}, graph.heads)]):
        if not all(0 <= source < number for source, _ in node.inputs):
            raise FileFormatError(f"{name}: {node.op} {node.name!r} takes no node before it")
    return graph


def _attrs(node: Any) -> dict[str, str]:
    """Return a node's attributes, under the names that MXNet 0.8, 1.0 and 1.9 give them."""
    found = [node.get(name) or {} for name in ("param", "attr", "attrs")]
    return {str(name): str(value) for one in found for name, value in one.items()}


def _entries(entries: Any) -> tuple[tuple[int, int], ...]:
    pairs = tuple((entry[0], entry[1]) for entry in entries)
    if not all(type(number) is int for pair in pairs for number in pair):
        raise ValueError("an input is not a pair of numbers")
    return pairs
