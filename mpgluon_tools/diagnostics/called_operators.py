"""The operators of a network by the format in which they compute, counted on one batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from mpgluon.cast.arrays import format_of
from mpgluon.cast.forward import forward_of
from mpgluon.graph.operators import Rule, one_name, rule_of
from mpgluon_tools.diagnostics.observe import Batch, Seen, observed_batch
from mpgluon_tools.tables import Result, Table

from mxnet import gluon

__all__ = ["OperatorFormats", "operator_formats"]

_SCALED = frozenset({"Convolution", "FullyConnected"})  # products whose operands have eight bits


@dataclass(frozen=True)
class OperatorFormats(Result):
    """How often each operator ran in each format, in one forward pass.

    Attributes
    ----------
    counts : mapping from (str, str) to int
        Calls by operator and format. A product has the format of its operands; it sums in FP32.
        A normalization computes in FP32, whatever the format of its result. Other operators
        compute in the format of their result.
    layers : mapping from (str, str) to tuple of str
        The names of the blocks that made these calls.
    """

    counts: Mapping[tuple[str, str], int]
    layers: Mapping[tuple[str, str], tuple[str, ...]]

    def calls(self, operator: str) -> dict[str, int]:
        """Return the calls of an operator by format."""
        return {fmt: count for (name, fmt), count in self.counts.items() if name == operator}

    def table(self) -> Table:
        """Return a row for each operator, the most frequent first, with a column for each format.

        For an operator that ran in more than one format, the last column names the layers that
        ran it in the rarer ones.
        """
        total: Counter[str] = Counter()
        for (_, fmt), count in self.counts.items():
            total[fmt] += count
        formats = [fmt for fmt, _ in total.most_common()]
        operators = {name: self.calls(name) for name, _ in self.counts}
        rows = []
        for name, calls in sorted(operators.items(), key=lambda one: -sum(one[1].values())):
            usual = max(calls, key=lambda fmt: calls[fmt])
            others = [
                f"{fmt}: {', '.join(self.layers[name, fmt][:3])}"
                f"{', …' * (len(self.layers[name, fmt]) > 3)}"
                for fmt in calls
                if fmt != usual
            ]
            cells = [str(calls[fmt]) if fmt in calls else "-" for fmt in formats]
            rows.append((name, *cells, "; ".join(others)))
        return Table(("operator", *formats, "where otherwise"), rows)

    def __str__(self) -> str:
        return str(self.table())


def operator_formats(net: gluon.Block, batch: Batch) -> OperatorFormats:
    """Run one batch and count the operators of its forward pass by the format they compute in.

    Parameters
    ----------
    net : gluon.Block
        Plain, cast or autocast, hybridized or not. An imported graph that is not cast computes as
        a whole: its operators are not counted.
    batch : Batch

    Returns
    -------
    OperatorFormats
        ``print`` it.
    """
    counts: Counter[tuple[str, str]] = Counter()
    layers: dict[tuple[str, str], dict[str, None]] = {}

    def note(seen: Seen) -> None:
        if seen.kind == "operator" and seen.place == 0:
            key = seen.operator, _computed_in(seen)
            counts[key] += 1
            layers.setdefault(key, {})[seen.block.name] = None

    observed_batch(net, batch, note, operators=True)
    return OperatorFormats(dict(counts), {key: tuple(names) for key, names in layers.items()})


def _computed_in(seen: Seen) -> str:
    """Return the name of the format in which an operator computed."""
    forward, name = forward_of(seen.block), one_name(seen.operator)
    of_result = format_of(seen.array)
    made = str(getattr(of_result, "name", of_result))
    if forward is None or forward.kept or not forward.plan.is_governed:
        return made
    rule = forward.plan.rules.get(name) or rule_of(seen.operator)
    if rule is Rule.COMPUTE:
        policy = forward.network_cast.policy
        return policy.product_dtype if seen.operator in _SCALED else policy.compute_dtype
    return "float32" if rule in (Rule.NORMALIZE, Rule.FLOAT32) else made
