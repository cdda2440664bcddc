"""A graph of MXNet as a PyTorch program, with Gluon's names and ``forward`` as one writes it.

Neither MXNet nor PyTorch is needed: a graph and arrays of :mod:`mpgluon_tools.leaving.mxnet_files`
become the text of a module and a file of safetensors.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from mpgluon_tools.leaving.mxnet_files import Graph, Node
from mpgluon_tools.leaving.refusal import UnsupportedError
from mpgluon_tools.leaving.torch_arrays import ARRAYS
from mpgluon_tools.leaving.torch_call import Call, Layer
from mpgluon_tools.leaving.torch_helpers import HELPERS, LOAD
from mpgluon_tools.leaving.torch_layers import LAYERS
from mpgluon_tools.leaving.torch_names import VARIABLES, Names, common_prefix
from mpgluon_tools.leaving.torch_numpy import NUMPY, is_question

import numpy as np

__all__ = ["MOVES", "TorchProgram", "UnsupportedError", "torch_program"]

Entry = tuple[int, int]

_TRANSLATIONS = {**ARRAYS, **NUMPY, **LAYERS}

_FILLED = {"_zeros": "zeros", "_ones": "ones", "_arange": "arange",
           "_npi_zeros": "zeros", "_npi_ones": "ones", "_npi_arange": "arange"}  # fmt: skip
_LONGEST = 48  # of an expression that becomes an operand of another
_SAME_RANK = frozenset({"Activation", "BatchNorm", "Dropout", "LeakyReLU", "Pad", "clip", "relu",
                        "elemwise_add", "broadcast_add", "broadcast_mul", "Concat"})  # fmt: skip
_TWICE = ".transpose(0, 1)" * 2  # between two recurrent layers
MOVES = re.compile(
    "(_npx?_)?([Rr]eshape|transpose|squeeze|moveaxis|roll)|(_npi_)?([Cc]oncat|concatenate|stack)|"
    "slice.*|SliceChannel|split|_split_v2|SwapAxis|expand_dims|tile|repeat|reverse|_npi_flip|"
    "Flatten|_copy|identity|BlockGrad|broadcast_(to|axis|like)|_npi_broadcast_to"
)
"""Operators whose results are the numbers of their operands, in other places."""
_KEEPS_INTEGERS = re.compile(  # operators whose results are integers if all operands are
    f"{MOVES.pattern}|(elemwise|broadcast)_.*|_(?!npi_r?true_divide).*_scalar|"
    "_npi_(add|subtract|multiply|absolute|sign)|(_np_)?(sum|max|min|prod)|_np_cumsum|clip|abs|"
    "sign|square|negative|relu|floor|ceil|trunc|rint|(ones|zeros)_like|add_n"
)
_OPERAND = re.compile("\0(\\d+)\0")


@dataclass(frozen=True)
class TorchProgram:
    """A network as PyTorch's text and values.

    Attributes
    ----------
    text : str
        A Python module with the class ``Network`` and the function ``load``.
    state : dict of str to ndarray
        The state dict.
    names : dict of str to str
        The names of parameters and statistics in the state dict, by the graph's.
    """

    text: str
    state: Mapping[str, Any]
    names: Mapping[str, str]


def torch_program(
    graph: Graph,
    values: Mapping[str, Any],
    inputs: Sequence[str],
    *,
    title: str,
    frozen: Collection[str] = (),
    shapes: Optional[Mapping[Entry, tuple[int, ...]]] = None,
    sizes: Optional[Mapping[Entry, tuple[str, ...]]] = None,
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
    sizes : dict from (node, result) to tuple of str, optional
        The same in words, for comments: ``"N"``, ``"2N"`` where a size follows the first one of
        the inputs.

    Raises
    ------
    ValueError
        If a variable is neither an input nor has a value; if an operator has no equal, an
        :class:`UnsupportedError` that names all of them.
    """
    writer = _Writer(graph, values, inputs, frozen, shapes or {}, sizes or {})
    lines = list(writer.forward())
    if writer.problems:
        raise UnsupportedError(
            f"PyTorch, or this translation, has no equal for {'; '.join(writer.problems)}"
        )
    arguments = ", ".join(["self", *writer.arguments])
    parts = [
        '"""' + title.replace("\\", r"\\").replace('"', r"\"") + '"""',
        "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n",
        *(
            text
            for name, text in HELPERS.items()
            if any(f"{name}(" in one for one in [*writer.definitions, *lines])
        ),
        "class Network(nn.Module):\n    def __init__(self):\n        super().__init__()",
        "\n".join(f"        {one}" for one in writer.definitions),
        f"\n    def forward({arguments}):",
        "\n".join(f"        {one}" for one in lines),
        LOAD,
    ]
    text = "\n".join(part for part in parts if part)
    return TorchProgram(text, writer.state, writer.names)


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
        sizes: Mapping[Entry, tuple[str, ...]],
    ) -> None:  # fmt: skip
        self.problems: list[str] = []
        self.definitions: list[str] = []
        self.state: dict[str, Any] = {}
        self._graph, self._values, self._frozen = graph, values, frozen
        self._shapes, self._sizes = shapes, sizes
        self._uses = Counter(entry for node in graph.nodes for entry in node.inputs)
        self._uses.update(graph.heads)
        self._packed, self._silent = _packed_parameters(graph, values)
        self._names = Names(common_prefix([one.name for one in graph.nodes if one.op != "null"]))
        self._layers: dict[tuple[Any, ...], str] = {}
        self._defined: dict[str, str] = {}  # where the module has each variable
        self._results: dict[Entry, _Result] = {}
        self._integers: set[int] = set()
        self._references: Counter[str] = Counter()
        self.arguments = ["x"] if len(inputs) == 1 else [self._names.free(name) for name in inputs]
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
        filled = {number for number, node in enumerate(self._graph.nodes) if node.op in _FILLED}
        for number in sorted(filled - self._silent):
            yield from self._fill(number, self._graph.nodes[number])
        for number, node in enumerate(self._graph.nodes):
            if node.op != "null" and number not in self._silent | filled:
                yield from self._translate(number, node)
        if self.problems or any(self._returns(head) for head in self._graph.heads):
            return
        yield f"return {', '.join(self._operand(head, 1).text for head in self._graph.heads)}"

    @property
    def names(self) -> dict[str, str]:
        """The names of parameters in the state dict."""
        return {name: place.removeprefix("self.") for name, place in self._defined.items()}

    def _returns(self, entry: Entry) -> bool:
        """Return whether a result is the network's, so that its statement returns it."""
        is_last = entry[0] == len(self._graph.nodes) - 1
        is_result = self._graph.heads == (entry,) and self._uses[entry] == 1
        return is_last and is_result and not self._is_variable(entry[0])

    def _fill(self, number: int, node: Node) -> Iterator[str]:
        """Write an array of zeros, ones or steps first, where the input still has its name."""
        x, entry = self.arguments[0], (number, 0)
        if _FILLED[node.op] == "arange":
            ends = [node.value("start", 0), node.value("stop")]
            ends = ends if ends[1] is not None else [0, ends[0]]
            texts = [str(float(one)) for one in (*ends, node.value("step", 1))]
            known = node.value("repeat", 1) == 1
        else:
            sizes = self._sizes.get(entry, tuple(map(str, node.value("shape"))))
            known = all(re.fullmatch(r"[1-9]\d*|\d*N", size) for size in sizes)
            texts = [size.replace("N", f" * {x}.shape[0]").removeprefix(" * ") for size in sizes]
        if not known or node.value("dtype", "float32") not in (None, "None", "float32"):
            self.problems.append(f"{node.name} ({node.op}: its shape is not known, or integers)")
        text = f"torch.{_FILLED[node.op]}({', '.join(texts)}, device={x}.device)"
        yield from self._assign([entry], _Result(text))

    def _is_variable(self, number: int) -> bool:
        return self._graph.nodes[number].op == "null"

    def _translate(self, number: int, node: Node) -> Iterator[str]:
        used = [entry for entry in self._uses if entry[0] == number]
        if self._is_integer(node):
            self._integers.add(number)
        try:
            call, text = self._called(node)
            if any(place >= len(call.results) for _, place in used):
                raise UnsupportedError("its second result is used")
        except UnsupportedError as why:
            self.problems.append(f"{node.name} ({node.op}: {why})")
            self._results.update((entry, _Result("x")) for entry in used)
            return
        if call.layer is not None:
            text = text.replace("self.LAYER", f"self.{self._layer(node, call.layer)}")
        operands = [
            self._operand(entry, text.count(f"\0{i}\0")) for i, entry in enumerate(node.inputs)
        ]
        for place, (entry, operand) in enumerate(zip(node.inputs, operands)):
            if text.count(f"\0{place}\0") > 1 and not operand.text.isidentifier():
                yield from self._assign([entry], operand)
                operands[place] = self._operand(entry, 1)
        result = _Result(_filled(text, [one.text for one in operands]).replace(_TWICE, ""))
        result.holds = [name for one in operands for name in one.holds]
        if len(used) > 1:
            entries = [(number, place) for place in range(len(call.results))]
            if call.unpacked:
                yield from self._assign(entries, result, call.unpacked)
            else:
                yield from self._assign_whole(entries, result, call.results)
            return
        entry = used[0] if used else (number, 0)
        result.text += call.results[entry[1]]
        if self._returns(entry):
            yield f"return {result.text}{self._comment(entry)}"
        elif self._uses[entry] > 1 or len(result.text) > _LONGEST or entry in self._graph.heads:
            yield from self._assign([entry], result)
        else:
            self._results[entry] = result

    def _is_integer(self, node: Node) -> bool:
        """Return whether the results are integers, which MXNet divides without a remainder."""
        if node.op == "Cast":
            return "int" in node.value("dtype")
        keeps = _KEEPS_INTEGERS.fullmatch(node.op) is not None and self._has_integers(node)
        return keeps or node.op == "shape_array" or is_question(node.op)

    def _has_integers(self, node: Node) -> bool:
        return bool(node.inputs) and all(source in self._integers for source, _ in node.inputs)

    def _kind(self, number: int) -> str:
        """Return the operator that computes a node's numbers."""
        node = self._graph.nodes[number]
        is_moved = MOVES.fullmatch(node.op) and len(node.inputs) == 1
        return self._kind(node.inputs[0][0]) if is_moved else node.op

    def _called(self, node: Node) -> tuple[Call, str]:
        if node.op not in _TRANSLATIONS:
            raise UnsupportedError("not translated")
        call = Call(
            node,
            [f"\0{place}\0" for place in range(len(node.inputs))],
            [self._values_of(source) for source, _ in node.inputs],
            [self._shapes.get(entry) for entry in node.inputs],
            [self._kind(source) for source, _ in node.inputs],
            self._rank(node.inputs[0]) if node.inputs else None,
            self._has_integers(node),
        )
        return call, _TRANSLATIONS[node.op](call)

    def _values_of(self, number: int) -> Any:
        """Return the value of a parameter, or a list of those that are packed in one."""
        if number in self._packed:
            return [self._values[name] for name in self._packed[number]]
        node = self._graph.nodes[number]
        return self._values.get(node.name) if node.op == "null" else None

    def _operand(self, entry: Entry, times: int) -> _Result:
        """Return an operand; one that does not appear belongs to a layer."""
        node = self._graph.nodes[entry[0]]
        if entry[0] in self._silent:
            return _Result("")
        if node.op == "null" and node.name in self._values and entry not in self._results:
            return _Result(self._parameter(node.name) if times else "")
        return self._results[entry]

    def _assign(
        self, entries: Sequence[Entry], result: _Result, unpacked: str = "{}"
    ) -> Iterator[str]:
        """Yield the statement that gives results names; those that nobody uses get none."""
        for name in result.holds:
            self._references[name] -= 1
        names = []
        for entry in entries:
            free = (name for name in self._variable_names() if self._references[name] <= 0)
            names.append(next(free) if self._uses[entry] else "_")
            if self._uses[entry]:
                self._set_variable(entry, names[-1])
        comment = self._comment(entries[0]) if len(entries) == 1 else ""
        yield f"{unpacked.format(*names)} = {result.text}{comment}"

    def _assign_whole(
        self, entries: Sequence[Entry], result: _Result, endings: Sequence[str]
    ) -> Iterator[str]:
        """Yield the statement that gives all results one name, with an ending for each."""
        whole = (entries[0][0], -1)
        self._uses[whole] = sum(self._uses[entry] for entry in entries)
        yield from self._assign([whole], result)
        name = self._results[whole].text
        for entry, ending in zip(entries, endings):
            self._results[entry] = _Result(f"{name}{ending}", [name])

    def _comment(self, entry: Entry) -> str:
        return f"  # ({', '.join(self._sizes[entry])})" if entry in self._sizes else ""

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
        yield from (name for name in self.arguments if name in VARIABLES)
        yield from (name for name in VARIABLES if name not in self.arguments)
        yield from (f"x{number}" for number in range(2, 10**6))

    def _set_variable(self, entry: Entry, name: str) -> None:
        self._references[name] = self._uses[entry]
        self._results[entry] = _Result(name, [name])

    def _layer(self, node: Node, layer: Layer) -> str:
        """Return the name of a layer; of one that is called twice the first one's."""
        parameters = tuple(
            name
            for source, _ in node.inputs[1:]
            for name in self._packed.get(source, [self._graph.nodes[source].name])
            if name in self._values
        )
        key = (layer.definition, parameters)
        if key not in self._layers:
            name = self._names.free(node.name)
            self._layers[key] = name
            self.definitions.append(f"self.{name} = {layer.definition}")
            if node.op == "BatchNorm" and node.value("fix_gamma", True):
                self.definitions.append(f"self.{name}.weight.requires_grad = False")
                parameters = parameters[1:]  # its scale was replaced
            self.state |= {f"{name}.{part}": value for part, value in layer.state.items()}
            for part, variable in self._sources(layer, parameters).items():
                self._define(variable, f"self.{name}.{part}")
        return self._layers[key]

    def _sources(self, layer: Layer, parameters: Sequence[str]) -> dict[str, str]:
        """Return the variable that each part of a layer comes from; changed ones by their order."""
        state = layer.state
        values = {id(self._values[name]): name for name in parameters}
        found = {part: values.pop(id(one)) for part, one in state.items() if id(one) in values}
        changed = (part for part, one in state.items() if part not in found and one.ndim)
        return {**found, **dict(zip(changed, values.values()))}

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
            name, value = self._names.free(variable), np.asarray(self._values[variable])
            self.definitions.append(f"self.{name} = nn.Parameter(torch.zeros({value.shape}))")
            self.state[name] = value
            self._define(variable, f"self.{name}")
        return self._defined[variable]


def _packed_parameters(
    graph: Graph, values: Mapping[str, Any]
) -> tuple[dict[int, list[str]], set[int]]:
    """Return the parameters of recurrent layers, and the nodes that PyTorch does not need.

    The parameters by the number of the node that joins them; the others are its operands, and
    first states of zeros, which are PyTorch's default.
    """
    users: dict[int, set[str]] = {}
    for node in graph.nodes:
        for source, _ in node.inputs:
            users.setdefault(source, set()).add(node.op)
    packed: dict[int, list[str]] = {}
    silent: set[int] = set()
    for number, node in enumerate(graph.nodes):
        if node.op == "_zeros" and users.get(number) == {"RNN"}:
            silent.add(number)
        if node.op != "_rnn_param_concat":
            continue
        flat = [source for source, _ in node.inputs if graph.nodes[source].op != "null"]
        sources = [graph.nodes[source].inputs[0][0] if source in flat else source
                   for source, _ in node.inputs]  # fmt: skip
        names = [graph.nodes[source].name for source in sources]
        if all(name in values for name in names):
            packed[number] = names
            silent |= {number, *(one for one in flat if users[one] == {node.op})}
    return packed, silent


def _filled(text: str, operands: Sequence[str]) -> str:
    """Put operands into an expression, in parentheses where they need them."""

    def put(found: re.Match[str]) -> str:
        operand = operands[int(found[1])]
        before, after = text[: found.start()][-1:], text[found.end() :][:1]
        is_argument = before in ("", "(", "[", " ") and after in ("", ")", ",", "]")
        sign = text[: found.start()].rstrip()[-1:] in tuple("+-*/@%<>=")
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
