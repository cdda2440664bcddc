"""How a rule of the operator table is computed in each format and on each device.

======== ====== ==========================================================================
format   device arithmetic
======== ====== ==========================================================================
float16  GPU    MXNet's own kernels
any      CPU    emulated: operands widened to FP32, computed, the result rounded once. MXNet's
                CPU has no float16 products, and its other float16 kernels are slower than
                this. A format that MXNet's arrays do not have is held on its grid in FP32
                arrays.
bfloat16 CPU    where oneDNN has bfloat16 products of its own and emulation is not requested:
                convolutions and dense layers by oneDNN in bfloat16, other products emulated
                as above; between them FP32, except that a hybridized graph stays in bfloat16
                from a convolution through BatchNorm, ReLU and sums to the next, and computes
                a convolution of images in FP32 on rounded operands (graph/bfloat16.py)
======== ====== ==========================================================================

A product's arithmetic is: round the operands, multiply and add, round the result. Emulated,
products are exact and sums are FP32's, rounded to nearest. A Tensor Core's products are exact too,
and its result is rounded once, but it adds a few products at a time and cuts off: results in 16
bits differ now and then by the last bit. Under a policy's ``accumulation``, convolutions, dense
layers, ``dot`` and ``batch_dot`` add as the Tensor Cores of one generation of GPUs do
(:mod:`mpgluon.formats.tensor_core`); other products, such as in recurrent layers, add in
FP32 as before.

References
----------
NVIDIA, "Volta Tensor Core GPU Achieves New AI Performance Milestones", for the products of
float16 operands accumulated in FP32; Figueroa, "When is double rounding innocuous?", 1995, for
why one FP32 operation rounded to float16 is the correctly rounded float16 operation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache, partial
from typing import Any

from mpgluon import kernels
from mpgluon.cast.arrays import (
    Convert,
    Format,
    arrays_in,
    cast_here,
    convert_arrays,
    format_of,
    mark,
    onto_grid,
    widen,
)
from mpgluon.cast.calls import AT_WORK, LOOPS, ROUNDING_RULES, OperatorCall, each_output, settled
from mpgluon.errors import PrecisionError
from mpgluon.formats.float_format import FLOAT16, FloatFormat, format_named
from mpgluon.formats.policy import Policy
from mpgluon.formats.scaling import ScaledOperands
from mpgluon.graph.nodes import ACCUMULATION
from mpgluon.graph.operators import Rule
from mpgluon.kernels.dtypes import Array, cast

import mxnet as mx
from mxnet import autograd
from mxnet.symbol import Symbol

__all__ = ["Arithmetic", "arithmetic_of", "emulated", "policy_arithmetic"]


class Arithmetic(ABC):
    """Runs operators by the rules of the table."""

    kind = "native"  # or "emulated": whether the device computes products in the format itself

    def apply(self, rule: Rule, call: OperatorCall) -> Any:
        """Run ``call`` as ``rule`` requires and return its result in the right format."""
        if rule in ROUNDING_RULES and call.formats() <= {"float64"}:  # or of integers
            return settled(call.run())
        if rule is Rule.COMPUTE:
            return self.compute(call)
        if rule is Rule.NORMALIZE:
            return self.normalize(call)
        if rule is Rule.FLOAT32:
            return settled(_run_product(call, widen), "float32")
        if rule is Rule.FOLLOW:
            return self.follow(call)
        if rule is Rule.MOVE:
            return self.move(call)
        if call.name in LOOPS:
            call = call.with_fp32_states()
        elif call.name == "contrib.cond":
            call = call.with_fp32_branches()
        return settled(call.run(), call.requested_format())

    def move(self, call: OperatorCall) -> Any:
        """Run an operator that does no arithmetic, on operands of any format."""
        formats = call.formats()
        # A graph may hold an FP32 symbol of MXNet's own operators on a grid; a later cast says it.
        is_known = len(formats) == 1 and (formats != {"float32"} or call.all_formats_known())
        return settled(call.run(), formats.pop() if is_known else None)

    @abstractmethod
    def compute(self, call: OperatorCall) -> Any:
        """Run a product: operands and result in the compute format, sums in FP32."""

    @abstractmethod
    def normalize(self, call: OperatorCall) -> Any:
        """Run a normalization: in FP32, the result in the compute format."""

    @abstractmethod
    def follow(self, call: OperatorCall) -> Any:
        """Run in the widest format of the operands, and round to it once."""


def _sealed(result: Any) -> Any:
    """Return a rounded result whose gradient is computed, also where it is zero.

    For operators that take zeros as they take any gradient: MXNet would hand zeros on through the
    rounding as zeros of the shape of an array that it has not kept (see `OperatorCall.run`).
    """
    return convert_arrays(result, _seal) if autograd.is_recording() else result


def _seal(array: Array) -> Array:
    if isinstance(array, Symbol) or not array.ndim or not array.size:
        return array
    return mark(mx.nd.add_n(array), format_of(array))  # whose gradient is a copy, at any order


def _run_product(call: OperatorCall, convert: Convert) -> Any:
    """Run an operator on converted operands in FP32, or as MXNet can train it."""
    if call.name == "Deconvolution":
        from mpgluon.cast.deconvolution import deconvolution  # few networks have one

        call = call._replace(function=deconvolution)
    return call.run(convert)


class Emulated(Arithmetic):
    """A format on a CPU: operands widened, computed in FP32, the result rounded once."""

    kind = "emulated"

    # Several operands, no arithmetic, forward or backward: nothing to gain from FP32.
    _EXACT = frozenset({"Concat", "concat", "stack"})
    _LAYERS = frozenset({"Activation", "LeakyReLU", "Pooling", "clip"})
    _ACCUMULATED = frozenset({"Convolution", "FullyConnected", "dot", "batch_dot"})

    def __init__(self, fmt: FloatFormat, accumulation: str = "float32") -> None:
        self.format, self.accumulation = fmt, accumulation
        self._marked: Format = "float16" if fmt == FLOAT16 else fmt

    def apply(self, rule: Rule, call: OperatorCall) -> Any:
        """Run ``call``; an operator that decides its formats itself receives FP32."""
        if rule is Rule.OTHER and self.format in call.formats():  # on a grid; MXNet has float16
            call = call.converted(widen)
        return super().apply(rule, call)

    def narrow(self, array: Array) -> Array:
        """Round to the format, once."""
        if self.format != FLOAT16:
            return onto_grid(array, self.format)
        narrow = cast_here(array, "float16")
        # A symbol of unknown format would get an identity before it is widened again.
        return mark(narrow, "float16") if isinstance(narrow, Symbol) else narrow

    def compute(self, call: OperatorCall) -> Any:
        if self.accumulation != "float32" and call.name in self._ACCUMULATED:
            return _sealed(self._rounded(self._accumulate(call.converted(self._as_operand))))
        return _sealed(self._rounded(_run_product(call, self._as_operand)))

    def _as_operand(self, array: Array) -> Array:
        return widen(self.narrow(array))

    def _accumulate(self, call: OperatorCall) -> Any:
        """Run a product of FP32 values; in a graph, MXNet's, marked for ``hold_on_grid``."""
        operands = arrays_in([*call.args, *call.kwargs.values()])
        if any(isinstance(array, Symbol) for array in operands):
            with mx.AttrScope(**{ACCUMULATION: self.accumulation}):
                return call.run()
        name = f"on_values_{call.name}"
        name = kernels.accumulating_operator(name, self.format, self.accumulation)
        return kernels.invoke_as(name, call.function, call.args, call.kwargs)

    def normalize(self, call: OperatorCall) -> Any:
        return _sealed(self._rounded(call.run(widen)))

    def follow(self, call: OperatorCall) -> Any:
        formats = call.formats()
        if formats == {self._marked}:
            if call.loses_number(self.format):
                return mark(call.run(widen), "float32")
            return self.follow_narrow(call)
        if formats == {None}:
            return settled(call.run())
        # With a known format, a symbol of unknown format is FP32: narrowing marks its result.
        return settled(call.run(widen), "float32" if "float32" in formats else None)

    def follow_narrow(self, call: OperatorCall) -> Any:
        """Run an operator all of whose operands have the format, and round its result once."""
        if call.name in self._EXACT:
            return mark(call.run(), self._marked)
        result = self._rounded(call.run(widen))
        return _sealed(result) if call.name in self._LAYERS else result

    def _rounded(self, result: Any) -> Any:
        """Return an operator's FP32 result, rounded."""
        result = each_output(result)
        if self.format != FLOAT16:  # a cast to float16 needs no known format
            result = mark(result, "float32")
        return mark(convert_arrays(result, self.narrow), self._marked)


class ScaledProducts(Emulated):
    """Emulated, and products with weights round their operands to formats with little range."""

    _SCALED = frozenset({"Convolution", "FullyConnected"})

    def __init__(self, fmt: FloatFormat, scaling: ScaledOperands) -> None:
        super().__init__(fmt)
        self.scaling = scaling

    def compute(self, call: OperatorCall) -> Any:
        if call.name in self._SCALED:
            history = next(AT_WORK.histories) if self.scaling.amax_history else None
            operator = kernels.scaled_operator(call.name, self.format, self.scaling, history)
            in_graph = isinstance(arrays_in([*call.args, *call.kwargs.values()])[0], Symbol)
            call = call._replace(function=kernels.function(operator, of_symbols=in_graph))
        return super().compute(call)


class NativeFloat16(Emulated):
    """float16 on a GPU: MXNet's own kernels where they sum in FP32, emulated elsewhere."""

    kind = "native"

    def __init__(self) -> None:
        super().__init__(FLOAT16)

    def compute(self, call: OperatorCall) -> Any:
        if call.name.startswith("linalg"):  # MXNet has these in FP32 and float64 only
            return super().compute(call)
        return mark(call.run(self.narrow), "float16")

    def normalize(self, call: OperatorCall) -> Any:
        if call.name != "BatchNorm":
            return super().normalize(call)
        # cuDNN's kernel takes float16 data with FP32 parameters and statistics.
        return mark(call.run(self.narrow), "float16")

    def follow_narrow(self, call: OperatorCall) -> Any:
        return mark(call.run(), "float16")


class NativeBfloat16(Arithmetic):
    """bfloat16 on a CPU whose oneDNN has products of its own for it.

    Only symbols of a graph are ever bfloat16, and only from one convolution or dense layer to the
    next, where oneDNN has every operator between. Arrays are always FP32: some of MXNet's
    operators crash the process when they receive a bfloat16 array (``transpose``), and others do
    not have the type (``Dropout``).
    """

    _PRODUCTS = frozenset({"Convolution", "FullyConnected"})

    def apply(self, rule: Rule, call: OperatorCall) -> Any:
        """Run ``call``; an operator that decides its formats itself receives FP32."""
        if rule is Rule.OTHER and "bfloat16" in call.formats():
            call = call.converted(widen)
        return super().apply(rule, call)

    def compute(self, call: OperatorCall) -> Any:
        if call.name in self._PRODUCTS:
            return self._kept_in_graph(call.run(_to_bfloat16))
        # oneDNN casts no array without dimensions or elements, which products of mx.np may have.
        rounded = _round_any if call.name.startswith("_np") else _round_to_bfloat16
        result = each_output(_run_product(call, rounded))
        return mark(_sealed(convert_arrays(result, rounded)), "float32")

    def normalize(self, call: OperatorCall) -> Any:
        if self._stays_bfloat16(call):
            return self._kept_in_graph(call.run())
        return mark(call.run(widen), "float32")

    def follow(self, call: OperatorCall) -> Any:
        if self._stays_bfloat16(call):
            return self._kept_in_graph(call.run())
        formats = call.formats()
        if formats & {"float16", "bfloat16"}:
            return mark(call.run(widen), "float32")
        return settled(call.run(), "float32" if formats == {"float32"} else None)

    def move(self, call: OperatorCall) -> Any:
        return settled(call.run(widen), "float32" if None not in call.formats() else None)

    @staticmethod
    def _stays_bfloat16(call: OperatorCall) -> bool:
        """Whether oneDNN computes a call on bfloat16 symbols, forward and backward."""
        if call.formats() != {"bfloat16"}:
            return False
        if call.name == "BatchNorm":
            return bool(call.kwargs.get("axis", 1) == 1)
        if call.name == "Activation":
            # oneDNN's makes 0 of NaN; without native operators, what keeps NaN is in FP32.
            return call.kwargs.get("act_type") == "relu" and kernels.available()
        return call.name == "elemwise_add"

    @staticmethod
    def _kept_in_graph(result: Any) -> Any:
        if isinstance(result, Symbol):
            return mark(result, "bfloat16")
        return mark(_sealed(convert_arrays(result, widen)), "float32")


_to_bfloat16 = partial(cast, dtype="bfloat16")


def _round_to_bfloat16(array: Array) -> Array:
    return widen(_to_bfloat16(array))


def _round_any(array: Array) -> Array:
    in_graph = isinstance(array, Symbol)
    if not in_graph and not array.size:
        return array
    rounded = _round_to_bfloat16((mx.sym if in_graph else mx.nd).expand_dims(array, axis=0))
    return kernels.function("_np_squeeze", of_symbols=in_graph)(rounded, axis=0)


emulated = cache(Emulated)  # the same object for the same format
_scaled_products = cache(ScaledProducts)


@cache
def arithmetic_of(compute_dtype: str, device_type: str, *, emulate: bool = False) -> Arithmetic:
    """Return the arithmetic of a 16-bit format on a kind of device.

    With ``emulate``, a CPU emulates bfloat16 even where it has products of its own.

    Raises
    ------
    PrecisionError
        For bfloat16 on a GPU, for which MXNet 1.9.1 has no kernels.
    """
    if device_type == "gpu":
        if compute_dtype == "float16":
            return NativeFloat16()
        raise PrecisionError(
            f"MXNet 1.9.1 has no {compute_dtype} kernels for a GPU; use float16 there, or "
            f"{compute_dtype} with mx.cpu()"
        )
    if compute_dtype == "bfloat16" and not emulate:
        from mpgluon.kernels import bfloat16  # which may have to try

        if bfloat16.has_native_bfloat16():
            return NativeBfloat16()
    return emulated(format_named(compute_dtype))


def policy_arithmetic(policy: Policy, device_type: str, *, at_edge: bool = False) -> Arithmetic:
    """Return the arithmetic of a policy's computation on a kind of device.

    ``at_edge`` is for the first and the last product of a network, whose operands are not scaled.

    Raises
    ------
    PrecisionError
        As for :func:`arithmetic_of`. For sums other than FP32's also on a GPU, whose own Tensor
        Cores decide; and for those and formats that MXNet does not have, where there are no native
        operators.
    """
    dtype, adds_otherwise = policy.product_dtype, policy.accumulation != "float32"
    if adds_otherwise and device_type == "gpu":
        raise PrecisionError(
            f"accumulation={policy.accumulation!r} is computed on a CPU only, a GPU adds as its "
            "own Tensor Cores do; use mx.cpu(), or leave accumulation out"
        )
    if not adds_otherwise and (dtype in ("float16", "bfloat16") or device_type == "gpu"):
        return arithmetic_of(dtype, device_type, emulate=policy.emulate)
    if not kernels.load():
        what = f"accumulation={policy.accumulation!r}" if adds_otherwise else dtype
        raise PrecisionError(f"{what} needs the native operators. {kernels.why_not_loaded()}")
    fmt, scaled = format_named(policy.compute_dtype), policy.scaled_operands
    if scaled is None or at_edge:
        return emulated(fmt, policy.accumulation)
    return _scaled_products(fmt, scaled)
