"""PyTorch's contestants: ResNet v1 as Gluon's model zoo has it, recurrent layers, single layers.

It imports nothing of this package, since PyTorch has an interpreter of its own. Each factory
returns a function that does its work once, and facts about it; see ``child.py``.
Each format has the layout that is faster for it on a CPU: channels-last for float32 and bfloat16
(autocast), the default for pure float16. Networks that are ``compiled`` are so in their first
run; for inference with frozen weights, into which BatchNorm is then folded.

References
----------
He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", 2015, table 1.
"""

from __future__ import annotations

from typing import Any, Callable

import torch  # type: ignore[import-not-found]
from torch import nn
from torch.nn import functional  # type: ignore[import-not-found]

__all__ = ["ResNetV1", "SequenceNetwork", "inference", "layer", "sequence_training", "training"]

Prepared = tuple[Callable[[], None], dict[str, Any]]

# Blocks in each of the four stages, and a block's output channels over its inner ones.
_STAGES = {
    "resnet18_v1": ((2, 2, 2, 2), 1),
    "resnet34_v1": ((3, 4, 6, 3), 1),
    "resnet50_v1": ((3, 4, 6, 3), 4),
    "resnet101_v1": ((3, 4, 23, 3), 4),
    "resnet152_v1": ((3, 8, 36, 3), 4),
}
_CLASSES = 1000
_TOKENS = 1000
_LEARNING_RATE = 2.0**-20  # as in workloads.py


class ResNetV1(nn.Module):
    """Gluon's ``resnet18_v1`` to ``resnet152_v1``.

    The stride is on a block's first convolution, and in the deeper networks the convolutions of
    1 x 1 inside a block have biases. Parameters and statistics come in Gluon's order.
    """

    def __init__(self, model: str) -> None:
        super().__init__()
        stages, expansion = _STAGES[model]
        parts = [
            *_convolution(3, 64, kernel=7, stride=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        channels = 64
        for number, blocks in enumerate(stages):
            width = 64 * 2**number
            for block in range(blocks):
                stride = 2 if number and not block else 1
                parts.append(_Block(channels, width, expansion, stride))
                channels = width * expansion
        parts += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, _CLASSES)]
        self.parts = nn.Sequential(*parts)

    def forward(self, images: Any) -> Any:
        """Return logits, shape (N, 1000), of images, shape (N, 3, H, W)."""
        return self.parts(images)


class _Block(nn.Module):
    def __init__(self, channels: int, width: int, expansion: int, stride: int) -> None:
        super().__init__()
        relu = nn.ReLU(inplace=True)
        out = width * expansion
        if expansion == 1:
            parts = [*_convolution(channels, width, kernel=3, stride=stride), relu]
            parts += _convolution(width, out, kernel=3)
        else:
            parts = [*_convolution(channels, width, kernel=1, stride=stride, bias=True), relu]
            parts += [*_convolution(width, width, kernel=3), relu]
            parts += _convolution(width, out, kernel=1, bias=True)
        self.body = nn.Sequential(*parts)
        straight = channels == out and stride == 1
        shortcut = [] if straight else _convolution(channels, out, kernel=1, stride=stride)
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, values: Any) -> Any:
        return functional.relu(self.body(values) + self.shortcut(values), inplace=True)


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


def _convolution(
    channels: int, out: int, *, kernel: int, stride: int = 1, bias: bool = False
) -> list[Any]:
    """Return a convolution and its BatchNorm."""
    convolution = nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=bias)
    return [convolution, nn.BatchNorm2d(out)]


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
    *, dtype: str, model: str, batch_size: int, image_size: int, compiled: bool = False
) -> Prepared:
    """Prepare a training step with SGD and momentum; as ``workloads.training``."""
    torch.manual_seed(0)
    images = torch.randn(batch_size, 3, image_size, image_size)
    net, images = _prepared(ResNetV1(model), images, dtype)
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
    model: str,
    batch_size: int,
    image_size: int,
    calls: int = 1,
    compiled: bool = False,
) -> Prepared:
    """Prepare a prediction; as ``workloads.inference``."""
    torch.manual_seed(0)
    images = torch.randn(batch_size, 3, image_size, image_size)
    net, images = _prepared(ResNetV1(model).eval(), images, dtype)
    compute = _compiled(net, frozen=True) if compiled else net

    def predict() -> None:
        # Not inference_mode, in which weights are not frozen.
        with torch.no_grad(), _autocast(dtype):
            compute(images)

    return predict, {"images": batch_size, "calls": calls, **_facts(net)}


def _compiled(net: Any, *, frozen: bool) -> Any:
    from torch._inductor import config  # type: ignore[import-not-found]

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
