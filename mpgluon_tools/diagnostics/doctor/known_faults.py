"""Faults of MXNet's own operators that a network meets: wrong numbers, or the end of the process.

One table, a row for each fault that was measured: how it is found in a graph, what happens, and the
cure. A cast network repairs those marked ``only_plain``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Callable, NamedTuple

from mpgluon.base.blocks import blocks_of
from mpgluon.base.findings import Finding, error, examples
from mpgluon.cast.network_cast import cast_of
from mpgluon.graph.nodes import Graph, Node
from mpgluon.graph.operators import name_in_f

import mxnet as mx
from mxnet import gluon
from mxnet.gluon import nn

__all__ = ["known_faults"]


@dataclass(frozen=True)
class _Network:
    """A graph and how its network runs it: ``flags`` are the options of ``hybridize``, if used."""

    graph: Graph
    is_compiled: bool
    flags: dict[str, bool]
    trained: set[str]  # names of parameters with gradients
    fixed: set[str]  # names of parameters that can have none, such as a gamma of BatchNorm

    @classmethod
    def of(cls, net: gluon.Block, graph: Graph) -> _Network:
        hybridized = [block for block in blocks_of(net) if getattr(block, "_active", False)]
        parameters = net.collect_params().values()
        return cls(
            graph=graph,
            is_compiled=bool(hybridized) or isinstance(net, gluon.SymbolBlock),
            flags={name: value for block in hybridized for name, value in block._flags},
            trained={one.name for one in parameters if one.grad_req != "null"},
            fixed={one.name for one in parameters if not one._differentiable},
        )

    def adds_without_gradient(self, node: Node) -> bool:
        uses = self.graph.uses()
        alone = [one.node for one in node.inputs if one.node.is_variable and uses[one.key] == 1]
        return any(one.name not in self.trained for one in alone)

    def never_learns(self, node: Node) -> bool:
        gamma_and_beta = {entry.node.name for entry in node.inputs[1:3]}
        if node.options.get("use_global_stats") or not gamma_and_beta <= self.fixed:
            return False
        before = Graph([node.inputs[0]]).nodes
        return not any(one.is_variable and one.name in self.trained for one in before)


def _parts(node: Node) -> list[tuple[int, ...]]:
    """Return the shapes of the arrays that were concatenated to a node's data, if any were."""
    source = node.inputs[0].node
    return [entry.value.shape for entry in source.inputs] if source.operator == "Concat" else []


def _of_columns(node: Node) -> bool:
    parts = _parts(node)
    return bool(parts) and all(shape[1:] == (1,) for shape in parts)


def _in_two_layouts(node: Node) -> bool:
    channels = [shape[1] for shape in _parts(node)]
    return any(number % 16 for number in channels) and not any(number % 8 for number in channels)


class _Fault(NamedTuple):
    operators: str
    found: Callable[[_Network, Node], bool]
    why: str
    fix: str
    only_plain: bool = True


_FAULTS = (
    _Fault(
        "LeakyReLU",
        lambda net, node: net.is_compiled and node.options.get("act_type") == "prelu",
        "hybridized, MXNet multiplies the gradient of PReLU's slope by the slope",
        "do not hybridize it, write F.relu(x) - F.broadcast_mul(slope, F.relu(-x)), or cast",
    ),
    _Fault(
        "elemwise_add",
        lambda net, node: bool(net.flags.get("static_alloc")) and net.adds_without_gradient(node),
        "with static_alloc, a sum with an input or parameter that has no gradient gives the other "
        "addend a gradient of arbitrary numbers",
        "hybridize without static_alloc, use F.broadcast_add, or cast",
    ),
    _Fault(
        "BatchNorm",
        lambda net, node: net.never_learns(node),
        "its running statistics are written in the backward pass, which does not come this far: "
        "they stay at mean 0 and variance 1",
        "call attach_grad() on the images in training, or normalize them before the network",
        only_plain=False,
    ),
    _Fault(
        "softmax log_softmax BatchNorm",
        lambda _, node: _of_columns(node),
        "on a concatenation of single columns it ends the process, or fails with !is_view",
        "cast to float16 or an emulated format, or do not cut into columns",
        only_plain=False,  # native bfloat16 has it
    ),
    _Fault(
        "SequenceLast",
        lambda _, node: not node.options.get("use_sequence_length"),
        "without lengths, its backward pass writes outside of its array and can end the process",
        "F.slice_axis(x, axis=0, begin=-1, end=None)",
        only_plain=False,
    ),
    _Fault(
        "transpose",
        lambda _, node: node.inputs[0].value.dtype == "bfloat16",
        "on a bfloat16 array it ends the process",
        "use F.SwapAxis, or mpgluon's cast in place of contrib.amp's",
    ),
    _Fault(
        "Deconvolution",
        lambda _, node: _in_two_layouts(node),
        "with AVX-512, its backward pass ends the process on a concatenation of parts of 8 "
        "channels, which oneDNN holds in blocks of 8 and of 16",
        "give each part a multiple of 16 channels, or cast",
    ),
    _Fault(
        "Deconvolution",
        lambda _, node: not node.inputs[1].node.is_variable,
        'its backward pass fails ("could not execute a primitive") if its weight is computed',
        "let the weight be a parameter, or cast",
    ),
)


def known_faults(net: gluon.Block, graph: Graph) -> Iterator[Finding]:
    """Yield an error for each fault that a network meets; ``graph`` as ``trace`` returns it."""
    is_cast = any(cast_of(one) is not None for one in net.collect_params().values())
    network = _Network.of(net, graph)
    for fault in _FAULTS:
        places = [
            f"{name_in_f(node.operator)} in {node.layer}"
            for node in graph.nodes
            if node.operator in fault.operators.split()
            and not (is_cast and fault.only_plain)
            and fault.found(network, node)
        ]
        if places:
            yield error("MXNet", examples(places), fault.why, fault.fix)
    if network.is_compiled and not is_cast and not network.flags.get("static_alloc"):
        names = [entry.node.name for entry in graph.heads if entry.node.is_variable]
        if names:
            yield error(
                "MXNet",
                f"the network returns its input {examples(names)} as it is",
                "hybridized, no gradient reaches the input through it",
                "return F.identity(x), or hybridize with static_alloc",
            )
    fused = [block.name for block in blocks_of(net) if isinstance(block, nn.BatchNormReLU)]
    if fused and mx.util.is_np_array():
        yield error(
            "MXNet",
            examples(fused),
            "BatchNormReLU of the NumPy interface leaves its ReLU out",
            "nn.BatchNorm() and nn.Activation('relu') in its place",
        )
    if any(getattr(block, "_backend", None) == "MKLDNN" for block in blocks_of(net)):
        yield error(
            "MXNet",
            "the network is compiled for the backend MKLDNN",
            "it fuses some networks wrongly: results of CIFAR ResNet-20 v2 are wrong by a third",
            "compare its results with FP32's, as mpgluon.deployment.inference_network(fuse_for=…) "
            "does",
        )
