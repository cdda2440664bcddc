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

__all__ = ["read_state_dict"]

StateDict = dict[str, npt.NDArray[Any]]

_PICKLED = (".pth", ".pt", ".bin")
# With which files of before PyTorch 1.6 begin.
_MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)

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


def read_state_dict(path: Union[str, Path]) -> StateDict:
    """Return the arrays of a state dict by name.

    Parameters
    ----------
    path : str or Path
        ``.safetensors``; or what ``torch.save(net.state_dict(), path)`` writes, also before
        PyTorch 1.6.

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
    try:
        loaded, values = (_load_zip if zipfile.is_zipfile(path) else _load_sequence)(path)
        entries = loaded if isinstance(loaded, dict) else {"all of it": loaded}
        tensors = {name: one for name, one in entries.items() if isinstance(one, _Tensor)}
        arrays = {name: tensor.to_array(values[tensor.storage]) for name, tensor in tensors.items()}
    except EOFError as error:
        raise CheckpointError(
            f"{path} is incomplete, as a download that broke off; fetch it again"
        ) from error
    except _DAMAGE as error:
        raise CheckpointError(
            f"{path} cannot be read as a state dict: {error}. It may contain named tensors only, "
            "as torch.save(net.state_dict(), path) writes them"
        ) from error
    others = [
        f"{name!s:.80}" for name in entries if not isinstance(name, str) or name not in arrays
    ]
    if others:
        raise CheckpointError(
            f"{path} has content besides named tensors: {', '.join(others[:5])}. If the state "
            "dict is a part of it, save that part: torch.save(checkpoint['state_dict'], path)"
        )
    return arrays


# These are frozen and have no __dict__: a pickle may try to set attributes of objects it receives.
@dataclass(frozen=True)
class _Storage:
    """A reference to elements of tensors, which lie elsewhere in the file."""

    __slots__ = ("dtype", "elements", "key")
    key: str
    dtype: str
    elements: int


@dataclass(frozen=True)
class _Tensor:
    """A part of a storage."""

    __slots__ = ("offset", "size", "storage", "stride")
    storage: _Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def to_array(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return it out of the elements of its storage."""
        numbers = (self.offset, *self.size, *self.stride)
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"a tensor of size {self.size} with stride {self.stride}")
        wanted = prod(self.size)
        last = self.offset + sum(
            (length - 1) * step for length, step in zip(self.size, self.stride)
        )
        # A stride of 0 could make terabytes of one element.
        if wanted > len(values) or (wanted and last >= len(values)):
            raise ValueError(f"a tensor of size {self.size} in a storage of {len(values)} elements")
        strides = tuple(step * values.itemsize for step in self.stride)
        part = values[self.offset :]
        view = np.lib.stride_tricks.as_strided(part, self.size, strides, writeable=False)
        return np.ascontiguousarray(view).reshape(self.size)


@dataclass(frozen=True)
class _Function:
    """A function that a pickle may call; a plain one would keep attributes that a pickle sets."""

    __slots__ = ("function",)
    function: Callable[..., _Tensor]

    def __call__(self, *args: Any) -> _Tensor:
        return self.function(*args)


def _tensor(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> _Tensor:
    # The other arguments are whether it has a gradient, and hooks: a state dict's have none.
    if not isinstance(storage, _Storage) or len(size) != len(stride):
        raise ValueError("a tensor without a storage, a size or a stride")
    return _Tensor(storage, offset, tuple(size), tuple(stride))


def _parameter(tensor: Any, *_: Any) -> Any:
    return tensor


class _Unpickler(pickle.Unpickler):
    """A reader of pickles that may call what makes named tensors, and nothing else.

    Attributes
    ----------
    storages : dict from str to _Storage
        Those that the pickle mentioned, by key.

    References
    ----------
    "Restricting Globals" in the documentation of Python's pickle module.
    """

    def __init__(self, program: bytes) -> None:
        super().__init__(io.BytesIO(program))
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return an object that a pickle may name; refuse all other names."""
        allowed: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor"): _Function(_tensor),
            ("torch._utils", "_rebuild_tensor_v2"): _Function(_tensor),
            ("torch._utils", "_rebuild_parameter"): _Function(_parameter),
            **{("torch", storage): dtype for dtype, (_, storage) in _DTYPES.items()},
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not a tensor")
        return allowed[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        """Return a storage: ``("storage", type, key, device, number of elements)``.

        Before PyTorch 1.6 a sixth item says of which storage it is a part, ``None`` if of none.
        """
        kind, dtype, key, _, elements, *part = pid
        if kind != "storage" or dtype not in _DTYPES or part not in ([], [None]):
            raise ValueError(f"a storage of unknown kind {pid!r:.80}")
        storage = _Storage(key, dtype, elements)
        if self.storages.setdefault(key, storage) != storage:
            raise ValueError(f"two storages of one key {key!r:.80}")
        return storage


_Values = dict[_Storage, npt.NDArray[Any]]


def _load_zip(path: Path) -> tuple[Any, _Values]:
    """Read PyTorch's format since 1.6: an archive of a pickle and a file for each storage."""
    with zipfile.ZipFile(path) as archive:
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError("it has no data.pkl")
        root = pickles[0].removesuffix("data.pkl")

        def member(name: str) -> bytes:
            """Return a file of the archive; uncompressed, so no larger than the archive is."""
            info = archive.getinfo(root + name)
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError("its files are compressed, which PyTorch's are not")
            return archive.read(info)

        if f"{root}byteorder" in archive.namelist() and member("byteorder") != b"little":
            raise ValueError("its numbers are big-endian")
        unpickler = _Unpickler(_one_pickle(io.BytesIO(member("data.pkl"))))
        loaded = unpickler.load()
        values = {
            storage: _to_array(member(f"data/{key}"), storage.dtype, (storage.elements,))
            for key, storage in unpickler.storages.items()
        }
    return loaded, values


def _load_sequence(path: Path) -> tuple[Any, _Values]:
    """Read PyTorch's format before 1.6: five pickles, then the length and elements of each storage.

    The pickles are a magic number, the version, sizes of types, the content, and the order of the
    storages by key.
    """
    stream = io.BytesIO(path.read_bytes())
    if stream.getvalue().startswith(b"PK"):
        raise EOFError  # an archive ends with its table of contents
    if stream.read(len(_MAGIC)) != _MAGIC:
        raise ValueError("it does not begin as PyTorch's files do")
    version, system = (_Unpickler(_one_pickle(stream)).load() for _ in range(2))
    if version != 1001 or not system["little_endian"]:
        raise ValueError(f"its version is {version!r:.80}, its machine {system!r:.80}")
    unpickler = _Unpickler(_one_pickle(stream))
    loaded = unpickler.load()
    values: _Values = {}
    for key in _Unpickler(_one_pickle(stream)).load():
        storage = unpickler.storages[key]
        if int.from_bytes(stream.read(8), "little") != storage.elements:
            raise ValueError(
                f"a storage of another length than the {storage.elements} elements told"
            )
        size = storage.elements * np.dtype(_DTYPES[storage.dtype][0]).itemsize
        content = stream.read(size)
        if len(content) < size:
            raise EOFError
        values[storage] = _to_array(content, storage.dtype, (storage.elements,))
    return loaded, values


def _one_pickle(stream: io.BytesIO) -> bytes:
    """Return the bytes of the pickle at which a stream is, and move behind it.

    Raises
    ------
    ValueError
        If its object numbers are so high that the unpickler's table would fill memory.
    """
    start = stream.tell()
    numbers = [
        int(str(argument))
        for operation, argument, _ in pickletools.genops(stream)
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT")
    ]
    program = bytes(stream.getbuffer()[start : stream.tell()])
    if numbers and max(numbers) > len(program):
        raise ValueError("its pickle numbers its objects too high")
    return program
