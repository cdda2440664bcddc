"""A ResNet-20 that PyTorch trains on CIFAR-10, on a GPU's Tensor Cores in FP32, FP16, BF16 and FP8.

The recipe is as in `study.experiments.cifar10`. This module needs PyTorch, and neither mpgluon
nor MXNet; ``study/scripts/record_tensor_core_training.py`` is its door.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch  # type: ignore[import-not-found,unused-ignore]
from torch.nn import functional  # type: ignore[import-not-found,unused-ignore]

__all__ = ["ROWS", "Convolution8", "Network", "Run", "read"]

ROWS = {
    "float32": None,
    "float16": None,
    "bfloat16": None,
    "e4m3-float32-sums": "float32",
    "e4m3": "default",
    "e4m3-fast": "fast",
}
"""Rows, and how the products of FP8 are summed there: "float32", or on Tensor Cores, with a sum in
FP32 after some terms ("default"), or without ("fast")."""
BATCH, EPOCHS, WARMUP_EPOCHS, PEAK, WEIGHT_DECAY, MOMENTUM = 64, 30, 2, 0.1, 5e-4, 0.9
_SIDE, _SHIFT = 32, 4
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_VALUES, _GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2


def read(folder: Path, part: str, device: Any) -> tuple[Any, Any]:
    """Return the images of "data" or "test", (N, 32, 32, 3) of uint8, and their labels.

    Raises
    ------
    OSError, ValueError
        If the folder is not CIFAR-10's binary archive, unpacked.
    """
    files = sorted(folder.glob(f"{part}_batch*.bin"))
    if len(files) != (5 if part == "data" else 1):
        raise ValueError(f"it has {len(files)} files {part}_batch*.bin")
    records = np.concatenate([np.fromfile(path, np.uint8) for path in files])
    records = records.reshape(-1, 1 + 3 * _SIDE**2)
    images = records[:, 1:].reshape(-1, 3, _SIDE, _SIDE).transpose(0, 2, 3, 1)
    return (
        torch.from_numpy(images.copy()).to(device),
        torch.from_numpy(records[:, 0].astype(np.int64)).to(device),
    )


class Run:
    """A network that is trained, step by step; on a GPU as a CUDA graph on a stream of its own."""

    def __init__(self, row: str, seed: int, train: tuple[Any, Any]) -> None:
        self.row, self.seed = row, seed
        for backend in (torch.backends.cuda.matmul, torch.backends.cudnn):
            backend.allow_tf32 = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        images, self.labels = train
        device = images.device
        self.epoch_steps = len(images) // BATCH
        self.steps = EPOCHS * self.epoch_steps
        mean_colour = [round(255 * level) for level in _MEAN]
        self.images = torch.tensor(mean_colour, dtype=torch.uint8, device=device).repeat(
            (len(images), *[_SIDE + 2 * _SHIFT] * 2, 1)
        )
        self.images[:, _SHIFT:-_SHIFT, _SHIFT:-_SHIFT] = images
        torch.manual_seed(seed)
        self.net = Network(row).to(device).to(memory_format=torch.channels_last)
        self._draw(len(images), device)
        # As in Gluon, gradients are of the sum over the batch; FP16 has a dynamic scale besides.
        self.scale = torch.tensor(2.0**16 if row == "float16" else 1.0, device=device)
        self.growth = torch.zeros((), dtype=torch.int32, device=device)
        self.skipped = torch.zeros((), device=device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.parameters = list(self.net.parameters())
        self.momenta = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.step = self._step if device.type != "cuda" else self._captured()

    def _draw(self, images: int, device: Any) -> None:
        """Draw all batches, shifts and reflections, and compute the learning rates."""
        rng = np.random.default_rng(self.seed)
        steps = self.steps
        order = [rng.permutation(images)[: self.epoch_steps * BATCH] for _ in range(EPOCHS)]
        shifts = rng.integers(0, 2 * _SHIFT, (2, steps, BATCH, 1), endpoint=True)
        row, column = np.arange(_SIDE), np.arange(_SIDE)
        columns = np.where(rng.random((steps, BATCH, 1)) < 0.5, column, column[::-1])
        warmup = WARMUP_EPOCHS * self.epoch_steps
        done = np.arange(1, steps + 1)
        share = np.clip((done - warmup) / (steps - warmup), 0, 1)
        rates = np.where(done < warmup, done / warmup, (1 + np.cos(math.pi * share)) / 2)
        self.chosen = torch.from_numpy(np.concatenate(order).reshape(steps, BATCH)).to(device)
        self.rows = torch.from_numpy((shifts[0] + row).astype(np.int16)).to(device)
        self.columns = torch.from_numpy((shifts[1] + columns).astype(np.int16)).to(device)
        self.rates = torch.from_numpy((PEAK * rates).astype(np.float32)).to(device)
        self.losses = torch.zeros(steps, device=device)

    def _captured(self) -> Any:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        kept = [*self.net.state_dict().values(), *self.momenta, self.scale, self.growth]
        kept += [self.skipped, self.counter]
        copies = [one.clone() for one in kept]
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._step()
        with torch.no_grad():
            for one, copy in zip(kept, copies):
                one.copy_(copy)
        torch.cuda.synchronize()

        def replay() -> None:
            with torch.cuda.stream(stream):
                graph.replay()

        return replay

    def _step(self) -> None:
        chosen, rows, columns, rate = (
            table.index_select(0, self.counter)[0]
            for table in (self.chosen, self.rows, self.columns, self.rates)
        )
        images = self.images[
            chosen[:, None, None], rows[:, :, None].long(), columns[:, None, :].long()
        ]
        losses = functional.cross_entropy(self.net(images), self.labels[chosen], reduction="none")
        gradients = torch.autograd.grad(losses.sum() * self.scale, self.parameters)
        with torch.no_grad():
            self.losses.index_copy_(0, self.counter, losses.mean()[None])
            found = torch.zeros((), device=self.scale.device)
            torch._amp_foreach_non_finite_check_and_unscale_(
                gradients, found, 1 / (self.scale * BATCH)
            )
            torch._fused_sgd_(
                *(self.parameters, gradients, self.momenta),
                weight_decay=WEIGHT_DECAY,
                momentum=MOMENTUM,
                lr=rate,
                dampening=0.0,
                nesterov=True,
                maximize=False,
                is_first_step=False,
                found_inf=found,
            )
            if self.row == "float16":
                torch._amp_update_scale_(self.scale, self.growth, found, 2.0, 0.5, 2000)
            self.skipped += found
            self.counter += 1

    def record(self, steps: int, test: tuple[Any, Any]) -> dict[str, Any]:
        """Return the row, the seed and figures of the run, with the accuracy of the test images."""
        images, labels = test
        self.net.eval()
        with torch.no_grad():
            right = sum(
                int((self.net(some).argmax(1) == their).sum())
                for some, their in zip(images.split(1000), labels.split(1000))
            )
        epochs = self.losses[:steps].split(self.epoch_steps)
        return {
            "row": self.row,
            "seed": self.seed,
            "correct_test_images": right,
            "skipped_steps": int(self.skipped),
            "loss_scale": float(self.scale),
            "train_losses": [round(float(losses.mean()), 4) for losses in epochs],
        }


class Network(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """ResNet-20 of He et al. 2016 as gluoncv has it, with convolutions where shapes change."""

    def __init__(self, row: str) -> None:
        super().__init__()
        self.sums = ROWS[row]
        self.dtype = torch.bfloat16 if self.sums else getattr(torch, row)
        self.first = _Layer(3, 16, 3, 1)
        channels = [16, *(width for width in (16, 32, 64) for _ in range(3))]
        self.blocks = torch.nn.ModuleList()
        for inputs, outputs in zip(channels, channels[1:]):
            stride = 1 if inputs == outputs else 2
            layers = [_Layer(inputs, outputs, 3, stride), _Layer(outputs, outputs, 3, 1)]
            if stride == 2:
                layers.append(_Layer(inputs, outputs, 1, stride))
            self.blocks.append(torch.nn.ModuleList(layers))
        self.head = torch.nn.Linear(64, 10)
        for module in self.modules():
            if isinstance(module, (torch.nn.Conv2d, torch.nn.Linear)):
                torch.nn.init.kaiming_normal_(module.weight)
        torch.nn.init.zeros_(self.head.bias)
        mean, std = (torch.tensor(values) * 255 for values in (_MEAN, _STD))
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, images: Any) -> Any:
        """Return FP32 logits of images (N, 32, 32, 3) of uint8."""
        x = ((images - self.mean) / self.std).to(self.dtype).permute(0, 3, 1, 2)
        x = functional.relu(self.first(x, None))
        for one, other, *shortcut in self.blocks:
            residual = shortcut[0](x, self.sums) if shortcut else x
            x = other(functional.relu(one(x, self.sums)), self.sums)
            x = functional.relu(residual + x)
        weight, bias = (values.to(self.dtype) for values in (self.head.weight, self.head.bias))
        return functional.linear(x.mean((2, 3)), weight, bias).float()


class _Layer(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """A convolution, and its batch normalization in FP32."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.product = torch.nn.Conv2d(
            inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False
        )
        self.norm = torch.nn.BatchNorm2d(outputs)

    def forward(self, x: Any, sums: Optional[str]) -> Any:
        weight, stride = self.product.weight, self.product.stride[0]
        if sums is None:
            x = functional.conv2d(x, weight.to(x.dtype), None, stride, self.product.padding)
        else:
            x = Convolution8.apply(x, weight, stride, sums)
        return self.norm(x)


class Convolution8(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    """A convolution of a square kernel whose three products have operands of 8 bits.

    Each is a product of matrices, with a row for each place of the kernel's window, so that its
    sums are as long as a convolution's.
    """

    @staticmethod
    def forward(context: Any, x: Any, weight: Any, stride: int, sums: str) -> Any:
        """Return the convolution of (N, C, H, W) in BF16; ``sums`` is a value of `ROWS`."""
        data, data_scale = _rounded(x, _VALUES)
        weights, weight_scale = _rounded(weight, _VALUES)
        rows = _windows(data, weight.shape[2], stride)
        context.save_for_backward(rows, data_scale, weights, weight_scale)
        context.stride, context.sums, context.shape = stride, sums, x.shape
        matrix = _reordered(weights, (0, 2, 3, 1)).flatten(1)
        result = _product(rows, matrix, data_scale, weight_scale, sums)
        size = [length // stride for length in x.shape[2:]]
        return result.unflatten(0, (len(x), *size)).permute(0, 3, 1, 2)

    @staticmethod
    def backward(context: Any, gradient: Any) -> tuple[Any, Any, None, None]:
        """Return the gradients of the data, in BF16, and of the weight, in FP32."""
        rows, data_scale, weights, weight_scale = context.saved_tensors
        stride, sums = context.stride, context.sums
        filters, channels, kernel, _ = weights.shape
        rounded_gradient, scale = _rounded(gradient, _GRADIENTS)
        by_place = _reordered(rounded_gradient, (0, 2, 3, 1)).flatten(0, 2)
        of_weights = _product(
            _reordered(by_place, (1, 0)), _reordered(rows, (1, 0)), scale, data_scale, sums,
            torch.float32,
        ).unflatten(1, (kernel, kernel, channels)).permute(0, 3, 1, 2)  # fmt: skip
        if stride > 1:  # zeros between, where the kernel was not put
            batch, _, height, width = context.shape
            spread = torch.zeros(
                (batch, filters, height, width), dtype=torch.uint8, device=gradient.device
            )
            spread[:, :, ::stride, ::stride] = rounded_gradient.view(torch.uint8)
            rounded_gradient = spread.view(_GRADIENTS)
        turned = weights.view(torch.uint8).flip(2, 3).view(_VALUES)
        of_data = _product(
            _windows(rounded_gradient, kernel, 1), _reordered(turned, (1, 2, 3, 0)).flatten(1),
            scale, weight_scale, sums,
        ).unflatten(0, (len(gradient), *context.shape[2:])).permute(0, 3, 1, 2)  # fmt: skip
        return of_data, of_weights, None, None


def _rounded(values: Any, dtype: Any) -> tuple[Any, Any]:
    """Return values times the largest power of two with which they fit, and its inverse.

    The values are rounded to ``dtype``, ties to even.
    """
    most, highest = math.frexp(torch.finfo(dtype).max)
    fraction, exponent = torch.frexp(torch.linalg.vector_norm(values, math.inf).float())
    power = exponent - highest + (fraction > most)
    inverse = torch.ldexp(torch.ones_like(fraction), power)
    return (values.float() / inverse).to(dtype), inverse


def _windows(values: Any, kernel: int, stride: int) -> Any:
    """Return a row for each place of a square kernel: (batch, channels, …) to (places, window)."""
    values, dtype = values.view(torch.uint8).permute(0, 2, 3, 1), values.dtype
    side = kernel // 2
    values = functional.pad(values, (0, 0, side, side, side, side))
    windows = values.unfold(1, kernel, stride).unfold(2, kernel, stride)
    return windows.permute(0, 1, 2, 4, 5, 3).flatten(0, 2).flatten(1).contiguous().view(dtype)


def _reordered(values: Any, axes: Sequence[int]) -> Any:
    return values.view(torch.uint8).permute(*axes).contiguous().view(values.dtype)


def _product(
    one: Any, other: Any, scale: Any, other_scale: Any, sums: str, dtype: Any = torch.bfloat16
) -> Any:
    """Return the products of the rows of two matrices."""
    if sums != "float32":
        return torch._scaled_mm(
            one, other.T, scale, other_scale, out_dtype=dtype, use_fast_accum=sums == "fast"
        )
    one, other = one.to(torch.bfloat16), other.to(torch.bfloat16)  # exact
    if one.device.type == "cuda":
        product = torch.mm(one, other.T, out_dtype=torch.float32)
    else:
        product = torch.mm(one.float(), other.float().T)
    return (product * (scale * other_scale)).to(dtype)
