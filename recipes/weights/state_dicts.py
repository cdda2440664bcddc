"""State dicts of PyTorch as NumPy arrays, from .safetensors and from .pth, without PyTorch.

A ``.pth`` file is a pickle, and a pickle can call any function. This reader lets it name an
``OrderedDict``, a tensor and its storage, and refuses everything else. Names of networks are
:mod:`recipes.weights.torchvision_names`' part.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Callable, Union

from mpgluon.errors import CheckpointError

import numpy as np
import numpy.typing as npt

__all__ = ["is_state_dict_file", "read_state_dict"]

StateDict = dict[str, npt.NDArray[Any]]

_PICKLED = (".pth", ".pt", ".bin")

# By safetensors' names: NumPy's type and PyTorch's storage. NumPy has no bfloat16: these values are
# read as integers and widened.
_DTYPES = {
    "F64": ("<f8", "DoubleStorage"),
    "F32": ("<f4", "FloatStorage"),
    "F16": ("<f2", "HalfStorage"),
    "BF16": ("<u2", "BFloat16Storage"),
    "I64": ("<i8", "LongStorage"),
    "I32": ("<i4", "IntStorage"),
    "I16": ("<i2", "ShortStorage"),
    "I8": ("<i1", "CharStorage"),
    "U8": ("<u1", "ByteStorage"),
    "BOOL": ("<u1", "BoolStorage"),
}


# The errors of a damaged or hostile archive or pickle.
_DAMAGE = (
    *(pickle.UnpicklingError, zipfile.BadZipFile, zlib.error, EOFError, AttributeError),
    *(
        LookupError,
        OSError,
        OverflowError,
        RuntimeError,
        TypeError,
        ValueError,
    ),
)


def is_state_dict_file(path: Union[str, Path]) -> bool:
    """Return whether a file's name ends as a state dict's: .safetensors, .pth, .pt or .bin."""
    return Path(path).suffix.lower() in (".safetensors", *_PICKLED)


def read_state_dict(path: Union[str, Path]) -> StateDict:
    """Return the arrays of a state dict by name.

    Parameters
    ----------
    path : str or Path
        ``.safetensors``; or what ``torch.save(net.state_dict(), path)`` writes since PyTorch 1.6.

    Returns
    -------
    dict from name to ndarray
        Floating-point values in float32: 16-bit ones are widened exactly, float64 is rounded.
        Integers keep their type.

    Raises
    ------
    CheckpointError
        If the file is missing, damaged, of another kind, or has content besides named tensors.
    ValueError
        If the file needs the package safetensors, and it is not installed.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}")
    if path.suffix.lower() in _PICKLED:
        return _read_pickled(path)
    return _read_safetensors(path)


def _to_array(data: bytes, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if dtype not in _DTYPES:
        raise ValueError(f"a tensor of type {dtype}")
    values = np.frombuffer(data, _DTYPES[dtype][0]).reshape(shape)
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    if dtype in ("F64", "F16"):
        return values.astype(np.float32)
    return values


def _read_safetensors(path: Path) -> StateDict:
    try:
        import safetensors
    except ImportError as error:
        raise ValueError(
            f"{path} needs the package safetensors ({error}); install it with "
            "'pip install safetensors'"
        ) from error
    try:
        tensors: Any = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
        return {
            name: _to_array(bytes(tensor["data"]), tensor["dtype"], tuple(tensor["shape"]))
            for name, tensor in tensors
        }
    except (safetensors.SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged or not a safetensors file: {error}") from error


def _read_pickled(path: Path) -> StateDict:
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path} is not in PyTorch's zip format: it is damaged, or older than PyTorch 1.6. "
            "Where PyTorch is installed, save it again: torch.save(torch.load(path, "
            "weights_only=True), path)"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            loaded = _Archive(archive).load()
    except _DAMAGE as error:
        raise CheckpointError(
            f"{path} cannot be read as a state dict: {error}. It may contain named tensors only, "
            "as torch.save(net.state_dict(), path) writes them"
        ) from error
    entries = loaded if isinstance(loaded, dict) else {"all of it": loaded}
    others = [
        f"{name!s:.80}"
        for name, tensor in entries.items()
        if not isinstance(name, str) or not isinstance(tensor, _Tensor)
    ]
    if others:
        raise CheckpointError(
            f"{path} has content besides named tensors: {', '.join(others[:5])}. If the state "
            "dict is a part of it, save that part: torch.save(checkpoint['state_dict'], path)"
        )
    return {name: tensor.values for name, tensor in entries.items()}


# These are frozen and have no __dict__: a pickle may try to set attributes of objects it receives.
@dataclass(frozen=True)
class _Storage:
    """The elements of tensors, one after the other."""

    __slots__ = ("values",)
    values: npt.NDArray[Any]


@dataclass(frozen=True)
class _Tensor:
    __slots__ = ("values",)
    values: npt.NDArray[Any]


@dataclass(frozen=True)
class _Function:
    """A function that a pickle may call; a plain one would keep attributes that a pickle sets."""

    __slots__ = ("function",)
    function: Callable[..., _Tensor]

    def __call__(self, *args: Any) -> _Tensor:
        return self.function(*args)


class _Archive(pickle.Unpickler):
    """A state dict in a zip archive: a pickle of names and shapes, and a file for each storage.

    The pickle can call ``OrderedDict`` and two functions that check their arguments, nothing else.

    References
    ----------
    "Restricting Globals" in the documentation of Python's pickle module.
    """

    def __init__(self, archive: zipfile.ZipFile) -> None:
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError("it has no data.pkl")
        self._archive, self._root = archive, pickles[0].removesuffix("data.pkl")
        self._storages: dict[str, _Storage] = {}
        program = self._member("data.pkl")
        _refuse_large_memo(program)
        super().__init__(io.BytesIO(program))
        if (
            f"{self._root}byteorder" in archive.namelist()
            and self._member("byteorder") != b"little"
        ):
            raise ValueError("its numbers are big-endian")

    def find_class(self, module: str, name: str) -> Any:
        """Return an object that a pickle may name; refuse all other names."""
        allowed: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _Function(self._tensor),
            ("torch._utils", "_rebuild_parameter"): _Function(self._parameter),
            **{("torch", storage): dtype for dtype, (_, storage) in _DTYPES.items()},
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not a tensor")
        return allowed[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        """Return a storage: ``("storage", type, file name, device, number of elements)``."""
        kind, dtype, key, _, elements = pid
        if kind != "storage" or dtype not in _DTYPES:
            raise ValueError(f"a storage of unknown kind {pid!r:.80}")
        if key not in self._storages:
            self._storages[key] = _Storage(
                _to_array(self._member(f"data/{key}"), dtype, (elements,))
            )
        return self._storages[key]

    def _member(self, name: str) -> bytes:
        """Return a file of the archive; uncompressed, so no larger than the archive is."""
        info = self._archive.getinfo(self._root + name)
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError("its files are compressed, which PyTorch's are not")
        return self._archive.read(info)

    def _tensor(
        self,
        storage: Any,
        offset: int,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        *_: Any,  # whether it has a gradient, and hooks: a state dict's have none
    ) -> _Tensor:
        if not isinstance(storage, _Storage) or len(size) != len(stride):
            raise ValueError("a tensor without a storage, a size or a stride")
        elements, numbers = len(storage.values), (offset, *size, *stride)
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"a tensor of size {size} with stride {stride} from {offset}")
        wanted = prod(int(length) for length in size)
        last = offset + sum((length - 1) * step for length, step in zip(size, stride))
        # A stride of 0 could make terabytes of one element.
        if wanted > elements or (wanted and last >= elements):
            raise ValueError(f"a tensor of size {size} in a storage of {elements} elements")
        values = storage.values[offset:]
        strides = tuple(step * values.itemsize for step in stride)
        view = np.lib.stride_tricks.as_strided(values, size, strides, writeable=False)
        return _Tensor(np.ascontiguousarray(view).reshape(size))

    def _parameter(self, tensor: Any, *_: Any) -> Any:
        return tensor


def _refuse_large_memo(program: bytes) -> None:
    """Refuse a pickle with object numbers so high that the unpickler's table would fill memory."""
    numbers = [
        int(str(argument))
        for operation, argument, _ in pickletools.genops(program)
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT")
    ]
    if numbers and max(numbers) > len(program):
        raise ValueError("its pickle numbers its objects too high")
