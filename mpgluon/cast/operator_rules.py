"""Rules for single operators, which a user puts before the table's.

``"softmax"`` means the operator wherever the network calls it, ``"block:softmax"`` in one block. A
block is named as :attr:`Block.name` has it, or by its place in the network (``"features.0"``).
Operators of MXNet's NumPy interface are ``"np.dot"`` and ``"npx.relu"``, or have their names in a
graph; those that are in ``F`` too are one with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

from mpgluon import kernels
from mpgluon.base.blocks import NamedBlocks, fitting
from mpgluon.errors import did_you_mean
from mpgluon.graph.operators import Rule, may_be_16_bit, name_in_f, one_name, rule_of

import mxnet as mx
from mxnet import gluon
from mxnet.operator import get_all_registered_operators

__all__ = ["NO_RULES", "Rules", "is_operator", "name_in_table", "rules_of"]

Rules = Mapping[str, Rule]
NO_RULES: Rules = {}

_NAMESPACES = ("", "contrib.", "linalg.")
_UNTOUCHED = {
    Rule.MOVE: "does no arithmetic, and passes formats through",
    Rule.OTHER: "decides its formats itself",
}


class _Wish(NamedTuple):
    """One operator that an argument names."""

    text: str  # as the user wrote it
    block: str  # "" for all
    operator: str
    rule: Rule


def rules_of(
    network: NamedBlocks,
    blocks: Set[gluon.Block],
    keep_fp32: Iterable[str],
    compute_16: Iterable[str],
) -> dict[gluon.Block, Rules]:
    """Return the rules of each block whose operators can be governed, where it has any.

    Parameters
    ----------
    network : NamedBlocks
    blocks : set of Block
        Those in it that compute in 16 bits, operator by operator.
    keep_fp32, compute_16 : iterable of str
        Operators whose results are to be in FP32, and in the 16-bit format, instead.

    Raises
    ------
    TypeError, ValueError
        If a name is not text, or names neither an operator of MXNet nor a block among these; if the
        format of an operator cannot be changed like this; if both arguments name the same operator.
    """
    wishes = [_read(network, "keep_fp32", text, Rule.FLOAT32) for text in keep_fp32]
    wishes += [_read(network, "compute_16", text, Rule.NORMALIZE) for text in compute_16]
    if not wishes:
        return {}
    for wish in wishes:
        others = [w for w in wishes if w[1:3] == wish[1:3] and w.rule is not wish.rule]
        if others:
            raise ValueError(f"keep_fp32 and compute_16 both name {wish.text!r}; choose one")
    named = network.among(blocks)
    general = {wish.operator: wish.rule for wish in wishes if not wish.block}
    rules: dict[gluon.Block, Rules] = dict.fromkeys(blocks, general)
    for wish in wishes:
        chosen = fitting(named, wish.block)
        if wish.block and not chosen:
            raise ValueError(
                f"{wish.text!r} names no block of {network.net.name} that computes in 16 bits, "
                f"operator by operator{did_you_mean(wish.block, named)}"
            )
        for block in chosen:
            rules[block] = {**rules[block], wish.operator: wish.rule}
    return rules


def _read(network: NamedBlocks, argument: str, text: Any, rule: Rule) -> _Wish:
    """Return the request of one entry of an argument."""
    if not isinstance(text, str):
        raise TypeError(f"{argument} holds names of operators, received {text!r}")
    block, _, operator = text.rpartition(":")
    if not is_operator(operator):
        names = [] if block or rule is not Rule.FLOAT32 else list(network.by_name)
        no_block = f", nor {network.net.name} a block of that name or place" if names else ""
        raise ValueError(
            f"{argument} names {text!r}, and MXNet has no operator {operator!r}{no_block}"
            f"{did_you_mean(operator, [*_operator_names(), *names])}"
        )
    operator = name_in_table(operator)
    by_table = rule_of(operator)
    if by_table in _UNTOUCHED:
        raise ValueError(f"{argument} names {text!r}: {operator} {_UNTOUCHED[by_table]}")
    if rule is Rule.NORMALIZE and not may_be_16_bit(operator):
        why = (
            "is a loss, or returns counts, positions or pixels, which need FP32"
            if by_table is Rule.FLOAT32
            else "is not kept in FP32 by the table"
        )
        raise ValueError(f"{argument} names {text!r}: {operator} {why}")
    return _Wish(text, block, one_name(operator), rule)


def is_operator(operator: str) -> bool:
    """Whether ``F`` has an operator, or MXNet's NumPy interface."""
    if operator.startswith(("np.", "npx.", "_np")):
        return bool(_in_graph(operator))
    *path, name = operator.split(".")
    namespace: Any = mx.nd
    for part in path:
        namespace = getattr(namespace, part, None)
    function = getattr(namespace, name, None) if isinstance(namespace, ModuleType) else None
    return callable(function) and not isinstance(function, type)


def name_in_table(operator: str) -> str:
    """Return the table's name for an operator; one of the NumPy interface may have another."""
    return name_in_f(_in_graph(operator) or operator)


def _in_graph(operator: str) -> str:
    """Return the name in a graph of an operator of the NumPy interface, empty if it is none."""
    interface, _, last = operator.rpartition(".")
    prefixes = {"np": ("_np_", "_npi_"), "npx": ("_npx_", "_npi_")}.get(interface, ())
    names = [prefix + last for prefix in prefixes] if prefixes else [operator]
    handles = (kernels.handle_of(name) for name in names if name in _registered())
    return next(map(kernels.name_of, handles), "")


@cache
def _registered() -> frozenset[str]:
    numpy = (name for name in get_all_registered_operators() if name.startswith("_np"))
    return frozenset(numpy)


def _operator_names() -> list[str]:
    names = []
    for prefix in _NAMESPACES:
        module = getattr(mx.nd, prefix.removesuffix(".")) if prefix else mx.nd
        names += [f"{prefix}{name}" for name in dir(module) if name[0] != "_"]
    return [*filter(is_operator, names)]
