"""Record how fast a GPU's Tensor Cores are, for lesson 07: layers, and a training step.

    python study/scripts/record_tensor_core_times.py --output results

It needs PyTorch, torchvision and an NVIDIA GPU that PyTorch supports, and neither mpgluon nor
MXNet. FP32 is computed without Tensor Cores unless a row is called tf32.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

# (batch, inputs, units) of dense layers: a side that fits badly or well, a vocabulary of 33,708
# words, and padded; small batches; large and small.
DENSE = [
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    *((4096 + more, 4096, 4096) for more in (1, 2, 4, 8)),
    *((4096, 4096 + more, 4096) for more in (1, 2, 4, 8)),
    *((4096, 4096, 4096 + more) for more in (1, 2, 4, 8)),
    *((5120, 1024, units) for units in (33708, 33712)),
    *((batch, 4096, 4096) for batch in (1, 8, 32, 128, 512)),
    (256, 256, 256),
]
# (batch, channels, filters, size of the image, of the kernel, stride) of convolutions.
CONVOLUTIONS = [
    *((64, channels, channels, 56, 3, 1) for channels in (60, 63, 64, 65, 72)),
    *((64, channels, 64, 224, 7, 2) for channels in (3, 4, 8)),
]
FORMATS = ("float32", "tf32", "float16", "bfloat16")
BATCHES = (32, 128, 256)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Parse the command line, measure, and write one file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", metavar="FOLDER", type=Path, default=Path("."))
    options = parser.parse_args(arguments)
    try:
        import torch  # type: ignore[import-not-found,unused-ignore]
        import torchvision  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        print(f"error: this needs PyTorch and torchvision ({error})", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("error: PyTorch sees no NVIDIA GPU", file=sys.stderr)
        return 2
    torch.backends.cudnn.benchmark = True
    name = torch.cuda.get_device_name()
    recorded = {
        "device": name,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "dense": [_dense(torch, dtype, shape) for shape in DENSE for dtype in FORMATS],
        "convolutions": [
            _convolution(torch, dtype, layout, shape)
            for shape in CONVOLUTIONS
            for layout in ("NCHW", "NHWC")
            for dtype in FORMATS
        ],
        "training": [
            _training(torch, torchvision.models.resnet50, dtype, batch)
            for batch in BATCHES
            for dtype in FORMATS
        ],
    }
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"gpu-{re.sub('[^a-z0-9]+', '-', name.lower())}-pytorch.json"
    path.write_text(json.dumps(recorded, indent=1) + "\n")
    print(f"{path}: {name}")
    return 0


def _median_seconds(torch: Any, work: Callable[[], object], seconds: float) -> float:
    """Return the median of five times, each of as many calls as take so many seconds."""

    def timed(calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000 / calls

    for _ in range(3):
        work()
    calls = max(1, round(seconds / timed(3)))
    return statistics.median(timed(calls) for _ in range(5))


def _settings(torch: Any, dtype: str) -> Any:
    """Switch TF32 on or off for FP32 products, and return the type of their operands."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    return torch.float32 if dtype == "tf32" else getattr(torch, dtype)


def _dense(torch: Any, dtype: str, shape: Sequence[int]) -> dict[str, Any]:
    """Time the three products of a dense layer."""
    kind = _settings(torch, dtype)
    batch, inputs, units = shape
    data, weight, gradient = (
        torch.randn(*sizes, device="cuda", dtype=kind)
        for sizes in ((batch, inputs), (units, inputs), (batch, units))
    )
    products = {
        "forward": lambda: data @ weight.T,
        "data": lambda: gradient @ weight,
        "weight": lambda: gradient.T @ data,
    }
    seconds = {name: _median_seconds(torch, product, 0.01) for name, product in products.items()}
    return {"dtype": dtype, "shape": list(shape), "seconds": seconds}


def _convolution(torch: Any, dtype: str, layout: str, shape: Sequence[int]) -> dict[str, Any]:
    """Time a convolution and its gradients, together."""
    kind = _settings(torch, dtype)
    batch, channels, filters, size, kernel, stride = shape
    order = torch.channels_last if layout == "NHWC" else torch.contiguous_format
    data, weight = (
        torch.randn(*sizes, device="cuda", dtype=kind)
        .contiguous(memory_format=order)
        .requires_grad_()
        for sizes in ((batch, channels, size, size), (filters, channels, kernel, kernel))
    )
    options = {"stride": stride, "padding": kernel // 2}
    gradient = torch.randn_like(torch.nn.functional.conv2d(data, weight, **options))

    def step() -> None:
        result = torch.nn.functional.conv2d(data, weight, **options)
        torch.autograd.grad(result, (data, weight), gradient)

    seconds = _median_seconds(torch, step, 0.05)
    return {"dtype": dtype, "layout": layout, "shape": list(shape), "seconds": seconds}


def _training(torch: Any, make_net: Callable[[], Any], dtype: str, batch: int) -> dict[str, Any]:
    """Time a training step of a network at 224 pixels: autocast, loss scale, SGD with momentum."""
    kind = _settings(torch, dtype)
    torch.manual_seed(0)
    net = make_net().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
    images = torch.randn(batch, 3, 224, 224, device="cuda")
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch,), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", kind, enabled=kind != torch.float32):
            loss = torch.nn.functional.cross_entropy(net(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    step()
    torch.cuda.reset_peak_memory_stats()
    seconds = _median_seconds(torch, step, 0.5)
    peak = torch.cuda.max_memory_allocated()
    return {"dtype": dtype, "batch": batch, "seconds": seconds, "bytes": peak}


if __name__ == "__main__":
    sys.exit(main())
