"""The effect of a Tensor Core's sums on a network's results and gradients.

The changes of a layer's arrays are shown with the errors of the 16-bit format. Between two runs in
16 bits a few results in a hundred are rounded to the other side, and later layers amplify that as
they amplify any rounding. So a change about as large as the format's own is expected, and harmless
where 16 bits are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Optional

from mpgluon.cast.arithmetic import policy_arithmetic
from mpgluon.cast.block import device_type_of
from mpgluon.cast.forward import PolicyForward
from mpgluon.formats.tensor_core import TensorCoreSums
from mpgluon_tools.diagnostics.reference import Errors, Reference
from mpgluon_tools.diagnostics.temporarily import temporarily
from mpgluon_tools.plots.axes import axes_or_new
from mpgluon_tools.plots.rows import draw_dots
from mpgluon_tools.tables import Result, Table

from mxnet import gluon

__all__ = ["Change", "SumsReport", "compare_sums"]

# Two runs whose roundings are independent differ by the square root of 2 times the error of each.
_INDEPENDENT = 1.5


class Change(NamedTuple):
    """Relative changes of one layer's arrays: the norm of a difference over the array's norm.

    Attributes
    ----------
    output, output_gradient, gradient : float
        As of :class:`mpgluon_tools.diagnostics.compare.LayerError`.
    """

    output: float
    output_gradient: float
    gradient: float

    @classmethod
    def of(cls, errors: Errors, block: gluon.Block) -> Change:
        """Return the changes of a layer's arrays."""
        return cls(*(errors.of(block, name.replace("_", " ")) for name in cls._fields))


@dataclass(frozen=True)
class SumsReport(Result):
    """The changes of each way of summing, and the errors of 16 bits.

    Attributes
    ----------
    net : gluon.Block, optional
        The network; ``None`` if nothing was compared.
    dtype : str
        The 16-bit format.
    beside_fp32 : mapping from gluon.Block to Change
        For each layer, in the order in which they computed, the errors in 16 bits with FP32 sums
        against FP32. For the network: of its result and of all its gradients together.
    changes : mapping from str to mapping from gluon.Block to Change
        For each accumulation the same, relative to 16 bits with FP32 sums.
    """

    net: Optional[gluon.Block] = None
    dtype: str = ""
    beside_fp32: Mapping[gluon.Block, Change] = field(default_factory=dict)
    changes: Mapping[str, Mapping[gluon.Block, Change]] = field(default_factory=dict)

    def ratio(self, accumulation: str, block: gluon.Block) -> float:
        """Return a layer's largest change in units of the format's own."""
        pairs = zip(self.changes[accumulation][block], self.beside_fp32[block])
        return max(_ratio(change, own) for change, own in pairs)

    def largest(self, accumulation: str) -> tuple[float, gluon.Block, str]:
        """Return the largest change in units of the format's own, with its layer and array."""
        return max(
            (
                (_ratio(value, getattr(self.beside_fp32[block], name)), block, name)
                for block, change in self.changes[accumulation].items()
                for name, value in change._asdict().items()
            ),
            key=lambda largest: largest[0],
        )

    def table(self, worst: int = 20) -> Table:
        """Return the network and the layers whose sums change most, relative to the format."""
        kinds = (("output", "output"), ("gradient", "gradient"))
        headings = ["layer", "kind"]
        for title, _ in kinds:
            headings += [f"{title}: {name}" for name in (self.dtype, *self.changes)]
        rows = []
        layers = [block for block in self.beside_fp32 if block is not self.net]
        ranked = sorted(
            layers,
            key=lambda block: max(self.ratio(name, block) for name in self.changes),
            reverse=True,
        )[:worst]
        for block in [self.net, *ranked] if self.net is not None else []:
            row = [block.name, type(block).__name__]
            for _, name in kinds:
                errors = (self.beside_fp32, *self.changes.values())
                row += [f"{getattr(one[block], name):.2g}" for one in errors]
            rows.append(row)
        return Table(headings, rows)

    def plot(self, ax: Any = None) -> Any:
        """Draw each way of summing's largest change of 20 layers, in units of the format's own.

        Above 1.5, it exceeds what other roundings would change.

        Draws on ``ax``, Axes of Matplotlib, by default of a new figure, and returns them.
        """
        axes = axes_or_new(ax)
        blocks = list(self.beside_fp32)[:20]
        ratios = {name: [self.ratio(name, block) for block in blocks] for name in self.changes}
        draw_dots(axes, [block.name for block in blocks], ratios)
        axes.axvline(_INDEPENDENT, color="0.5", linewidth=1)
        axes.set_xlabel(f"largest change, in units of the error of {self.dtype}")
        return axes

    def __str__(self) -> str:
        lines = [
            f"Tensor Cores' sums against FP32 sums, both in {self.dtype}; the column {self.dtype} "
            "has the format's own errors against FP32.",
            str(self.table()),
        ]
        for accumulation in self.changes:
            ratio, block, name = self.largest(accumulation)
            where = f"{ratio:.2g} times its error, the {name.replace('_', ' ')} of {block.name}"
            lines.append(
                f"{accumulation} changes no array more than other roundings to {self.dtype} would: "
                f"at most {where}"
                if ratio <= _INDEPENDENT
                else f"{accumulation} matters: it changes arrays more than {self.dtype} itself, up "
                f"to {where}"
            )
        return "\n".join(lines)


def _ratio(change: float, own: float) -> float:
    """Return a change in units of another; an array that neither changes counts as 0."""
    return change / own if own else float("inf") if change else 0.0


def compare_sums(
    net: gluon.Block,
    reference: Reference,
    forwards: Sequence[PolicyForward],
    accumulation: Sequence[str],
) -> SumsReport:
    """Run a network in 16 bits with each kind of sums.

    Parameters
    ----------
    net : gluon.Block
    reference : Reference
        Its FP32 run.
    forwards : sequence of PolicyForward
        Its forward methods.
    accumulation : sequence of str
        As for :func:`mpgluon.diagnostics.compare_with_fp32`, which lists the errors too.
    """
    if not accumulation:
        return SumsReport()
    casts = {forward.network_cast for forward in forwards}
    device_type = device_type_of(net)

    @contextmanager
    def summing(name: str) -> Iterator[None]:
        with ExitStack() as stack:
            for cast in casts:
                if cast.policy.scaled_operands is not None:
                    raise ValueError(
                        f"accumulation sums products of 16 bits, received the policy {cast.policy}"
                    )
                products = None if name == "float32" else TensorCoreSums(name)
                policy = replace(cast.policy, emulate=True, products=products)
                policy_arithmetic(policy, device_type)  # refuses what cannot be computed
                stack.enter_context(temporarily([cast], "policy", policy))
            yield

    for name in accumulation:
        with summing(name):
            pass

    def changes(errors: Errors) -> dict[gluon.Block, Change]:
        layers = {block: Change.of(errors, block) for block in reference.layers}
        whole = Change.of(errors, net)._replace(gradient=errors.together("gradient"))
        return {**layers, net: whole}

    with summing("float32"):
        beside_fp32, beside = changes(reference.errors()), reference.in_16_bits()
    changed = {}
    for name in accumulation:
        with summing(name):
            changed[name] = changes(beside.errors())
    dtypes = {cast.policy.compute_dtype for cast in casts}
    return SumsReport(net, "/".join(sorted(dtypes)), beside_fp32, changed)
