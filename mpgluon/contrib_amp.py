"""The names of ``mxnet.contrib.amp`` that :mod:`mpgluon.amp` does not need itself.

A script for ``mxnet.contrib.amp`` runs with ``from mpgluon import amp``: :func:`init` records its
request for the whole process, and each network is cast when ``amp.init_trainer`` receives its
Trainer. Nothing of MXNet is replaced for good. ``mpgluon.amp`` imports this module when one of its
names is used; this module imports nothing of ``mpgluon.amp``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Optional

from mpgluon.cast.block import autocast, cast_block, restore
from mpgluon.cast.network_cast import cast_of
from mpgluon.cast.numpy_arrays import in_current_interface
from mpgluon.cast.operator_rules import is_operator, name_in_table
from mpgluon.graph.description import symbol_of
from mpgluon.graph.operators import Rule, may_be_16_bit, operators_with, rule_of
from mpgluon.trainer.networks import RequestedCast, request_cast

import mxnet as mx
from mxnet import gluon
from mxnet.ndarray import NDArray
from mxnet.operator import get_all_registered_operators
from mxnet.symbol import Symbol

__all__ = [
    "convert_hybrid_block",
    "convert_model",
    "convert_symbol",
    "init",
    "list_conditional_fp32_ops",
    "list_fp32_ops",
    "list_loss_output_functions",
    "list_lp16_fp32_ops",
    "list_lp16_ops",
    "list_lp16_use_fp32_params",
    "list_widest_type_cast",
]

Names = Optional[Sequence[str]]
Conditions = Optional[Sequence[tuple[str, str, Sequence[str]]]]

# The operators that contrib.amp computes in 16 bits unless its first list is replaced.
_PRODUCTS = ("Convolution", "Deconvolution", "FullyConnected", "RNN")


def _request(dtype: Any, lp16: Names, conditional: Conditions, fp32: Names) -> RequestedCast:
    """Translate the lists of ``contrib.amp``."""
    conditions = [_condition(entry) for entry in conditional or ()]
    lists = {
        "the list of 16-bit operators": _names("the list of 16-bit operators", lp16),
        "fp32_ops": _names("fp32_ops", fp32),
        "conditional_fp32_ops": _names("conditional_fp32_ops", conditions),
    }
    narrow, *wide = lists.values()
    both = set(narrow) & {name for names in wide for name in names}
    if both:
        raise ValueError(f"{', '.join(sorted(both))}: named for 16 bits and for FP32")
    keep = [name for names in wide for name in names if _may_be_kept(name)]
    if lp16 is not None:
        keep += [name for name in _PRODUCTS if name not in narrow]
    return RequestedCast(
        dtype=_dtype(dtype),
        keep_fp32=tuple(dict.fromkeys(keep)),
        compute_16=tuple(name for name in narrow if may_be_16_bit(name)),
    )


def init(
    target_dtype: Any = "float16",
    target_precision_ops: Names = None,
    conditional_fp32_ops: Conditions = None,
    fp32_ops: Names = None,
) -> None:
    """Make ``amp.init_trainer`` cast the network of each Trainer, as ``contrib.amp.init`` would.

    Nothing is cast before. A network without a Trainer is cast by :func:`convert_hybrid_block`,
    ``amp.autocast`` or ``mpgluon.cast_block``, and one that is cast already is left as it is. A
    second call replaces the first one's request.

    Parameters
    ----------
    target_dtype : {"float16", "bfloat16"}, or a NumPy dtype
    target_precision_ops : list of str, optional
        Operators to compute in 16 bits in place of Convolution, Deconvolution, FullyConnected and
        RNN, by their names in ``mx.sym`` (``"_contrib_…"`` too).
    conditional_fp32_ops : list of (str, str, list of str), optional
        Operators, each with an argument and its values for which the operator computes in FP32.
        Here it does so for every value.
    fp32_ops : list of str, optional
        Operators to compute in FP32, in addition to the ones in the table of operators.

    Raises
    ------
    TypeError, ValueError
        If an argument is of another kind, or names something that is not an operator of MXNet, or
        an operator for both formats.
    """
    request_cast(_request(target_dtype, target_precision_ops, conditional_fp32_ops, fp32_ops))


def convert_hybrid_block(
    block: gluon.HybridBlock,
    target_dtype: Any = "float16",
    target_dtype_ops: Names = None,
    fp32_ops: Names = None,
    conditional_fp32_ops: Conditions = None,
    excluded_sym_names: Names = None,
    ctx: Optional[mx.Context] = None,
    cast_optional_params: bool = False,
) -> gluon.HybridBlock:
    """Return a copy of a network that computes in 16 bits; the network itself stays as it is.

    Parameters
    ----------
    block : gluon.HybridBlock
        With values. Its traced graph is discarded. One that is cast already is copied as it is.
    target_dtype, target_dtype_ops, fp32_ops, conditional_fp32_ops
        As for :func:`init`.
    excluded_sym_names : list of str, optional
        Blocks that stay FP32, by their names (``"net_conv0"``) or the names of their nodes in the
        graph (``"net_conv0_fwd"``).
    ctx : Context, optional
        The device of the copy; by default the devices of ``block``.
    cast_optional_params : bool
        Whether parameters become 16-bit too, as by ``mpgluon.cast_block``.

    Raises
    ------
    TypeError, ValueError, PrecisionError
        As for ``amp.autocast``.
    """
    request = _request(target_dtype, target_dtype_ops, conditional_fp32_ops, fp32_ops)
    blocks = [name.removesuffix("_fwd") for name in _list("excluded_sym_names", excluded_sym_names)]
    if any(cast_of(parameter) for parameter in block.collect_params().values()):
        return _copied(block, ctx)
    cast = cast_block if cast_optional_params else autocast
    keep = (*blocks, *request.keep_fp32)
    cast(block, request.dtype, keep_fp32=keep, compute_16=request.compute_16)
    try:
        return _copied(block, ctx)
    finally:
        restore(block)


def _copied(net: gluon.HybridBlock, ctx: Optional[mx.Context]) -> gluon.HybridBlock:
    converted = copy.deepcopy(net)
    if ctx is not None:
        converted.collect_params().reset_ctx(ctx)
    return converted


def convert_symbol(
    sym: Symbol,
    target_dtype: Any = "float16",
    target_dtype_ops: Names = None,
    fp32_ops: Names = None,
    conditional_fp32_ops: Conditions = None,
    excluded_sym_names: Names = None,
    data_names: Names = None,
    cast_optional_params: bool = False,
) -> Symbol:
    """Return a graph that computes in 16 bits, of MXNet's own operators, from one in FP32.

    On a CPU, which has no float16 products, they compute in FP32, with every result rounded.

    Parameters
    ----------
    sym : Symbol
        For inference, in FP32.
    target_dtype, target_dtype_ops, fp32_ops, conditional_fp32_ops
        As for :func:`init`.
    excluded_sym_names : list of str, optional
        Refused unless empty: exclude operators with ``fp32_ops``.
    data_names : list of str, optional
        The inputs that are not parameters; by default those that are not named like one
        (``…_weight``, ``…_bias``, …).
    cast_optional_params : bool
        Refused if true: a graph's parameters stay FP32.

    Raises
    ------
    TypeError, ValueError
        If an argument is of another kind or refused.
    PrecisionError
        If the graph holds control flow, 8-bit integers, or casts of its own.
    """
    request = _request(target_dtype, target_dtype_ops, conditional_fp32_ops, fp32_ops)
    if excluded_sym_names:
        raise ValueError(
            f"excluded_sym_names names nodes of a graph, received {list(excluded_sym_names)}; "
            "exclude operators with fp32_ops, or convert the Gluon network"
        )
    if cast_optional_params:
        raise ValueError(
            "the parameters of a converted symbol stay FP32; for 16-bit parameters use "
            'mpgluon.deployment.export_mxnet(net, path, dtype="float16")'
        )
    if not isinstance(sym, Symbol):
        raise TypeError(f"sym must be a Symbol, received {type(sym).__name__}")
    names = list(data_names) if data_names is not None else _inputs(sym)
    variables = [mx.sym.var(name, dtype="float32") for name in names]
    block = gluon.SymbolBlock(in_current_interface(sym), in_current_interface(variables))
    request.apply(block)
    return symbol_of(block, names)


def convert_model(
    sym: Symbol,
    arg_params: dict[str, NDArray],
    aux_params: dict[str, NDArray],
    target_dtype: Any = "float16",
    target_dtype_ops: Names = None,
    fp32_ops: Names = None,
    conditional_fp32_ops: Conditions = None,
    excluded_sym_names: Names = None,
    cast_optional_params: bool = False,
) -> tuple[Symbol, dict[str, NDArray], dict[str, NDArray]]:
    """Return a graph that computes in 16 bits, with the FP32 parameters that it takes.

    Parameters
    ----------
    sym, target_dtype, target_dtype_ops, fp32_ops, conditional_fp32_ops
        As for :func:`convert_symbol`, and so are the last two.
    arg_params, aux_params : dict from name to NDArray
        Returned as they are.
    """
    parameters = {*arg_params, *aux_params}
    data = [name for name in sym.list_inputs() if name not in parameters]
    converted = convert_symbol(
        sym,
        target_dtype,
        target_dtype_ops,
        fp32_ops,
        conditional_fp32_ops,
        excluded_sym_names,
        data,
        cast_optional_params,
    )
    return converted, arg_params, aux_params


def list_lp16_ops(target_dtype: Any = "float16") -> list[str]:
    """Return the operators that compute in 16 bits, by their names in a graph."""
    return _by_rule(target_dtype, Rule.COMPUTE)


def list_fp32_ops(target_dtype: Any = "float16") -> list[str]:
    """Return the operators that compute in FP32 and return FP32."""
    return _by_rule(target_dtype, Rule.FLOAT32)


def list_lp16_fp32_ops(target_dtype: Any = "float16") -> list[str]:
    """Return the operators that take either format: normalization, and what moves values."""
    return _by_rule(target_dtype, Rule.NORMALIZE, Rule.MOVE, Rule.OTHER)


def list_conditional_fp32_ops(target_dtype: Any = "float16") -> list[tuple[str, str, list[str]]]:
    """Return an empty list: no operator's format depends on its arguments."""
    _dtype(target_dtype)
    return []


def list_widest_type_cast(target_dtype: Any = "float16") -> list[str]:
    """Return all other operators, which compute in the widest format of their operands."""
    return _by_rule(target_dtype, Rule.FOLLOW)


def list_loss_output_functions(target_dtype: Any = "float16") -> list[str]:
    """Return the operators whose gradient does not depend on the loss that they return."""
    _dtype(target_dtype)
    return sorted(operators_with("own_gradient"))


def list_lp16_use_fp32_params(target_dtype: Any = "float16") -> dict[str, list[str]]:
    """Return the operands that stay FP32 in operators that compute in 16 bits."""
    _dtype(target_dtype)
    operands = operators_with("not_cast")
    return {name: sorted(o for o in operands[name] if isinstance(o, str)) for name in operands}


def _by_rule(target_dtype: Any, *rules: Rule) -> list[str]:
    """Return MXNet's operators with one of some rules."""
    _dtype(target_dtype)
    names = (n for n in get_all_registered_operators() if is_operator(_in_calls(n)))
    return sorted(name for name in names if rule_of(name_in_table(_in_calls(name))) in rules)


def _in_calls(name: str) -> str:
    """Return the name in ``F`` of an operator of a graph."""
    _, namespace, *last = name.split("_", 2) if name.startswith("_") else ("", "", name)
    possible = (name, f"{namespace}.{''.join(last)}", f"_internal.{name}")
    return next(filter(is_operator, possible), name)


def _may_be_kept(name: str) -> bool:
    """Whether an operator's format can be chosen, and is not FP32 in any case."""
    return rule_of(name_in_table(name)) not in (Rule.MOVE, Rule.OTHER, Rule.FLOAT32)


def _condition(entry: Any) -> str:
    if not isinstance(entry, (list, tuple)) or len(entry) != 3 or not isinstance(entry[0], str):
        raise TypeError(
            "conditional_fp32_ops holds (name of the operator, name of the argument, list of "
            f"values), received {entry!r}"
        )
    return entry[0]


def _list(argument: str, names: Names) -> Sequence[str]:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names or ()):
        raise TypeError(f"{argument} must be a list of str, received {names!r}")
    return names or ()


def _names(argument: str, names: Names) -> list[str]:
    """Return operators by their names in ``F``."""
    named = [_in_calls(name) for name in _list(argument, names)]
    for name in named:
        if not is_operator(name):
            raise ValueError(f"{argument} names {name!r}, which is not an operator of MXNet")
    return named


def _dtype(target_dtype: Any) -> str:
    text = getattr(target_dtype, "__name__", None) or str(target_dtype)
    if "bfloat16" in text:  # also MXNet's own, np.dtype([("bfloat16", np.uint16)])
        return "bfloat16"
    if text != "float16":
        raise ValueError(f'target_dtype must be "float16" or "bfloat16", received {target_dtype!r}')
    return text


def _inputs(sym: Symbol) -> list[str]:
    """Return the inputs that are not named like parameters or labels."""
    ends = (
        *("weight", "bias", "gamma", "beta", "moving_mean", "moving_var", "running_mean"),
        *("running_var", "parameters", "state", "state_cell"),
    )
    return [name for name in sym.list_inputs() if not name.endswith(ends)]
