"""Record the results of a GPU's Tensor Cores in FP16 and FP8, for the tests to compare with.

    python study/scripts/record_tensor_core_truth.py --output tests/cast/tensor_core_truth

It needs PyTorch, NumPy and an NVIDIA GPU that PyTorch supports, and neither mpgluon nor MXNet.
Commit the file (about 2 MB): it holds operands, results and the device's name. FP8 needs a GPU of
Ada's or a later generation, and is left out elsewhere.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np

# Multiples of 8, which Tensor Cores want. Sums of 256 terms, of 4,608 (as in a convolution of 3 x 3
# over 512 channels), and in a small convolution of 144.
_SHAPES = {
    "dense": ((32, 256), (32, 256)),
    "long": ((8, 4608), (8, 4608)),
    "convolution": ((2, 16, 8, 8), (32, 16, 3, 3)),
}


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Parse the command line, compute, and write one file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="PyTorch's name for it, default: cuda")
    parser.add_argument("--output", metavar="FOLDER", type=Path, default=Path("."))
    options = parser.parse_args(arguments)
    try:
        import torch  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        print(f"error: this needs PyTorch ({error}); pip install torch numpy", file=sys.stderr)
        return 2
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            "error: PyTorch sees no NVIDIA GPU; run this where torch.cuda.is_available() is true, "
            "or try it with --device cpu",
            file=sys.stderr,
        )
        return 2
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    # PyTorch lets cuBLAS add partial sums in float16 unless told otherwise.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.deterministic = True
    recorded = {"device": np.array(name), "torch": np.array(torch.__version__)}
    for kind, (data_shape, weight_shape) in _SHAPES.items():
        for character, (data, weight) in operands(data_shape, weight_shape).items():
            result = _compute(torch, kind, data, weight, device)
            for part, values in (("data", data), ("weight", weight), ("output", result)):
                recorded[f"{kind}/{character}/{part}"] = values
            if kind != "convolution" and device.type == "cuda":
                recorded[f"{kind}/{character}/sums"] = _sums(torch, data, weight, device)
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        recorded.update(_of_eight_bits(torch, device))
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{re.sub('[^a-z0-9]+', '_', name.lower())}.npz"
    np.savez_compressed(path, **recorded)
    print(f"{path}: {name}, {path.stat().st_size / 1000:.0f} kB")
    return 0


def operands(
    data_shape: tuple[int, ...], weight_shape: tuple[int, ...]
) -> dict[str, tuple[Any, Any]]:
    """Return float16 data and weights of four characters, the same on every machine.

    The second axis of both is summed over.
    """
    random = np.random.RandomState(0)
    data, weight = random.standard_normal(data_shape), random.standard_normal(weight_shape)
    terms = int(np.prod(weight_shape[1:]))
    half = data_shape[1] // 2
    # Each product meets its opposite, up to 2**-9 of itself.
    repeated = np.concatenate([data[:, :half]] * 2, axis=1)
    opposed = np.concatenate([weight[:, :half], -weight[:, :half] * (1 + 2.0**-9)], axis=1)
    found = {
        "random": (data, weight),
        # Nearly all data and about half of the results are below 2**-14, the least normal number.
        "subnormal": (data * 2.0**-16, weight * 6.0 / np.sqrt(terms)),
        "cancellation": (repeated, opposed),
        # The standard deviation of the results is 2**15: about one in twenty is too large.
        "overflow": (data * 2.0**7, weight * 2.0**8 / np.sqrt(terms)),
    }
    return {name: (a.astype(np.float16), b.astype(np.float16)) for name, (a, b) in found.items()}


def _compute(torch: Any, kind: str, data: Any, weight: Any, device: Any) -> Any:
    functional = torch.nn.functional
    tensors = [torch.from_numpy(values).to(device) for values in (data, weight)]
    if kind != "convolution":
        return functional.linear(*tensors).cpu().numpy()
    return functional.conv2d(*tensors, padding=1).cpu().numpy()


def _sums(torch: Any, data: Any, weight: Any, device: Any) -> Any:
    """Return the FP32 sums of float16 products, before they are rounded."""
    one, other = (torch.from_numpy(values).to(device) for values in (data, weight))
    return torch.mm(one, other.T, out_dtype=torch.float32).cpu().numpy()


def _of_eight_bits(torch: Any, device: Any) -> dict[str, Any]:
    """Return FP8 operands, in float16, and the FP32 sums of both ways in which cuBLAS adds."""
    found = {}
    formats = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    scale = torch.ones((), device=device)
    for terms in (32, 256, 4608):
        for character, pair in operands((32, terms), (32, terms)).items():
            if character in ("subnormal", "overflow"):  # of float16
                continue
            for first in formats:
                kinds = (formats[first], formats["e4m3"])
                one, other = (
                    torch.from_numpy(values).to(device).to(kind)
                    for values, kind in zip(pair, kinds)
                )
                case = f"{first}/{terms}/{character}"
                results = {"data": one.half(), "weight": other.half()}
                for part, fast in (("fast", True), ("precise", False)):
                    results[part] = torch._scaled_mm(
                        *(one, other.T, scale, scale), out_dtype=torch.float32, use_fast_accum=fast
                    )
                for part, values in results.items():
                    found[f"{case}/{part}"] = values.cpu().numpy()
    return found


if __name__ == "__main__":
    sys.exit(main())
