"""EfficientNet-Lite0, which neither model zoo has: EfficientNet-B0 with ReLU6 and no excitations.

Layers have the names of L. Melas-Kyriazi's implementation in PyTorch without its underscores, so
that files of its weights fit. Stochastic depth, with which those were trained, is left out.

References
----------
Tan, Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", 2019, table 1.
TensorFlow, "Higher accuracy on vision models with EfficientNet-Lite", 2020.
"""

from __future__ import annotations

from typing import Any, Optional

from mxnet import gluon
from mxnet.gluon import nn

__all__ = ["EfficientNetLite0"]

# The rows of the paper's table: expansion, kernel, stride of the first block, channels, blocks.
_STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
_FIRST, _LAST = 32, 1280  # channels


class EfficientNetLite0(gluon.HybridBlock):
    """EfficientNet-Lite0, for images of any size: its last pooling is global.

    Convolutions of stride 2 are padded as TensorFlow pads them where sides are even: one zero
    (for kernels of 5: two) at the right and the bottom, none (one) at the left and the top. Images
    whose sides are multiples of 32 are even at each of them.

    Parameters
    ----------
    classes : int
        Length of the logits.
    """

    def __init__(self, classes: int = 1000, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.conv_stem = _convolution(_FIRST, 3, stride=2)
            self.bn0 = _batch_norm()
            self.blocks = nn.HybridSequential(prefix="")
            inputs = _FIRST
            for expansion, kernel, first_stride, channels, count in _STAGES:
                for stride in (first_stride, *(count - 1) * (1,)):
                    self.blocks.add(_Block(inputs, channels, kernel, stride, expansion))
                    inputs = channels
            self.conv_head = _convolution(_LAST, 1)
            self.bn1 = _batch_norm()
            self.dropout = nn.Dropout(0.2)
            self.fc = nn.Dense(classes)

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803 - Gluon's signature
        """Return logits, shape (N, classes), of images, shape (N, 3, H, W)."""
        x = _relu6(F, self.bn0(self.conv_stem(_pad(F, x, 3))))
        x = _relu6(F, self.bn1(self.conv_head(self.blocks(x))))
        return self.fc(self.dropout(x.mean(axis=(2, 3))))


class _Block(gluon.HybridBlock):
    """An inverted bottleneck: a wide depthwise convolution between two of 1 x 1."""

    def __init__(
        self, inputs: int, channels: int, kernel: int, stride: int, expansion: int, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._padded = kernel if stride == 2 else None
        self._is_residual = stride == 1 and inputs == channels
        with self.name_scope():
            self.expand_conv: Optional[nn.Conv2D] = None
            if expansion > 1:
                self.expand_conv = _convolution(expansion * inputs, 1)
                self.bn0 = _batch_norm()
            self.depthwise_conv = _convolution(
                expansion * inputs, kernel, stride=stride, groups=expansion * inputs
            )
            self.bn1 = _batch_norm()
            self.project_conv = _convolution(channels, 1)
            self.bn2 = _batch_norm()

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803
        wide = x
        if self.expand_conv is not None:
            wide = _relu6(F, self.bn0(self.expand_conv(x)))
        if self._padded is not None:
            wide = _pad(F, wide, self._padded)
        narrow = self.bn2(self.project_conv(_relu6(F, self.bn1(self.depthwise_conv(wide)))))
        return x + narrow if self._is_residual else narrow


def _convolution(channels: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Conv2D:
    padding = kernel // 2 if stride == 1 else 0  # else _pad does it
    return nn.Conv2D(channels, kernel, stride, padding, groups=groups, use_bias=False)


def _batch_norm() -> nn.BatchNorm:
    return nn.BatchNorm(epsilon=1e-3)


def _relu6(F: Any, x: Any) -> Any:  # noqa: N803
    return F.clip(x, 0, 6)


def _pad(F: Any, x: Any, kernel: int) -> Any:  # noqa: N803
    """Return maps padded for stride 2: the odd one of kernel - 2 zeros is at the end."""
    before, after = (kernel - 2) // 2, (kernel - 1) // 2
    width = (0, 0, 0, 0, before, after, before, after)
    return F.pad(x, mode="constant", pad_width=width, constant_value=0)
