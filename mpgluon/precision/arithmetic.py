"""How a rule of the operator table is carried out in each compute format and on each device.

======== ====== ==========================================================================
format   device arithmetic
======== ====== ==========================================================================
float16  GPU    MXNet's own kernels
float16  CPU    operands widened to FP32, computed, the result rounded once: what a Tensor
                Core does, up to the order in which it adds. MXNet's CPU has no float16
                products, and its other float16 kernels are slower than this.
bfloat16 CPU    convolutions and dense layers by oneDNN in bfloat16, other products emulated
                as above; everything between is FP32
======== ====== ==========================================================================

Inside a network, float16 values travel as :class:`Float16Array` and :class:`Float16Symbol`:
plain MXNet objects of another class, so that ``x + y`` and ``x.mean()`` written in a
``hybrid_forward`` obey the same table as ``F.broadcast_add`` and ``F.mean``.

References
----------
NVIDIA, "Volta Tensor Core GPU Achieves New AI Performance Milestones", for the products of
float16 operands accumulated in FP32; Figueroa, "When is double rounding innocuous?", 1995, for
why one FP32 operation rounded to float16 is the correctly rounded float16 operation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache, wraps
from numbers import Number
from typing import Any, Callable, Optional

import mxnet as mx
import numpy as np
from mxnet.symbol import Symbol

from mpgluon.dtypes import Array, cast, dtype_name, is_array
from mpgluon.errors import PrecisionError
from mpgluon.precision.operators import Rule, bystanders_of, rule_of

__all__ = ["Arithmetic", "Call", "arithmetic_of", "arrays_in", "borrow", "mark"]

Convert = Callable[[Array], Array]

_CASTS = frozenset({"Cast", "cast"})
_CREATORS = frozenset({"zeros", "ones", "full"})


def convert_arrays(value: Any, convert: Convert) -> Any:
    """Return ``value`` with every array in it, and in lists and tuples in it, converted."""
    if is_array(value):
        return convert(value)
    if isinstance(value, (list, tuple)):
        return type(value)(convert_arrays(item, convert) for item in value)
    return value


def arrays_in(value: Any) -> list[Array]:
    """Return every array in ``value``, in the order in which they are converted."""
    found: list[Array] = []

    def note(array: Array) -> Array:
        found.append(array)
        return array

    convert_arrays(value, note)
    return found


def mark(result: Any, dtype: Optional[str]) -> Any:
    """Give what an operator has just returned the class of its format.

    Parameters
    ----------
    result : NDArray, Symbol or a list of them
        Fresh from an operator, so nobody else sees its class change.
    dtype : str, optional
        What the caller knows of a symbol's format; arrays are asked themselves.
    """

    def reclass(array: Array) -> Array:
        if type(array) in (Symbol, Float16Symbol, Float32Symbol):
            array.__class__ = _SYMBOL_CLASSES.get(dtype or "", Symbol)
        elif type(array) in (mx.nd.NDArray, Float16Array):  # neither sparse nor a borrowed one
            is_float16 = dtype_name(array) == "float16"
            array.__class__ = Float16Array if is_float16 else mx.nd.NDArray
        return array

    return convert_arrays(result, reclass)


def borrow(array: Array) -> Array:
    """Return a float16 array of the user's as one that follows the operator table.

    It is the same array to MXNet: no copy, and gradients arrive where they did. The user's own
    object keeps its class.
    """
    if type(array) is mx.nd.NDArray and dtype_name(array) == "float16":
        return _BorrowedFloat16Array(array.handle, array.writable, lender=array)
    return array


class Call:
    """One call of an operator: what would be computed, before its formats are decided."""

    def __init__(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.name, self.function, self.args, self.kwargs = name, function, args, kwargs
        self.bystanders = bystanders_of(name, args, kwargs)

    def run(self, convert: Optional[Convert] = None) -> Any:
        """Call the operator, with its operands converted if asked for."""
        if convert is None:
            return self.function(*self.args, **self.kwargs)
        args, kwargs = self._converted(convert)
        return self.function(*args, **kwargs)

    def _converted(self, convert: Convert) -> tuple[list[Any], dict[str, Any]]:
        skip = self.bystanders
        args = [
            arg if i in skip else convert_arrays(arg, convert) for i, arg in enumerate(self.args)
        ]
        kwargs = {
            key: arg if key in skip else convert_arrays(arg, convert)
            for key, arg in self.kwargs.items()
        }
        return args, kwargs

    def operands(self) -> list[Array]:
        """Return the arrays that decide the format, but not those that only stand by."""
        args = [arg for i, arg in enumerate(self.args) if i not in self.bystanders]
        kwargs = [arg for key, arg in self.kwargs.items() if key not in self.bystanders]
        return arrays_in(args + kwargs)

    def formats(self) -> set[Optional[str]]:
        """Return the floating formats of the operands; ``None`` among them is an unknown."""
        names = {dtype_name(array) for array in self.operands()}
        return {name for name in names if name is None or "float" in name}

    def demanded_format(self) -> Optional[str]:
        """Return the format that a cast or a creation names, ``None`` where it names none."""
        dtype = self.kwargs.get("dtype") if self.name in _CASTS | _CREATORS else None
        if self.name in _CASTS and len(self.args) > 1:
            dtype = self.args[1]
        return None if dtype is None else np.dtype(dtype).name


def widen(array: Array) -> Array:
    """Cast 16-bit values to FP32, exactly."""
    return cast(array, "float32")


def to_float16(array: Array) -> Array:
    """Round to float16, once."""
    return cast(array, "float16")


def _each_output(result: Any) -> Any:
    """Return a list for a symbol with several outputs, so that each is cast by itself."""
    return list(result) if isinstance(result, Symbol) and len(result) > 1 else result


class Arithmetic(ABC):
    """Carries out operators under the rules of a table."""

    def apply(self, rule: Rule, call: Call) -> Any:
        """Run ``call`` as ``rule`` demands and return its result in the right format."""
        if rule is Rule.COMPUTE:
            return self.compute(call)
        if rule is Rule.NORMALIZE:
            return self.normalize(call)
        if rule is Rule.FLOAT32:
            return mark(call.run(widen), "float32")
        if rule is Rule.FOLLOW:
            return self.follow(call)
        if rule is Rule.MOVE:
            formats = call.formats()
            return mark(call.run(), formats.pop() if len(formats) == 1 else None)
        dtype = call.demanded_format()
        return call.run() if dtype is None else mark(call.run(), dtype)

    @abstractmethod
    def compute(self, call: Call) -> Any:
        """Run a product: operands and result in the compute format, sums in FP32."""

    @abstractmethod
    def normalize(self, call: Call) -> Any:
        """Run a normalization: in FP32, the result in the compute format."""

    @abstractmethod
    def follow(self, call: Call) -> Any:
        """Run in the widest format of the operands, and round to it once."""


class _Float16(Arithmetic):
    """What float16 on a GPU and on a CPU have in common."""

    def normalize(self, call: Call) -> Any:
        return self._rounded(call.run(widen))

    def follow(self, call: Call) -> Any:
        formats = call.formats()
        if formats == {"float16"}:
            return self.follow_float16(call)
        if formats == {None}:
            return mark(call.run(), None)
        # Beside float16, a symbol of unknown format is FP32: whatever makes float16 says so.
        return mark(call.run(widen), "float32" if "float32" in formats else None)

    @abstractmethod
    def follow_float16(self, call: Call) -> Any:
        """Run an operator all of whose operands are float16, and round its result once."""

    @staticmethod
    def _rounded(result: Any) -> Any:
        return mark(convert_arrays(_each_output(result), to_float16), "float16")


def _run_product(call: Call, convert: Convert) -> Any:
    """Run a product of converted operands in FP32, or in float64 where MXNet leaves no choice."""
    if call.name != "Deconvolution":
        return call.run(convert)
    # The backward pass of oneDNN's deconvolution fails ("could not execute a primitive") when
    # the weight is the result of another operator, such as a cast.
    return call.run(lambda array: convert(array).astype("float64")).astype("float32")


class EmulatedFloat16(_Float16):
    """float16 on a CPU: operands widened, computed in FP32, the result rounded once."""

    # Several operands, no arithmetic, forward or backward: nothing to gain from FP32.
    _EXACT = frozenset({"Concat", "concat", "stack"})

    def compute(self, call: Call) -> Any:
        return self._rounded(_run_product(call, lambda array: widen(to_float16(array))))

    def follow_float16(self, call: Call) -> Any:
        if call.name in self._EXACT:
            return mark(call.run(), "float16")
        return self._rounded(call.run(widen))


class NativeFloat16(_Float16):
    """float16 on a GPU: MXNet's own kernels wherever they sum in FP32."""

    def compute(self, call: Call) -> Any:
        return mark(call.run(to_float16), "float16")

    def normalize(self, call: Call) -> Any:
        if call.name != "BatchNorm":
            return super().normalize(call)
        # cuDNN's kernel takes float16 data with FP32 parameters and statistics.
        return mark(call.run(to_float16), "float16")

    def follow_float16(self, call: Call) -> Any:
        return mark(call.run(), "float16")


class CpuBfloat16(Arithmetic):
    """bfloat16 on a CPU: its values exist inside products only, FP32 between them.

    MXNet's bfloat16 arrays leave that way no trace: some of its operators end the process
    when they meet one (``transpose``), others know no such type (``Dropout``).
    """

    _ONEDNN = frozenset({"Convolution", "FullyConnected"})

    def compute(self, call: Call) -> Any:
        if call.name in self._ONEDNN:
            return mark(convert_arrays(call.run(_to_bfloat16), widen), "float32")
        result = _each_output(_run_product(call, _round_to_bfloat16))
        return mark(convert_arrays(result, _round_to_bfloat16), "float32")

    def normalize(self, call: Call) -> Any:
        return mark(call.run(widen), "float32")

    def follow(self, call: Call) -> Any:
        formats = call.formats()
        if "float16" in formats:
            return mark(call.run(widen), "float32")
        return mark(call.run(), "float32" if formats == {"float32"} else None)


def _to_bfloat16(array: Array) -> Array:
    return cast(widen(array), "bfloat16")


def _round_to_bfloat16(array: Array) -> Array:
    return widen(_to_bfloat16(array))


@cache
def arithmetic_of(compute_dtype: str, device_type: str) -> Arithmetic:
    """Return the arithmetic of a 16-bit format on a kind of device.

    Parameters
    ----------
    compute_dtype : {"float16", "bfloat16"}
    device_type : str
        MXNet's name for it: ``"cpu"``, ``"gpu"`` and so on.

    Raises
    ------
    PrecisionError
        For bfloat16 on a GPU, for which MXNet 1.9.1 has no kernels.
    """
    if compute_dtype == "float16":
        return NativeFloat16() if device_type == "gpu" else EmulatedFloat16()
    if device_type == "gpu":
        raise PrecisionError(
            "MXNet 1.9.1 has no bfloat16 kernels for a GPU; use float16 there, or bfloat16 with "
            "mx.cpu()"
        )
    return CpuBfloat16()


class Float16Array(mx.nd.NDArray):
    """A float16 NDArray inside a network; its Python operators follow the operator table."""

    __slots__ = ()

    def __getitem__(self, key: Any) -> mx.nd.NDArray:
        """Return a part, of the same format."""
        return mark(mx.nd.NDArray.__getitem__(self, key), "float16")


class _BorrowedFloat16Array(Float16Array):
    """Another array's handle under the operator table; freeing it stays the lender's affair."""

    __slots__ = ("lender",)

    # MXNet makes views through this signature; a view has a handle of its own, and no lender.
    def __init__(
        self, handle: Any, writable: bool = True, lender: Optional[mx.nd.NDArray] = None
    ) -> None:
        super().__init__(handle, writable)
        self.lender = lender

    def __del__(self) -> None:
        """Free the handle, unless it is borrowed."""
        if self.lender is None:
            super().__del__()


class Float16Symbol(Symbol):
    """A Symbol that is known to be float16; its Python operators follow the operator table."""

    __slots__ = ()
    dtype_of_values = "float16"

    def __getitem__(self, index: Any) -> Symbol:
        """Return one of several outputs, of the same format."""
        return mark(Symbol.__getitem__(self, index), "float16")


class Float32Symbol(Symbol):
    """A Symbol that is known to be FP32; its Python operators follow the operator table."""

    __slots__ = ()
    dtype_of_values = "float32"

    def __getitem__(self, index: Any) -> Symbol:
        """Return one of several outputs, of the same format."""
        return mark(Symbol.__getitem__(self, index), "float32")


_SYMBOL_CLASSES = {"float16": Float16Symbol, "float32": Float32Symbol}

_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_BINARY = {
    f"__{reflected}{name}__": operator
    for reflected in ("", "r")
    for name, operator in {
        "add": "broadcast_add",
        "sub": "broadcast_sub",
        "mul": "broadcast_mul",
        "truediv": "broadcast_div",
        "mod": "broadcast_mod",
        "pow": "broadcast_power",
    }.items()
}
_UNARY = {"__neg__": "negative", "__abs__": "abs"}
_FLUENT = [name for name in dir(Symbol) if name[0] != "_" and callable(getattr(mx.sym, name, None))]


def _method(base: type, method_name: str, operator: str) -> Callable[..., Any]:
    plain = getattr(base, method_name)

    @wraps(plain)
    def method(self: Array, *args: Any, **kwargs: Any) -> Any:
        rule = rule_of(operator)
        if rule is Rule.FOLLOW and args and isinstance(args[0], Number):
            rule = Rule.MOVE  # a number beside the array is rounded by MXNet's kernel, as on a GPU
        call = Call(operator, plain, (self, *args), kwargs)
        return arithmetic_of("float16", mx.current_context().device_type).apply(rule, call)

    return method


for _class, _base in (
    (Float16Array, mx.nd.NDArray),
    (Float16Symbol, Symbol),
    (Float32Symbol, Symbol),
):
    for _name, _operator in (_BINARY | _UNARY).items():
        if hasattr(_base, _name):
            setattr(_class, _name, _method(_base, _name, _operator))
    for _name in _COMPARISONS:
        setattr(_class, _name, _method(_base, _name, "broadcast_equal"))
    for _name in _FLUENT:
        setattr(_class, _name, _method(_base, _name, _name))
