"""The time of a step by operator of MXNet and by primitive of oneDNN, and the time an element.

One process, started with the variables of ``ENVIRONMENT``, runs the steps and prints
(`profile_process`); another one reads that output (`read_profile`). Times are by the clock, so
other work on the machine adds to them: the fastest of several steps counts, row by row.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from math import prod
from tempfile import TemporaryDirectory
from typing import Any, Callable, NamedTuple, Optional, TypeVar

from mpgluon.graph.nodes import Graph
from mpgluon.kernels.dtypes import dtype_name
from mpgluon_tools.tables import Table

import mxnet as mx
from mxnet.symbol import Symbol

__all__ = [
    "ENVIRONMENT",
    "Cost",
    "StepProfile",
    "is_slow_code",
    "profile_process",
    "read_profile",
]

# Before MXNet is imported: each operator is run by itself, and oneDNN prints a line for each
# primitive.
ENVIRONMENT = {
    "MXNET_EXEC_BULK_EXEC_TRAIN": "0",
    "MXNET_EXEC_BULK_EXEC_INFERENCE": "0",
    "DNNL_VERBOSE": "1",
}
_STEP, _SIZES = "mpgluon_step ", "mpgluon_sizes "  # beginnings of lines, with JSON behind them
_PRIMITIVE = "dnnl_verbose,exec,"
_REFERENCE = re.compile(r"(^|[_:])ref([_:]|$)|ncsp_bnorm|simple")
_GEMM = "gemm:jit"  # fast for a matrix, slow for convolutions, which it copies into matrices
_CONVOLUTIONS = ("convolution", "deconvolution")
_WITH_WEIGHTS = (*_CONVOLUTIONS, "inner_product")
_SHAPES, _SIZE = re.compile(r"\d+([x:]\d+)*"), re.compile(r"([a-z]+)(\d+)")
_Key = TypeVar("_Key")
# Casts, whose gradients are other casts.
_GRADIENTS = {
    f"_mpgluon_{one}_bfloat16{blocks}": f"_mpgluon_{other}_bfloat16{blocks}"
    for one, other in (("to", "from"), ("from", "to"))
    for blocks in ("", "_in_blocks")
}


class Cost(NamedTuple):
    """The cost of a row of a profile in a step.

    Attributes
    ----------
    calls : float
    ms : float
        Milliseconds of all calls together, in the fastest step.
    elements : int, optional
        Elements of the largest operand or result, summed over the calls; None if unknown.
    """

    calls: float
    ms: float
    elements: Optional[int]

    @property
    def ns_an_element(self) -> Optional[float]:
        """Nanoseconds for each element; None if the elements are unknown."""
        return 1e6 * self.ms / self.elements if self.elements else None


class StepProfile(NamedTuple):
    """Costs by operator, and by primitive: its kind and its implementation; the slowest first."""

    operators: dict[str, Cost]
    primitives: dict[tuple[str, str], Cost]

    def table_of_operators(self) -> Table:
        """Return a row for each operator; the elements are of all calls in a step."""
        total = sum(cost.ms for cost in self.operators.values())
        return Table(
            ("operator", "calls", "ms", "share", "elements", "ns/element"),
            [
                (
                    name,
                    f"{cost.calls:g}",
                    f"{cost.ms:.2f}",
                    f"{100 * cost.ms / total:.1f} %",
                    "" if cost.elements is None else f"{cost.elements:,}",
                    _in_ns(cost),
                )
                for name, cost in self.operators.items()
            ],
        )

    def table_of_primitives(self) -> Table:
        """Return a row for each implementation of a kind of primitive, slow code with a mark."""
        return Table(
            ("primitive", "implementation", "calls", "ms", "ns/element", "code"),
            [
                (
                    kind,
                    name,
                    f"{cost.calls:g}",
                    f"{cost.ms:.2f}",
                    _in_ns(cost),
                    "slow" if is_slow_code(kind, name) else "",
                )
                for (kind, name), cost in self.primitives.items()
            ],
        )


def _in_ns(cost: Cost) -> str:
    return "" if cost.ns_an_element is None else f"{cost.ns_an_element:.2f}"


def is_slow_code(kind: str, implementation: str) -> bool:
    """Return whether oneDNN's name for an implementation stands for reference or slow code."""
    if _GEMM in implementation:
        return kind in _CONVOLUTIONS
    return _REFERENCE.search(implementation) is not None


def profile_process(make_step: Callable[[], Callable[[], object]], *, steps: int) -> None:
    """Make a step, run it several times in MXNet's profiler, and print the operators of each.

    For a process that ends then: MXNet's class of graphs is replaced by one that records its
    calls, and stays so.
    """
    calls = _record_graphs()
    step = make_step()
    # MXNet replaces the file named here, even a device, now and when the process ends. By then
    # the folder is gone, and nothing is written.
    with TemporaryDirectory(prefix="mpgluon_") as folder:
        mx.profiler.set_config(
            profile_symbolic=True,
            profile_imperative=True,
            profile_memory=False,
            profile_api=False,
            aggregate_stats=True,
            filename=f"{folder}/trace.json",
        )
    mx.nd.waitall()
    _print(_STEP, {})  # the primitives before this line are of the warm-up
    for _ in range(steps):
        calls.clear()
        mx.profiler.set_state("run")
        step()
        mx.nd.waitall()
        mx.profiler.set_state("stop")
        rows = json.loads(mx.profiler.dumps(format="json", reset=True))["Time"]["operator"]
        _print(_STEP, {name: (row["Count"], row["Total"]) for name, row in rows.items()})
    _print(_SIZES, _sizes_of(calls))


def _record_graphs() -> list[tuple[Symbol, tuple[mx.nd.NDArray, ...]]]:
    """Return a list of each call of a graph from now on: the graph and its inputs."""
    calls = []

    class Recorded(mx.nd.CachedOp):
        def __init__(self, symbol: Symbol, flags: tuple[tuple[str, object], ...] = ()) -> None:
            super().__init__(symbol, flags)
            self.symbol = symbol

        def __call__(self, *args: mx.nd.NDArray, **options: Any) -> Any:
            calls.append((self.symbol, args))
            return super().__call__(*args, **options)

    mx.nd.CachedOp = Recorded
    return calls


def _sizes_of(calls: Iterable[tuple[Symbol, tuple[mx.nd.NDArray, ...]]]) -> dict[str, Any]:
    """Return for each operator of the graphs the number of its nodes and their elements.

    And the number of trained parameters with their elements.
    """
    sizes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    trained: dict[int, int] = {}
    for symbol, arrays in calls:
        graph, names = Graph.read(symbol.as_nd_ndarray()), symbol.list_inputs()
        known = dict(zip(names, arrays))
        graph.infer(
            {name: dtype_name(array) or "" for name, array in known.items()},
            {name: array.shape for name, array in known.items()},
        )
        shapes_are_known = any(value.shape for node in graph.nodes for value in node.outputs)
        for node in graph.nodes:
            if shapes_are_known and not node.is_variable:
                of_results = [value.shape for value in node.outputs]
                sizes[node.operator][0] += 1
                sizes[node.operator][1] += max(map(prod, [*of_results, *graph.shapes(node)]))
        for (node, output), uses in graph.uses().items():
            if shapes_are_known and uses > 1 and not node.is_variable:  # gradients are added
                sizes["add_n"][0] += 1
                sizes["add_n"][1] += prod(node.outputs[output].shape)
        trained |= {id(array): array.size for array in arrays if array.grad is not None}
    return {"nodes": sizes, "parameters": (len(trained), sum(trained.values()))}


def _print(beginning: str, content: object) -> None:
    sys.stdout.write(f"\n{beginning}{json.dumps(content)}\n")  # oneDNN has flushed its own lines
    sys.stdout.flush()


def read_profile(output: str) -> StepProfile:
    """Return the profile in the output of a process that called `profile_process`.

    Raises
    ------
    ValueError
        If there are no steps in it.
    """
    operators: list[dict[str, Cost]] = []
    primitives: list[dict[tuple[str, str], Cost]] = []
    sizes: dict[str, Any] = {"nodes": {}, "parameters": (0, 0)}
    lines: list[str] = []
    for line in output.splitlines():
        if line.startswith(_PRIMITIVE):
            lines.append(line)
        elif line.startswith(_SIZES):
            sizes = json.loads(line[len(_SIZES) :])
        elif line.startswith(_STEP):
            rows = json.loads(line[len(_STEP) :])
            operators.append({name: Cost(calls, ms, None) for name, (calls, ms) in rows.items()})
            primitives.append(_primitives_of(lines))
            lines = []
    if len(operators) < 2:
        raise ValueError(f"there is no step in the output of the profile: {output[-200:]!r}")
    known = {
        name: cost._replace(elements=_elements_of(name, cost.calls, sizes))
        for name, cost in _fastest(operators[1:]).items()
    }
    return StepProfile(known, _fastest(primitives[1:]))


def _fastest(steps: list[dict[_Key, Cost]]) -> dict[_Key, Cost]:
    """Return the cost of each row in its fastest step, the slowest row first.

    Rows that most steps lack are left out: a step that a loss scale skips has some of its own.
    """
    number = Counter(name for step in steps for name in step)
    every = [item for step in steps for item in step.items() if 2 * number[item[0]] >= len(steps)]
    slowest_first = sorted(every, key=lambda item: -item[1].ms)
    fastest = dict(slowest_first)  # a later item takes the place of an earlier one
    return dict(sorted(fastest.items(), key=lambda item: -item[1].ms))


def _elements_of(name: str, calls: float, sizes: Mapping[str, Any]) -> Optional[int]:
    """Return the elements of all calls of an operator in a step; None if calls are unexplained.

    A gradient has the operands and results of its operator. If an operator has other calls than the
    graph's, such as the loss's, their sizes are unknown, and so is the sum.
    """
    if name.endswith("_update"):
        count, elements = sizes["parameters"]
        return elements if count == calls else None
    operator = name.replace("_backward", "") if "backward" in name else _GRADIENTS.get(name, name)
    base = operator.lstrip("_")
    # MXNet's gradient also serves operators of ours that differ in the forward pass alone.
    for endings in ((), (f"_{base}",)):
        fitting: list[tuple[int, int]] = [
            size
            for node, size in sizes["nodes"].items()
            if node == name or node.lstrip("_") == base or node.endswith(endings)
        ]
        if calls == sum(count for count, _ in fitting):
            return sum(elements for _, elements in fitting)
    return None


def _primitives_of(lines: Iterable[str]) -> dict[tuple[str, str], Cost]:
    """Return the cost of each primitive in oneDNN's lines."""
    costs: dict[tuple[str, str], Cost] = {}
    for line in lines:
        _, _, _, kind, implementation, *_, problem, ms = line.split(",")
        calls, total, elements = costs.get((kind, implementation), Cost(0, 0.0, 0))
        more = _elements_of_problem(kind, problem)
        elements = None if elements is None or more is None else elements + more
        costs[kind, implementation] = Cost(calls + 1, total + float(ms), elements)
    return costs


def _elements_of_problem(kind: str, problem: str) -> Optional[int]:
    """Return the elements of the largest array of a primitive; None if its text has no sizes.

    Such texts are ``g2mb8_ic64oc64_ih56oh56kh3sh1dh0ph1_iw56ow56kw3sw1dw0pw1`` and, a shape for
    each array, ``8x64x56x56:8x32x56x56``.
    """
    if _SHAPES.fullmatch(problem):
        sizes = [prod(map(int, shape.split("x"))) for shape in problem.split(":")]
        return sum(sizes) if kind == "concat" else max(sizes)
    if not problem.startswith(("mb", "g")):  # of a recurrent network
        return None
    of: dict[str, int] = defaultdict(lambda: 1)
    of |= {name: int(size) for name, size in _SIZE.findall(problem)}
    source = of["mb"] * prod(of[name] for name in ("ic", "id", "ih", "iw"))
    result = of["mb"] * prod(of[name] for name in ("oc", "od", "oh", "ow"))
    weights = of["ic"] * of["oc"] // of["g"] * prod(of[name] for name in ("kd", "kh", "kw"))
    if kind == "inner_product":
        weights = of["oc"] * source // of["mb"]
    return max(source, result, weights if kind in _WITH_WEIGHTS else 0)
