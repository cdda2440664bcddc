"""BN-Inception ("Inception v2"), which neither model zoo has: GoogLeNet with BatchNorm, and more.

Figure 5 of the paper is the table of this module. The table gives 576 channels for (4c) and (4d)
and 1024 for (4e), but its own columns add up to 608, 608 and 1056; the columns are right. As in
most implementations the first convolution is an ordinary one, where the paper splits it in two, and
convolutions keep their biases.

References
----------
Ioffe, Szegedy, "Batch Normalization", 2015, appendix, figure 5.
"""

from __future__ import annotations

from typing import Any, Optional

from mxnet import gluon
from mxnet.gluon import nn
from mxnet.gluon.contrib.nn import HybridConcurrent

__all__ = ["BNInception"]

# For each module: 1x1, the two convolutions of 3x3, the three of double 3x3, pooling and its
# projection. A module without 1x1 and projection has stride 2.
_Module = tuple[Optional[int], tuple[int, int], tuple[int, int], str, Optional[int]]
_MODULES: dict[str, _Module] = {
    "3a": (64, (64, 64), (64, 96), "avg", 32),
    "3b": (64, (64, 96), (64, 96), "avg", 64),
    "3c": (None, (128, 160), (64, 96), "max", None),
    "4a": (224, (64, 96), (96, 128), "avg", 128),
    "4b": (192, (96, 128), (96, 128), "avg", 128),
    "4c": (160, (128, 160), (128, 160), "avg", 128),
    "4d": (96, (128, 192), (160, 192), "avg", 128),
    "4e": (None, (128, 192), (192, 256), "max", None),
    "5a": (352, (192, 320), (160, 224), "avg", 128),
    "5b": (352, (192, 320), (192, 224), "max", 128),
}


class BNInception(gluon.HybridBlock):
    """BN-Inception, for images of any size: its last pooling is global.

    Parameters
    ----------
    classes : int
        Length of the logits.
    """

    def __init__(self, classes: int = 1000, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.features = nn.HybridSequential(prefix="")
            self.features.add(
                _convolution(64, 7, stride=2),
                nn.MaxPool2D(3, 2, padding=1),
                _convolution(64, 1),
                _convolution(192, 3),
                nn.MaxPool2D(3, 2, padding=1),
                *(_module(*row, prefix=f"{name}_") for name, row in _MODULES.items()),
                nn.GlobalAvgPool2D(),
                nn.Flatten(),
            )
            self.output = nn.Dense(classes)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: ARG002, N803 - Gluon's signature
        """Return logits, shape (N, classes), of images, shape (N, 3, H, W)."""
        return self.output(self.features(x))


def _module(
    single: Optional[int], three: tuple[int, int], double: tuple[int, int], pool: str,
    projection: Optional[int], *, prefix: str,
) -> HybridConcurrent:  # fmt: skip
    stride = 1 if single else 2
    branches = [] if single is None else [[_convolution(single, 1)]]
    branches.append([_convolution(three[0], 1), _convolution(three[1], 3, stride=stride)])
    branches.append([
        _convolution(double[0], 1),
        _convolution(double[1], 3),
        _convolution(double[1], 3, stride=stride),
    ])  # fmt: skip
    pooling = nn.AvgPool2D if pool == "avg" else nn.MaxPool2D
    branches.append([pooling(3, stride, padding=1)])
    if projection is not None:
        branches[-1].append(_convolution(projection, 1))
    module = HybridConcurrent(axis=1, prefix=prefix)
    for branch in branches:
        module.add(nn.HybridSequential(prefix=""))
        module[-1].add(*branch)
    return module


def _convolution(channels: int, kernel: int, *, stride: int = 1) -> nn.HybridSequential:
    """Return a convolution, its BatchNorm and ReLU."""
    block = nn.HybridSequential(prefix="")
    block.add(
        nn.Conv2D(channels, kernel, stride, padding=kernel // 2),
        nn.BatchNorm(),
        nn.Activation("relu"),
    )
    return block
