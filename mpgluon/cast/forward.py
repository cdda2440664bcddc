"""The forward method that a block has while it is cast.

It calls the block's own ``hybrid_forward`` with a stand-in for ``F``, exports the block with its
casts, and explains MXNet's errors about formats.
"""

from __future__ import annotations

import traceback
from functools import cached_property
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, Callable, Optional

from mpgluon import kernels
from mpgluon.base.blocks import device_ids
from mpgluon.cast import fp32
from mpgluon.cast.arithmetic import Arithmetic, Emulated, policy_arithmetic
from mpgluon.cast.arrays import (
    GridArray,
    arrays_in,
    borrow,
    convert_arrays,
    leave,
    mark,
    onto_grid,
    widen,
)
from mpgluon.cast.calls import each_output, is_inside
from mpgluon.cast.copies import make_copyable, make_uncopyable
from mpgluon.cast.dispatch import FP32_OPERATORS, governed
from mpgluon.cast.frozen import attach_gradients
from mpgluon.cast.network_cast import NetworkCast
from mpgluon.cast.numpy_arrays import as_nd, as_np
from mpgluon.cast.plan import BlockPlan
from mpgluon.cast.stand_in import (
    Fp32Namespace,
    NumPyInterfaceError,
    OperatorNamespace,
    namespace_of,
)
from mpgluon.cast.status_flags import at_layer
from mpgluon.cast.traced_graph import TracedGraph
from mpgluon.errors import PrecisionError
from mpgluon.formats.float_format import FLOAT16, FLOAT32
from mpgluon.kernels.dtypes import Array, cast, dtype_name

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.base import MXNetError
from mxnet.symbol import Symbol

if TYPE_CHECKING:
    from mpgluon.kernels.scale_histories import ScaleHistories

__all__ = ["PolicyForward", "forward_of"]


_MXNET = Path(mx.__file__).parent
_MPGLUON = str(Path(__file__).parents[1])  # the folders of the tools begin with it too


class PolicyForward:
    """The replacement of a block's ``hybrid_forward``, or of a plain Block's ``forward``.

    Parameters
    ----------
    plan : BlockPlan
        The method of its block is replaced on the instance at once, until :meth:`detach`.
    network_cast : NetworkCast
        The cast that the block is a part of.

    Attributes
    ----------
    kept : bool
        Whether the block computes in FP32, and only widens its inputs; may be changed.
    """

    def __init__(self, plan: BlockPlan, network_cast: NetworkCast) -> None:
        self.block = block = plan.block
        self.plan, self.network_cast = plan, network_cast
        self.kept = plan.computes_fp32
        self.method = plan.method
        self.replaced = vars(block).get(self.method)  # an imported graph's, as a rule nothing
        setattr(block, self.method, self)
        make_copyable(block)
        scaled = network_cast.policy.scaled_operands
        self.histories: Optional[ScaleHistories] = None
        if scaled is not None and scaled.amax_history:
            from mpgluon.kernels.scale_histories import ScaleHistories  # for delayed scaling

            self.histories = ScaleHistories(scaled.amax_history)
        self.traced = TracedGraph(self)
        if self.method == "hybrid_forward":
            block._call_cached_op = self.traced.run
            block.export = self.export

    def detach(self) -> None:
        """Give the block its own methods back."""
        delattr(self.block, self.method)
        make_uncopyable(self.block)
        if self.method == "hybrid_forward":
            del self.block._call_cached_op, self.block.export
        if self.plan.graph is not None:
            self.plan.graph.detach()

    @cached_property
    def original(self) -> Callable[..., Any]:
        """The block's own method."""
        own = getattr(type(self.block), self.method)
        return self.replaced or _by_name(self.block) or MethodType(own, self.block)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy: the values of histories, not their numbers."""
        state = dict(vars(self))
        if self.histories is not None:
            state["histories"] = self.histories.values(device_ids(self.network_cast.root))
        state.pop("original", None)
        return {**state, "is_native": kernels.available()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy, in another process too."""
        if state.pop("is_native"):
            kernels.load()
        if state["histories"] is not None:
            from mpgluon.kernels.scale_histories import ScaleHistories

            state["histories"] = ScaleHistories.of(*state["histories"])
        vars(self).update(state)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute as the block does, under the policy of the cast."""
        self.network_cast.forward_order.update(dict.fromkeys(self.block._reg_params.values()))
        attach_gradients([self.block])
        with at_layer(self.network_cast.layers.slot_of(self.block)):
            return self._compute(args, kwargs)

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        about: dict[str, Any] = {"is_inside": True}
        is_plain = self.method == "forward"
        imperatively = (is_plain or args[0] is mx.nd) and autograd.is_training()
        in_numpy = self._in_numpy_interface()
        if in_numpy:
            args, kwargs = as_nd(args), {name: as_nd(kwargs[name]) for name in kwargs}
        if self.histories is not None:
            about["histories"] = self.histories.in_turn()
        arithmetic = self._arithmetic_by_name(args, in_numpy=in_numpy)
        if self.kept:
            args = convert_arrays(args, widen)
            kwargs = {n: convert_arrays(self._with_dtype(n, v), widen) for n, v in kwargs.items()}
            if arithmetic is None and args[0] is mx.nd:
                args = (Fp32Namespace(mx.nd), *args[1:])
        elif self.method == "hybrid_forward":
            inputs = args[1:]
            if self.traced.is_traced_now:
                inputs, of_inputs = self.traced.trace_inputs(inputs)
                about |= of_inputs
            assert arithmetic is not None
            namespace = args[0] if in_numpy else _stand_in(args[0], arithmetic)
            args = (namespace, *convert_arrays(inputs, borrow))
            kwargs = {name: self._with_format(name, value) for name, value in kwargs.items()}
        else:
            args = convert_arrays(args, borrow)
        if in_numpy:
            args, kwargs = as_np(args), {name: as_np(kwargs[name]) for name in kwargs}
        try:
            with governed(rules=self.plan.rules, arithmetic=arithmetic, **about):
                result = convert_arrays(as_nd(self.original(*args, **kwargs)), each_output)
        except MXNetError as error:
            self.explain(error, args)
            raise
        except NumPyInterfaceError:
            if not self.network_cast.has_computed:  # plan_of could not find it
                self.network_cast.undo()
            raise
        if self.traced.is_traced_now:  # its results become arrays, which are never bfloat16
            result = convert_arrays(result, _out_of_bfloat16)
        is_root = self.block is self.network_cast.root
        if is_root:
            self.network_cast.has_computed = True
            result = mark(convert_arrays(result, self._as_output), None)
        if self.traced.is_traced_now:
            self.traced.note_outputs(result)
        elif not (is_root or is_inside()):
            result = self.leaving(result)
        self.network_cast.layers.finished(self.block, imperatively=imperatively)
        return as_np(result) if in_numpy else result

    def leaving(self, result: Any) -> Any:
        """Return results of a part of the network to code outside, in the policy's output format.

        Takes arrays of ``mx.nd``.
        """
        if self.network_cast.policy.output_dtype != "float32":
            return result
        return convert_arrays(result, leave)

    def _in_numpy_interface(self) -> bool:
        """Whether this call computes with MXNet's NumPy interface; raise if the cast did not."""
        in_numpy = bool(mx.util.is_np_array())
        if in_numpy != self.network_cast.in_numpy:
            switched, call = ("on", "reset_np") if in_numpy else ("off", "set_np")
            raise NumPyInterfaceError(
                f"MXNet's NumPy interface was switched {switched} since {self.block.name} was "
                f"cast; call mx.npx.{call}() before the network computes, or restore the "
                "network and make a new one"
            )
        return in_numpy

    def _as_output(self, array: Array) -> Array:
        """Return an array that leaves the network in the format that the policy says."""
        output_dtype = self.network_cast.policy.output_dtype
        if output_dtype == "float32" or isinstance(array, GridArray):
            array = mark(widen(array), "float32")  # MXNet has no second cast of a single number
        return cast(array, output_dtype)

    def export(self, path: str, epoch: int = 0, remove_amp_cast: bool = False) -> None:
        """Export as Gluon does, but keep the casts unless told otherwise.

        Without them a graph computes in FP32 and says nothing, or cannot be computed at all.

        Raises
        ------
        PrecisionError
            If the graph has operators that MXNet alone does not have.
        """
        graph = self.block._cached_graph
        if graph and '"op": "_mpgluon_' in graph[1].tojson():
            raise PrecisionError(
                f"the graph of {self.block.name} has operators of mpgluon's, which a program that "
                "loads the exported files with MXNet does not know; write the network in float32, "
                "float16 or bfloat16 with mpgluon.deployment.export_mxnet(net, path, dtype=...)"
            )
        type(self.block).export(self.block, path, epoch, remove_amp_cast)

    def explain(self, error: MXNetError, args: tuple[Any, ...]) -> None:
        """Raise our own error in place of MXNet's if the network received, or mixed, formats."""
        text = str(error)
        if self.block is self.network_cast.root:
            for place, array in enumerate(arrays_in(args)):
                dtype = dtype_name(array)
                if dtype not in (None, "float32", "float16") and dtype in text:
                    raise PrecisionError(
                        f"input {place} of {self.block.name} is {dtype}, and a cast network takes "
                        'FP32 or float16 numbers: pass x.astype("float32"). MXNet says: '
                        f"{text.splitlines()[-1]}"
                    ) from error
        _explain_mixture(error, self.block)

    def _with_format(self, name: str, value: Any) -> Any:
        """Return a parameter's array or symbol as one that knows its format."""
        if name not in self.block._reg_params:
            return convert_arrays(value, borrow)
        value = self._with_dtype(name, value)
        fmt = fp32.format_of(self.block._reg_params[name])
        if fmt not in (FLOAT16, FLOAT32) and isinstance(self.arithmetic_on("cpu"), Emulated):
            return onto_grid(value, fmt)
        return borrow(value)

    def _with_dtype(self, name: str, value: Any) -> Any:
        """Return a parameter's symbol as one that knows its dtype: an FP32 one needs no cast."""
        if name in self.block._reg_params and isinstance(value, Symbol):
            return mark(value[0], dtype_name(self.block._reg_params[name]))  # Gluon keeps value
        return value

    def _arithmetic_by_name(self, args: tuple[Any, ...], *, in_numpy: bool) -> Optional[Arithmetic]:
        """Return the arithmetic of operators called by name, ``None`` for MXNet's own."""
        is_plain = self.method == "forward"
        if self.kept:
            return FP32_OPERATORS if in_numpy or is_plain else None
        context = mx.current_context()  # the input's, which Gluon enters, but not for a plain Block
        if is_plain:
            arrays = (array for array in arrays_in(args) if isinstance(array, mx.nd.NDArray))
            context = next((array.ctx for array in arrays), context)
        return self.arithmetic_on(context.device_type)

    def arithmetic_on(self, device_type: str) -> Arithmetic:
        """Return the arithmetic of the block's operators under the policy, on such devices."""
        return policy_arithmetic(self.network_cast.policy, device_type, at_edge=self.plan.is_edge)


def _stand_in(namespace: Any, arithmetic: Arithmetic) -> OperatorNamespace:
    if isinstance(namespace, OperatorNamespace):  # handed on by another block
        namespace = namespace.module
    return namespace_of(namespace, arithmetic)


def _by_name(block: gluon.Block) -> Optional[Callable[..., Any]]:
    """Return the forward method of a HybridLambda made from an operator's name, else ``None``.

    Gluon looks the operator up in a dictionary with ``F`` as its key, which has no stand-in.
    """
    lambda_layer = gluon.nn.HybridLambda
    if not isinstance(block, lambda_layer) or block._func.__module__ != lambda_layer.__module__:
        return None
    return lambda F, *args: getattr(F, block._func_name)(*args)  # noqa: N803 - Gluon's name


def _out_of_bfloat16(array: Array) -> Array:
    return widen(array) if dtype_name(array) == "bfloat16" else array


def _explain_mixture(error: MXNetError, block: gluon.Block) -> None:
    """Raise our own error in place of MXNet's if two formats met."""
    if "float16" not in str(error) or "float32" not in str(error):
        return
    fmt = "bfloat16" if "bfloat16" in str(error) else "float16"
    raise PrecisionError(
        f"{block.name} ({type(block).__name__}) gave one operator {fmt} and FP32 arrays"
        f"{_place(error)}. Operators that a forward pass calls accept both, as F.…, mx.nd.… or "
        "mx.sym.…; those of a graph that was made before and is called with arrays or symbols do "
        "not. Call the operators one by one, cast an operand with .astype, or keep the block in "
        "FP32 with keep_fp32. "
        f"MXNet says: {str(error).splitlines()[-1]}"
    ) from error


def _place(error: MXNetError) -> str:
    """Return the line of a forward pass that raised an error; "" for an operator of a graph."""
    lines = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_file()  # not what MXNet has generated
        and not Path(frame.filename).is_relative_to(_MXNET)
        and not frame.filename.startswith(_MPGLUON)
    ]
    return f" at {lines[-1].filename}:{lines[-1].lineno}" if lines else ""


def forward_of(block: gluon.Block) -> Optional[PolicyForward]:
    """Return the forward method that a cast has given the block, ``None`` without a cast."""
    methods = (vars(block).get(name) for name in ("hybrid_forward", "forward"))
    return next((method for method in methods if isinstance(method, PolicyForward)), None)
