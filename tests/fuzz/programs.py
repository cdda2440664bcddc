"""Programs: a network with inputs and a loss, made from a seed, and written as Python source.

Nothing here needs MXNet. A program is data, so that it can be reduced; what runs is its source.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

from fuzz.numpy_interface import in_numpy

__all__ = ["Input", "Node", "Program"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Input:
    """An argument of the network; ``below`` is 0 for floating numbers, else one above the largest
    integer.
    """

    shape: Shape
    below: int = 0

    @property
    def is_floating(self) -> bool:
        return not self.below


@dataclass(frozen=True)
class Node:
    """One line of the network: an expression of the values that it takes, ``{0}`` and ``{1}``.

    ``dtype`` is set for a value that is not one of the network's floating numbers.
    """

    expression: str
    takes: tuple[int, ...]
    shape: Shape
    dtype: str = ""

    @property
    def is_floating(self) -> bool:
        return not self.dtype


@dataclass(frozen=True)
class Program:
    """A network, its data and its loss.

    Attributes
    ----------
    values : dict from number to Input or Node
        In the order of computation, inputs first.
    layers : dict from name to the expression that makes it
    outputs : tuple of int
        The values that the network returns.
    losses : tuple of str
        An expression of each output ``out`` and of random numbers ``head`` of its shape.
    frozen : tuple of str
        Layers without gradients.
    adds : bool
        Whether gradients accumulate over two passes.
    optimizer, wrapper, packing : str
        How it is trained, what plain Block is around it, and how it returns its results.
    interface : str
        "nd", or "np": MXNet's NumPy interface. Expressions are written for ``mx.nd`` in both.
    is_plain : bool
        Whether the network is a plain Block, which calls operators by name instead of by ``F``.
    """

    seed: int
    values: dict[int, Input | Node]
    layers: dict[str, str]
    outputs: tuple[int, ...]
    losses: tuple[str, ...]
    frozen: tuple[str, ...] = ()
    adds: bool = False
    optimizer: str = "sgd"
    wrapper: str = ""
    packing: str = "tuple"
    interface: str = "nd"
    is_plain: bool = False

    @property
    def counterpart(self) -> Program:
        """The same network as a HybridBlock with operators of ``mx.nd``."""
        return replace(self, interface="nd", is_plain=False)

    @property
    def sources(self) -> dict[str, str]:
        """The sources that a trial receives, by kind."""
        return {
            "": self.source(),
            "noisy": self.source(noisy=True),
            "counterpart": self.counterpart.source(),
        }

    @property
    def inputs(self) -> list[int]:
        return [number for number, value in self.values.items() if isinstance(value, Input)]

    @property
    def nodes(self) -> list[int]:
        return [number for number, value in self.values.items() if isinstance(value, Node)]

    @property
    def constants(self) -> list[str]:
        """The layers that are a constant, which a HybridBlock receives as an argument."""
        return [name for name, made in self.layers.items() if "get_constant" in made]

    @property
    def jumps(self) -> bool:
        """Whether a small change of a value may make a large one."""
        return any(re.search(_JUMPS, self.values[number].expression) for number in self.nodes)

    @property
    def most_uses(self) -> int:
        """How often the value that is used most is an operand or a result."""
        uses = Counter(self.outputs)
        for node in map(self.values.__getitem__, self.nodes):
            for place, taken in enumerate(node.takes):
                uses[taken] += node.expression.count(f"{{{place}}}")
        return max(uses.values())

    def without_dead_code(self) -> Program:
        """Drop the values and layers that no output depends on."""
        alive = set(self.outputs)
        for number in reversed(self.values):
            value = self.values[number]
            if number in alive and isinstance(value, Node):
                alive |= set(value.takes)
        values = {number: value for number, value in self.values.items() if number in alive}
        words = " ".join(v.expression for v in values.values() if isinstance(v, Node))
        named = set(re.findall(r"self\.(\w+)", words))
        for name in reversed(self.layers):  # a layer may share the parameters of one before it
            if name in named:
                named |= set(re.findall(r"self\.(\w+)", self.layers[name]))
        layers = {name: made for name, made in self.layers.items() if name in named}
        frozen = tuple(name for name in self.frozen if name in layers)
        return replace(self, values=values, layers=layers, frozen=frozen)

    def source(self, *, noisy: bool = False) -> str:
        """Return the program as Python; a noisy one passes each value to ``perturbed``."""
        written = in_numpy if self.interface == "np" else str
        names = {n: f"{'x' if isinstance(v, Input) else 'v'}{n}" for n, v in self.values.items()}
        made = [
            f"            self.{name} = {written(layer)}" for name, layer in self.layers.items()
        ]
        lines = []
        for number in self.nodes:
            node = self.values[number]
            text = written(node.expression.format(*(names[taken] for taken in node.takes)))
            if self.is_plain:
                text = re.sub(r"\bF\.(?!npx?\.)", "mx.nd.", text).replace("F.np", "mx.np")
            lines.append(f"        {names[number]} = {text}")
            if noisy:
                lines.append(f"        {names[number]} = perturbed({names[number]})")
        constants = [] if self.is_plain else self.constants
        for name in constants:
            lines = [line.replace(f"self.{name}.data()", name) for line in lines]
        arguments = ", ".join([*(names[number] for number in self.inputs), *constants])
        method = "forward(self" if self.is_plain else "hybrid_forward(self, F"
        results = [names[number] for number in self.outputs]
        returned = ", ".join(results)
        if len(results) > 1 and self.packing == "nested":
            returned = f"[{results[0]}, [{', '.join(results[1:])}]]"
        network = f"{self.wrapper}(Net())" if self.wrapper else "Net()"
        body = "net.body" if self.wrapper else "net"
        settings = [
            f'    {body}.{name}.collect_params().setattr("grad_req", "null")'
            for name in self.frozen
        ]
        if self.adds:
            settings.insert(0, "    accumulate(net)")
        data = [
            f"rng.integers(0, {one.below}, {one.shape})"
            if one.below
            else f"rng.standard_normal({one.shape})"
            for one in (self.values[number] for number in self.inputs)
        ]
        losses = [
            f"        {written(_of(loss, k, self.values[number]))},"
            for k, (loss, number) in enumerate(zip(self.losses, self.outputs))
        ]
        source = "\n".join(
            [
                f"SEED, OPTIMIZER = {self.seed}, {self.optimizer!r}",
                "",
                "",
                f"class Net(gluon.{'' if self.is_plain else 'Hybrid'}Block):",
                "    def __init__(self):",
                "        super().__init__()",
                "        with self.name_scope():",
                *(made or ["            pass"]),
                "",
                f"    def {method}, {arguments}):",
                *lines,
                f"        return {returned}",
                "",
                "",
                "def network():",
                f"    net = initialized({network}, SEED)",
                *settings,
                "    return net",
                "",
                "",
                "def inputs(step):",
                "    rng = np.random.default_rng([SEED, step])",
                f"    return [array(one) for one in ({', '.join(data)},)]",
                "",
                "",
                "def loss_of(results):",
                "    rng = np.random.default_rng(SEED)",
                "    heads = [array(rng.standard_normal(one.shape)) for one in results]",
                "    losses = [",
                *losses,
                "    ]",
                "    total = losses[0].sum()",
                "    for one in losses[1:]:",
                "        total = total + one.sum()",
                "    return total",
                "",
            ]
        )
        switch = "mx.npx.set_np()\n\n" if self.interface == "np" else ""
        return f"{_IMPORTS}\n{switch}{written(_helpers(source))}\n\n{source}"


def _of(loss: str, number: int, value: Input | Node) -> str:
    """Return a loss with the names of one output."""
    result = f"results[{number}]"
    if not value.is_floating:  # MXNet's zeros may end the process behind a cast: see OperatorCall
        has_none = re.search(f"{_JUMPS}|zeros_like|shape_array", value.expression)
        result += f"{'.detach()' if has_none else ''}.astype('float32')"
    return re.sub(r"\bhead\b", f"heads[{number}]", re.sub(r"\bout\b", result, loss))


# An expression whose value is an integer or a mask: a small change may make a large one.
_JUMPS = r"'u?int|'bool|arg|topk|broadcast_greater|> 0\.1\)"

_IMPORTS = """import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn, rnn
"""
_HELPERS = {
    "Residual": """
class Residual(gluon.HybridBlock):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def hybrid_forward(self, F, x):
        return x + self.body(x)
""",
    "Halved": """
class Halved(gluon.Block):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, *inputs):
        return halved(self.body(*inputs))


def halved(result):
    return result * 0.5 if isinstance(result, mx.nd.NDArray) else [halved(one) for one in result]
""",
    "Called": """
class Called(gluon.Block):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, *inputs):
        return self.body(*inputs)
""",
    "sequence": """
def sequence(*layers):
    net = nn.HybridSequential()
    net.add(*layers)
    return net
""",
    "initialized": """
def initialized(net, seed):
    net.initialize(mx.init.Zero())
    rng = np.random.default_rng(seed)
    for name, parameter in net._collect_params_with_prefix().items():
        is_learned = parameter.grad_req != "null"  # MXNet overwrites other gammas with 1
        if name.endswith("weight"):
            size = np.prod(parameter.shape[1:])
            parameter.set_data(array(rng.standard_normal(parameter.shape) / np.sqrt(size)))
        elif is_learned and name.endswith(("bias", "beta", "gamma", "alpha")):
            parameter.set_data(array(rng.uniform(-0.5, 1.5, parameter.shape)))
    return net
""",
    "accumulate": """
def accumulate(net):
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            parameter.grad_req = "add"
""",
    "array": """
def array(values):
    return mx.nd.array(values, dtype="int32" if values.dtype.kind == "i" else "float32")
""",
}


def _helpers(source: str) -> str:
    """Return the helpers that a source uses."""
    return "\n".join(text for name, text in _HELPERS.items() if re.search(rf"\b{name}\(", source))
