"""A graph of MXNet as a PyTorch program, with Gluon's names and ``forward`` as one writes it.

Neither MXNet nor PyTorch is needed: a graph and arrays of :mod:`mpgluon_tools.leaving.mxnet_files`
become the text of a module and a file of safetensors.
"""

from __future__ import annotations

import json
import keyword
import re
import struct
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from mpgluon_tools.leaving.mxnet_files import Graph, Node
from mpgluon_tools.leaving.torch_layers import TRANSLATIONS, Call, Layer, UnsupportedError

import numpy as np

__all__ = ["TorchProgram", "UnsupportedError", "safetensors", "torch_program"]

Entry = tuple[int, int]

_NAMES = ("x", "y", "z", "u", "v", "w")
_LONGEST = 48  # of an expression that becomes an operand of another
_SAME_RANK = frozenset({"Activation", "BatchNorm", "Dropout", "LeakyReLU", "Pad", "clip", "relu",
                        "elemwise_add", "broadcast_add", "broadcast_mul", "Concat"})  # fmt: skip
_OF_MODULES = (  # the attributes of torch.nn.Module
    "add_module", "apply", "bfloat16", "buffers", "call_super_init", "children", "compile",
    "cpu", "cuda", "double", "dump_patches", "eval", "extra_repr", "float", "forward",
    "get_buffer", "get_extra_state", "get_parameter", "get_submodule", "half", "ipu",
    "load_state_dict", "modules", "mtia", "named_buffers", "named_children", "named_modules",
    "named_parameters", "parameters", "register_buffer", "register_module", "register_parameter",
    "requires_grad_", "set_extra_state", "set_submodule", "share_memory", "state_dict", "to",
    "to_empty", "train", "training", "type", "xpu", "zero_grad",
)  # fmt: skip
_OPERAND = re.compile("\0(\\d+)\0")
_DTYPES = {"float32": "F32", "float64": "F64", "float16": "F16", "int8": "I8", "uint8": "U8",
           "int16": "I16", "int32": "I32", "int64": "I64", "bool": "BOOL"}  # fmt: skip
_FROZEN = '''
class Frozen(nn.Module):
    """A BatchNorm that uses its running statistics in training too."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        norm = self.norm
        statistics = norm.running_mean, norm.running_var
        return F.batch_norm(x, *statistics, norm.weight, norm.bias, False, 0.0, norm.eps)

'''


@dataclass(frozen=True)
class TorchProgram:
    """A network as PyTorch's text and values.

    Attributes
    ----------
    text : str
        A Python module with the class ``Network`` and the function ``load``.
    state : dict of str to ndarray
        The state dict.
    """

    text: str
    state: Mapping[str, Any]


def torch_program(
    graph: Graph,
    values: Mapping[str, Any],
    inputs: Sequence[str],
    *,
    title: str,
    frozen: Collection[str] = (),
    shapes: Optional[Mapping[Entry, tuple[int, ...]]] = None,
    comments: Optional[Mapping[Entry, str]] = None,
) -> TorchProgram:
    """Write a graph as a PyTorch program.

    Parameters
    ----------
    graph : Graph
        Without casts.
    values : dict of str to ndarray
        The parameters by their names in the graph.
    inputs : sequence of str
        The variables that ``forward`` takes, in this order.
    title : str
        The first line of the module.
    frozen : collection of str
        The parameters without a gradient.
    shapes : dict from (node, result) to tuple of int, optional
        Shapes of results, with a batch of any size, for operators that need them.
    comments : dict from (node, result) to str, optional
        Words behind the statement of a result.

    Raises
    ------
    ValueError
        If a variable is neither an input nor has a value; if an operator has no equal, an
        :class:`UnsupportedError` that names all of them.
    """
    writer = _Writer(graph, values, inputs, frozen, shapes or {}, comments or {})
    lines = list(writer.forward())
    if writer.problems:
        raise UnsupportedError(
            f"PyTorch, or this translation, has no equal for {'; '.join(writer.problems)}"
        )
    arguments = ", ".join(["self", *writer.arguments])
    parts = [
        f'"""{title}"""',
        "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n",
        *([_FROZEN] if any("Frozen(" in one for one in writer.definitions) else []),
        "class Network(nn.Module):\n    def __init__(self):\n        super().__init__()",
        "\n".join(f"        {one}" for one in writer.definitions),
        f"\n    def forward({arguments}):",
        "\n".join(f"        {one}" for one in lines),
        _LOAD,
    ]
    return TorchProgram("\n".join(part for part in parts if part), writer.state)


_LOAD = '''

def load(path="model.safetensors"):
    """Return the network with the parameters of a file, for inference."""
    from safetensors.torch import load_file

    net = Network()
    net.load_state_dict(load_file(path))
    return net.eval()
'''


@dataclass
class _Result:
    """A result as an expression, and the variables in it that must keep their values."""

    text: str
    holds: list[str] = field(default_factory=list)


class _Writer:
    """Translates nodes in order; short results that are used once become operands."""

    def __init__(
        self, graph: Graph, values: Mapping[str, Any], inputs: Sequence[str],
        frozen: Collection[str], shapes: Mapping[Entry, tuple[int, ...]],
        comments: Mapping[Entry, str],
    ) -> None:  # fmt: skip
        self.problems: list[str] = []
        self.definitions: list[str] = []
        self.state: dict[str, Any] = {}
        self._graph, self._values, self._frozen = graph, values, frozen
        self._shapes, self._comments = shapes, comments
        self._uses = Counter(entry for node in graph.nodes for entry in node.inputs)
        self._uses.update(graph.heads)
        self._prefix = _common_prefix([node.name for node in graph.nodes if node.op != "null"])
        self._taken = {*_OF_MODULES, *dir(object), *_NAMES, "torch", "nn", "F"}
        self._layers: dict[tuple[Any, ...], str] = {}
        self._defined: dict[str, str] = {}  # where the module has each variable
        self._results: dict[Entry, _Result] = {}
        self._references: Counter[str] = Counter()
        self.arguments = ["x"] if len(inputs) == 1 else [self._name(name) for name in inputs]
        known = dict(zip(inputs, self.arguments))
        for number, node in enumerate(graph.nodes):
            if node.op != "null":
                continue
            if node.name in known:
                self._set_variable((number, 0), known[node.name])
            elif node.name not in values:
                raise ValueError(
                    f"the graph has the variable {node.name}, which is neither an input "
                    f"({', '.join(inputs)}) nor a parameter of the file"
                )

    def forward(self) -> Iterator[str]:
        """Yield the statements, and fill definitions and state on the way."""
        for number, node in enumerate(self._graph.nodes):
            if node.op != "null":
                yield from self._translate(number, node)
        if self.problems or self._returns(len(self._graph.nodes) - 1):
            return
        if any(place for _, place in self._graph.heads):
            self.problems.append("a second result of an operator")
            return
        yield f"return {', '.join(self._operand(head, 1).text for head in self._graph.heads)}"

    def _returns(self, number: int) -> bool:
        """Return whether the last node is the one result, so that its statement returns it."""
        is_last = number == len(self._graph.nodes) - 1
        return is_last and self._graph.heads == ((number, 0),) and not self._is_variable(number)

    def _is_variable(self, number: int) -> bool:
        return self._graph.nodes[number].op == "null"

    def _translate(self, number: int, node: Node) -> Iterator[str]:
        try:
            call, text = self._called(node)
        except UnsupportedError as why:
            self.problems.append(f"{node.name} ({node.op}: {why})")
            self._results[number, 0] = _Result("x")
            return
        if call.layer is not None:
            text = text.replace("self.LAYER", f"self.{self._layer(node, call.layer)}")
        operands = [
            self._operand(entry, text.count(f"\0{i}\0")) for i, entry in enumerate(node.inputs)
        ]
        for place, (entry, operand) in enumerate(zip(node.inputs, operands)):
            if text.count(f"\0{place}\0") > 1 and not operand.text.isidentifier():
                yield from self._assign(entry, operand)
                operands[place] = self._operand(entry, 1)
        result = _Result(_filled(text, [one.text for one in operands]))
        result.holds = [name for one in operands for name in one.holds]
        entry = (number, 0)
        if self._returns(number):
            yield f"return {result.text}{self._comment(entry)}"
        elif self._uses[entry] > 1 or len(result.text) > _LONGEST or entry in self._graph.heads:
            yield from self._assign(entry, result)
        else:
            self._results[entry] = result

    def _called(self, node: Node) -> tuple[Call, str]:
        if node.op not in TRANSLATIONS:
            raise UnsupportedError("not translated")
        if any(place for _, place in node.inputs):
            raise UnsupportedError("it takes a second result of an operator")
        variables = [self._graph.nodes[source] for source, _ in node.inputs]
        call = Call(
            node,
            [f"\0{place}\0" for place in range(len(node.inputs))],
            [self._values.get(one.name) if one.op == "null" else None for one in variables],
            [self._shapes.get(entry) for entry in node.inputs],
            self._rank(node.inputs[0]) if node.inputs else None,
        )
        return call, TRANSLATIONS[node.op](call)

    def _operand(self, entry: Entry, times: int) -> _Result:
        """Return an operand; one that does not appear belongs to a layer."""
        node = self._graph.nodes[entry[0]]
        if node.op == "null" and node.name in self._values and entry not in self._results:
            return _Result(self._parameter(node.name) if times else "")
        return self._results[entry]

    def _assign(self, entry: Entry, result: _Result) -> Iterator[str]:
        for name in result.holds:
            self._references[name] -= 1
        free = (name for name in self._variable_names() if self._references[name] <= 0)
        name = next(free)
        self._set_variable(entry, name)
        yield f"{name} = {result.text}{self._comment(entry)}"

    def _comment(self, entry: Entry) -> str:
        return f"  # {self._comments[entry]}" if entry in self._comments else ""

    def _rank(self, entry: Entry) -> Optional[int]:
        """Return the axes of a result, if its shape or the operators before it tell."""
        node = self._graph.nodes[entry[0]]
        if entry in self._shapes:
            return len(self._shapes[entry])
        if node.op in ("Convolution", "Deconvolution", "Pooling"):
            kernel = node.value("kernel")
            return 2 + len(kernel) if kernel else None
        if node.op == "Flatten" or (node.op == "FullyConnected" and node.value("flatten", True)):
            return 2
        return self._rank(node.inputs[0]) if node.op in _SAME_RANK else None

    def _variable_names(self) -> Iterator[str]:
        yield from (name for name in self.arguments if name in _NAMES)
        yield from (name for name in _NAMES if name not in self.arguments)
        yield from (f"x{number}" for number in range(2, 10**6))

    def _set_variable(self, entry: Entry, name: str) -> None:
        self._references[name] = self._uses[entry]
        self._results[entry] = _Result(name, [name])

    def _layer(self, node: Node, layer: Layer) -> str:
        """Return the name of a layer; of one that is called twice the first one's."""
        parameters = tuple(
            self._graph.nodes[source].name
            for source, _ in node.inputs[1:]
            if self._graph.nodes[source].op == "null"
        )
        key = (layer.definition, parameters)
        if key not in self._layers:
            name = self._name(node.name)
            self._layers[key] = name
            self.definitions.append(f"self.{name} = {layer.definition}")
            if node.op == "BatchNorm" and node.value("fix_gamma", True):
                inner = "norm." * ("norm.weight" in layer.state)
                self.definitions.append(f"self.{name}.{inner}weight.requires_grad = False")
                parameters = parameters[1:]  # its scale was replaced
            self.state |= {f"{name}.{part}": value for part, value in layer.state.items()}
            for part, value in layer.state.items():
                variable = next((one for one in parameters if self._values[one] is value), "")
                self._define(variable, f"self.{name}.{part}")
        return self._layers[key]

    def _define(self, variable: str, place: str) -> None:
        """Share a parameter that another layer has too, and freeze one without a gradient."""
        if variable in self._defined:
            self.definitions.append(f"{place} = {self._defined[variable]}")
        elif variable:
            self._defined[variable] = place
            if variable in self._frozen and "running_" not in place:
                self.definitions.append(f"{place}.requires_grad = False")

    def _parameter(self, variable: str) -> str:
        """Return a parameter that no layer takes, which is defined by itself."""
        if variable not in self._defined:
            name, value = self._name(variable), np.asarray(self._values[variable])
            self.definitions.append(f"self.{name} = nn.Parameter(torch.zeros({value.shape}))")
            self.state[name] = value
            self._define(variable, f"self.{name}")
        return self._defined[variable]

    def _name(self, name: str) -> str:
        """Return a name without the network's prefix, as an identifier of its own."""
        name = name.removeprefix(self._prefix).removesuffix("_fwd")
        name = re.sub(r"\W", "_", name).strip("_") or "layer"
        if name[0].isdigit() or keyword.iskeyword(name):
            name = f"_{name}"
        free, number = name, 2
        while free in self._taken:
            free, number = f"{name}_{number}", number + 1
        self._taken.add(free)
        return free


def _common_prefix(names: Sequence[str]) -> str:
    """Return the beginning that all names have, up to an underscore."""
    first, last = min(names, default=""), max(names, default="")
    length = next((i for i, pair in enumerate(zip(first, last)) if pair[0] != pair[1]), 0)
    return first[: first.rfind("_", 0, length) + 1]


def _filled(text: str, operands: Sequence[str]) -> str:
    """Put operands into an expression, in parentheses where they need them."""

    def put(found: re.Match[str]) -> str:
        operand = operands[int(found[1])]
        before, after = text[: found.start()][-1:], text[found.end() :][:1]
        is_argument = before in ("", "(", "[", " ") and after in ("", ")", ",", "]")
        sign = text[: found.start()].rstrip()[-1:] in tuple("+-*/@")
        return operand if is_argument and not sign else _closed(operand)

    return _OPERAND.sub(put, text)


def _closed(text: str) -> str:
    """Return an expression in parentheses, unless it is a name, a call or an index."""
    depth = 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == " " and not depth:
            return f"({text})"
    return f"({text})" if text.startswith("-") else text


def safetensors(state: Mapping[str, Any]) -> bytes:
    """Return a file of safetensors with a state dict.

    References
    ----------
    https://github.com/huggingface/safetensors, "Format".
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, place = [], 0
    for name, value in state.items():
        array = np.ascontiguousarray(value).reshape(np.shape(value))
        data = array.astype(array.dtype.newbyteorder("<")).tobytes()
        if array.dtype.name not in _DTYPES:
            raise ValueError(f"{name} has the dtype {array.dtype}, which safetensors lacks here")
        header[name] = {
            "dtype": _DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [place, place + len(data)],
        }
        parts.append(data)
        place += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *parts])
