"""PyTorch's contestants: the networks of Gluon's model zoos, recurrent layers, single layers.

It imports nothing of this package, since PyTorch has an interpreter of its own; the interpreter
``writer`` writes a network's graph and values, of which PyTorch's network is made. Each factory
returns a function that does its work once, and facts about it; see ``child.py``.
Each format has the layout that is faster for it on a CPU: channels-last for float32 and bfloat16
(autocast), the default for pure float16. Networks that are ``compiled`` are so in their first
run; for inference with frozen weights, into which BatchNorm is then folded.
"""

from __future__ import annotations

import ast
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Callable

import torch
from torch import nn
from torch.nn import functional

__all__ = [
    "GraphNetwork",
    "SequenceNetwork",
    "inference",
    "layer",
    "sequence_training",
    "training",
]

Prepared = tuple[Callable[[], None], dict[str, Any]]

_CLASSES = 1000
_TOKENS = 1000
_LEARNING_RATE = 2.0**-20  # as in workloads.py


class GraphNetwork(nn.Module):
    """A network of Gluon's, from its graph and the values of its parameters.

    Parameters
    ----------
    folder : Path
        With ``net.json``, MXNet's text of a symbol; ``shapes.json``, the shape of each variable but
        the images; and ``values``, their FP32 numbers in this order.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        graph = json.loads((folder / "net.json").read_text())
        values = _values(folder)
        self.layers = nn.ModuleList()
        self._steps: list[tuple[int, Any, list[int]]] = []
        (self._result, *_), *more = graph["heads"]
        self._images = [node["name"] for node in graph["nodes"]].index("data")
        if more:
            raise ValueError(f"the network has {1 + len(more)} results; one was expected")
        for number, node in enumerate(graph["nodes"]):
            if node["op"] == "null":
                continue
            if node["op"] not in _OPERATORS:
                raise ValueError(f"PyTorch's network has no operator {node['op']}")
            sources = [source for source, *_ in node["inputs"]]
            names = [graph["nodes"][source]["name"] for source in sources]
            arrays = [values[name] for name in names if name in values]
            part = _OPERATORS[node["op"]](_options(node), arrays)
            if isinstance(part, nn.Module):
                self.layers.append(part)
            operands = [one for one, name in zip(sources, names) if name not in values]
            self._steps.append((number, part, operands))

    def forward(self, images: Any) -> Any:
        """Return logits, shape (N, K), of images, shape (N, 3, H, W)."""
        results = {self._images: images}
        for number, part, operands in self._steps:
            results[number] = part(*[results[one] for one in operands])
        return results[self._result]


def _values(folder: Path) -> dict[str, Any]:
    """Return the values by name; the interpreter may have no NumPy."""
    shapes = json.loads((folder / "shapes.json").read_text())
    numbers = torch.frombuffer(bytearray((folder / "values").read_bytes()), dtype=torch.float32)
    parts = numbers.split([prod(shape) for shape in shapes.values()])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts)}


def _options(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return an operator's options as Python values; text stays text."""
    options: dict[str, Any] = {}
    for name, text in node.get("attrs", {}).items():
        try:
            options[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[name] = text
    return options


def _convolution(options: Mapping[str, Any], arrays: Sequence[Any]) -> nn.Module:
    weight, *bias = arrays
    groups = options.get("num_group", 1)
    made = nn.Conv2d(
        weight.shape[1] * groups,
        weight.shape[0],
        options["kernel"],
        options.get("stride") or 1,
        options.get("pad") or 0,
        options.get("dilate") or 1,
        groups,
        bias=bool(bias),
    )
    return _with_values(made, weight, *bias)


def _dense(options: Mapping[str, Any], arrays: Sequence[Any]) -> nn.Module:
    weight, *bias = arrays
    made = _with_values(nn.Linear(weight.shape[1], weight.shape[0], bias=bool(bias)), *arrays)
    return nn.Sequential(nn.Flatten(), made) if options.get("flatten", True) else made


def _batch_norm(options: Mapping[str, Any], arrays: Sequence[Any]) -> nn.Module:
    gamma, beta, mean, variance = arrays
    made = nn.BatchNorm2d(len(gamma), options.get("eps", 1e-3), 1 - options.get("momentum", 0.9))
    if options.get("fix_gamma", True):
        gamma = torch.ones_like(gamma)
        made.weight.requires_grad_(False)
    made.running_mean.copy_(mean)
    made.running_var.copy_(variance)
    return _with_values(made, gamma, beta)


def _with_values(layer: Any, weight: Any, bias: Any = None) -> nn.Module:
    layer.weight.data.copy_(weight)
    if bias is not None:
        layer.bias.data.copy_(bias)
    return layer


def _pooling(options: Mapping[str, Any], _: Sequence[Any]) -> Any:
    kind = options.get("pool_type", "max")
    if options.get("global_pool", False):
        return {"max": nn.AdaptiveMaxPool2d, "avg": nn.AdaptiveAvgPool2d}[kind](1)
    common = {
        "stride": options.get("stride") or 1,
        "padding": options.get("pad") or 0,
        "ceil_mode": options.get("pooling_convention", "valid") == "full",
    }
    if kind == "max":
        return nn.MaxPool2d(options["kernel"], **common)
    counts_padding = options.get("count_include_pad", True) is not False
    return nn.AvgPool2d(options["kernel"], count_include_pad=counts_padding, **common)


def _activation(options: Mapping[str, Any], _: Sequence[Any]) -> Any:
    kinds = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh}
    return kinds[options["act_type"]]()


def _pad(options: Mapping[str, Any], _: Sequence[Any]) -> Any:
    top, bottom, left, right = options["pad_width"][4:]
    return lambda x: functional.pad(x, (left, right, top, bottom))


def _of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes a function of a node's operands, from function(options, *operands)."""
    return lambda options, _: lambda *operands: function(options, *operands)


_OPERATORS: dict[str, Callable[[Mapping[str, Any], Sequence[Any]], Any]] = {
    "Activation": _activation,
    "BatchNorm": _batch_norm,
    "Concat": _of(lambda options, *x: torch.cat(x, options.get("dim", 1))),
    "Convolution": _convolution,
    "Dropout": lambda options, _: nn.Dropout(options.get("p", 0.5)),
    "Flatten": lambda *_: nn.Flatten(),
    "FullyConnected": _dense,
    "Pad": _pad,
    "Pooling": _pooling,
    "_contrib_AdaptiveAvgPooling2D": lambda options, _: nn.AdaptiveAvgPool2d(
        options.get("output_size") or 1
    ),
    "_copy": _of(lambda _, x: x),
    "_div_scalar": _of(lambda options, x: x / options["scalar"]),
    "_minus_scalar": _of(lambda options, x: x - options["scalar"]),
    "_mul_scalar": _of(lambda options, x: x * options["scalar"]),
    "_plus_scalar": _of(lambda options, x: x + options["scalar"]),
    "broadcast_mul": _of(lambda _, x, y: x * y),
    "clip": _of(lambda options, x: x.clamp(options["a_min"], options["a_max"])),
    "elemwise_add": _of(lambda _, x, y: x + y),
    "elemwise_mul": _of(lambda _, x, y: x * y),
    "mean": _of(lambda options, x: x.mean(options["axis"], bool(options.get("keepdims")))),
}


class SequenceNetwork(nn.Module):
    """The recurrent networks of ``sequences.py``; ``kind`` is ``"lstm"`` or ``"gru"``."""

    def __init__(self, kind: str, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, width)
        self.recurrent = {"lstm": nn.LSTM, "gru": nn.GRU}[kind](width, width, layers)
        self.out = nn.Linear(width, _TOKENS)

    def forward(self, tokens: Any) -> Any:
        """Return logits, shape (T, N, 1000), of tokens, shape (T, N)."""
        values, _ = self.recurrent(self.embedding(tokens))
        return self.out(values)


def layer(*, dtype: str, kind: str, batch_size: int, size: int) -> Prepared:
    """Prepare one layer, forward and backward; as ``workloads.layer``."""
    torch.manual_seed(0)
    if kind == "dense":
        net, sides = nn.Linear(size, size), [size]
    else:
        net, sides = nn.Conv2d(128, 128, 3, padding=1), [128, size, size]
    net, data = _prepared(net, torch.randn(batch_size, *sides), dtype)
    data.requires_grad_()

    def run() -> None:
        data.grad = None
        net.zero_grad()
        with _autocast(dtype):
            result = net(data)
        result.backward(torch.ones_like(result))

    return run, _facts()


def training(
    *, dtype: str, writer: str, model: str, batch_size: int, image_size: int, compiled: bool = False
) -> Prepared:
    """Prepare a training step with SGD and momentum; as ``workloads.training``."""
    torch.manual_seed(0)
    images = torch.randn(batch_size, 3, image_size, image_size)
    net, images = _prepared(_network(writer, model, image_size), images, dtype)
    labels = torch.arange(batch_size) % _CLASSES
    compute = _compiled(net, frozen=False) if compiled else net
    step = _step(net, compute, dtype, images, labels)
    return step, {"images": batch_size, **_facts(net)}


def sequence_training(
    *, dtype: str, kind: str, layers: int, width: int, length: int, batch_size: int, calls: int = 1
) -> Prepared:
    """Prepare a training step of recurrent layers; as ``workloads.sequence_training``."""
    torch.manual_seed(0)
    net = SequenceNetwork(kind, layers, width)
    if dtype == "float16":
        net.half()
    tokens = torch.randint(_TOKENS, (length + 1, batch_size))
    step = _step(net, net, dtype, tokens[:-1], tokens[1:].flatten())
    return step, {"calls": calls, **_facts(net)}


def _step(net: Any, compute: Any, dtype: str, inputs: Any, labels: Any) -> Callable[[], None]:
    """Return a function that takes a step of SGD, by ``compute``, on inputs and flat labels."""
    optimizer = torch.optim.SGD(net.parameters(), lr=_LEARNING_RATE, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        with _autocast(dtype):
            logits = compute(inputs)
        functional.cross_entropy(logits.float().flatten(0, -2), labels).backward()
        optimizer.step()

    return step


def inference(
    *,
    dtype: str,
    writer: str,
    model: str,
    batch_size: int,
    image_size: int,
    calls: int = 1,
    compiled: bool = False,
) -> Prepared:
    """Prepare a prediction; as ``workloads.inference``."""
    torch.manual_seed(0)
    images = torch.randn(batch_size, 3, image_size, image_size)
    net, images = _prepared(_network(writer, model, image_size).eval(), images, dtype)
    compute = _compiled(net, frozen=True) if compiled else net

    def predict() -> None:
        # Not inference_mode, in which weights are not frozen.
        with torch.no_grad(), _autocast(dtype):
            compute(images)

    return predict, {"images": batch_size, "calls": calls, **_facts(net)}


def _network(writer: str, model: str, image_size: int) -> GraphNetwork:
    script = Path(__file__).with_name("write_network.py")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([writer, str(script), model, str(image_size), folder], check=True)
        return GraphNetwork(Path(folder))


def _compiled(net: Any, *, frozen: bool) -> Any:
    from torch._inductor import config

    config.freezing = frozen
    return torch.compile(net)


def _prepared(net: Any, data: Any, dtype: str) -> tuple[Any, Any]:
    """Return network and input in the format and in its faster layout."""
    if dtype == "float16":
        return net.half(), data.half()
    if data.dim() < 4:
        return net, data
    layout = torch.channels_last
    return net.to(memory_format=layout), data.contiguous(memory_format=layout)


def _autocast(dtype: str) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16")


def _facts(net: Any = None) -> dict[str, Any]:
    facts: dict[str, Any] = {"versions": {"torch": torch.__version__}}
    if net is not None:
        facts["parameters"] = sum(parameter.numel() for parameter in net.parameters())
    return facts
