"""The report of a cast: its effect on a network, in words."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mpgluon.base.blocks import is_mxnets_own
from mpgluon.cast.plan import BlockPlan, NetworkPlan
from mpgluon.formats.policy import Policy

__all__ = ["BeyondReach", "CastReport", "report_of"]

_LEAVING = {"asnumpy": "what NumPy computes", "Custom": "a custom operator's own code"}


@dataclass(frozen=True)
class BeyondReach:
    """A line of a forward method after which code computes that a cast cannot govern."""

    name: str
    kind: str
    advice: str

    @classmethod
    def of(cls, plan: BlockPlan) -> Iterator[BeyondReach]:
        """Yield the lines of a block's own forward method that hand its values to other code."""
        block, method = plan.block, inspect.unwrap(getattr(type(plan.block), plan.method))
        if is_mxnets_own(method):
            return
        try:
            source, first = inspect.getsourcelines(method)
        except (OSError, TypeError):  # typed at a prompt, or compiled
            return
        for node in ast.walk(ast.parse(textwrap.dedent("".join(source)))):
            if isinstance(node, ast.Attribute) and node.attr in _LEAVING:
                file = Path(inspect.getfile(method)).name
                yield cls(
                    name=block.name,
                    kind=type(block).__name__,
                    advice=f"{file}:{first + node.lineno - 1} calls {node.attr}, and the cast does "
                    f"not govern {_LEAVING[node.attr]}; keep the block in FP32 with keep_fp32 if "
                    "its values need FP32 there",
                )


@dataclass(frozen=True)
class CastReport:
    """The effect of a cast on a network; ``print`` it.

    Attributes
    ----------
    policy : Policy
    cast : tuple of str
        Names of the blocks that compute in 16 bits.
    kept_fp32 : tuple of str
        Names of the blocks with parameters that stay FP32: normalization layers, whose results
        are in the 16-bit format nevertheless, and those that ``keep_fp32`` named. Of an imported
        graph, names of its normalization operators.
    beyond_reach : tuple of BeyondReach
        Lines of forward methods that hand values to code which the cast cannot govern.
    parameters_cast, parameters_kept : int
        Number of parameters (arrays, not elements) that became 16-bit, and of the others.
    arithmetic : {"native", "emulated"}
        Whether this device computes products in the format, or in FP32, each result rounded once.
    told_format : tuple of str
        Names of the blocks that learned the 16-bit format from their own ``cast`` or in ``_dtype``.
    operators_fp32, operators_16 : tuple of str
        The operators that ``keep_fp32`` and ``compute_16`` named, with or without a block.
    first_and_last : tuple of str
        Names of the blocks whose products, unlike others', do not round their operands to 8 bits.
    """

    policy: Policy
    cast: tuple[str, ...]
    kept_fp32: tuple[str, ...]
    beyond_reach: tuple[BeyondReach, ...]
    parameters_cast: int
    parameters_kept: int
    arithmetic: str
    told_format: tuple[str, ...] = ()
    operators_fp32: tuple[str, ...] = ()
    operators_16: tuple[str, ...] = ()
    first_and_last: tuple[str, ...] = ()

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "a cast is a property of the network, not a context: call amp.autocast(net) once, "
            "without `with`, before the Trainer is made; the network is cast until "
            "amp.restore(net), now too"
        )

    def __exit__(self, *_: object) -> None:
        """Nothing: `with` needs both methods to come to the error of the first."""

    def __call__(self, *_: object) -> NoReturn:
        """Refuse to be taken for the network."""
        raise TypeError(f"this is the report of a cast, not the network: {_IN_PLACE}")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"the report of a cast has no {name!r}: {_IN_PLACE}")

    def __str__(self) -> str:
        sums = self.policy.accumulation.title()
        lines = [
            f"parameters {self.policy.param_dtype}, computation {self.policy.compute_dtype}, "
            f"result {self.policy.output_dtype}",
            f"{len(self.cast):6d} {_plural('block', self.cast)} "
            f"compute{'s' * (len(self.cast) == 1)} in {self.policy.compute_dtype}, "
            + _ARITHMETIC[self.arithmetic]
            + f", summed as {sums}'s Tensor Cores do" * (sums != "Float32"),
            f"{len(self.kept_fp32):6d} {_plural('block', self.kept_fp32)} kept in FP32"
            f"{_examples(self.kept_fp32)}",
            f"{self.parameters_cast:6d} parameter{'s' * (self.parameters_cast != 1)} cast to "
            f"{self.policy.param_dtype}"
            f"{' (FP32 arrays of its numbers)' * (self.policy.param_dtype == 'bfloat16')}, "
            f"{self.parameters_kept} left as they were"
            if self.parameters_cast
            else f"{self.parameters_kept:6d} parameter{'s' * (self.parameters_kept != 1)}, "
            "all left as they were",
        ]
        scaling = self.policy.scaled_operands
        if scaling is not None:
            lines.append(
                f"convolutions and dense layers round their operands to {scaling}; the first and "
                f"the last do not{_examples(self.first_and_last)}"
            )
        if self.told_format:
            lines.append(
                f"{len(self.told_format):6d} {_plural('block', self.told_format)} whose own "
                f"format was set to {self.policy.compute_dtype}{_examples(self.told_format)}"
            )
        for names, dtype in (
            (self.operators_fp32, "float32"),
            (self.operators_16, self.policy.compute_dtype),
        ):
            if names:
                lines.append(
                    f"{len(names):6d} {_plural('operator', names)} with results in {dtype}, as "
                    f"asked for: {', '.join(names)}"
                )
        lines += [f"beyond reach: {b.name} ({b.kind}): {b.advice}" for b in self.beyond_reach]
        return "\n".join(lines)


def report_of(plan: NetworkPlan) -> CastReport:
    """Return the report of a cast that has followed a plan."""
    graphs = [entry.graph for entry in plan.blocks if entry.graph is not None]
    normalizations = [node.name for graph in graphs for node in graph.normalizations]
    return CastReport(
        policy=plan.policy,
        cast=tuple(e.block.name for e in plan.blocks if e.is_governed and not e.keeps_parameters),
        kept_fp32=(*(e.block.name for e in plan.blocks if e.keeps_parameters), *normalizations),
        beyond_reach=tuple(
            line for e in plan.blocks if not e.computes_fp32 for line in BeyondReach.of(e)
        ),
        parameters_cast=len(plan.narrowed),
        parameters_kept=len(plan.parameters) - len(plan.narrowed),
        arithmetic=plan.arithmetic,
        told_format=tuple(e.block.name for e in plan.blocks if e.learned),
        operators_fp32=plan.operators_fp32,
        operators_16=plan.operators_16,
        first_and_last=tuple(e.block.name for e in plan.blocks if e.is_edge)
        if plan.policy.scaled_operands
        else (),
    )


_IN_PLACE = "a cast changes its network in place; write mpgluon.cast_block(net), without `net =`"

_ARITHMETIC = {
    "native": "natively",
    "emulated": "emulated: in FP32 arithmetic, each result rounded once",
}


def _plural(word: str, things: tuple[str, ...]) -> str:
    return word if len(things) == 1 else f"{word}s"


def _examples(names: tuple[str, ...]) -> str:
    if not names:
        return ""
    return f" ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
