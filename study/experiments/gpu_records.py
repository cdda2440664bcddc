"""Numbers and tables of docs/gpu.md from the records of GPUs in ``study/results``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

from study.experiments.cells import plus_minus
from study.experiments.experiment import Records

__all__ = ["GpuRecords"]

_SIDE = 4096  # of the dense layer
_STEPS = {
    "float32": "FP32",
    "tf32": "TF32",
    "float16": "FP16, autocast and loss scale",
    "bfloat16": "BF16, autocast",
}
_BATCH = 256
_SUMS: tuple[tuple[str, str, str, Optional[str]], ...] = (  # numbers, sums, the row, on a CPU
    ("FP32", "FP32", "float32", "float32"),
    ("FP16, dynamic loss scale", "FP16 Tensor Cores", "float16", "float16"),
    ("BF16", "BF16 Tensor Cores", "bfloat16", "bfloat16"),
    ("E4M3, gradients E5M2, a scale per tensor", "FP32", "e4m3-float32-sums", "e4m3-tensor"),
    ("", "FP8 Tensor Cores, the default", "e4m3", None),
    ("", "FP8 Tensor Cores, fast accumulation", "e4m3-fast", None),
)


@dataclass(frozen=True)
class GpuRecords:
    """The records, read when they are asked for.

    Attributes
    ----------
    folder : Path
        With the JSON files.
    records : mapping
        Records of the experiments on a CPU.
    """

    folder: Path
    records: Records

    @cached_property
    def times(self) -> Any:
        """The record of times on an H100."""
        return self._read("h100-80gb-hbm3")

    def version(self, name: str) -> str:
        """Return the first two numbers of PyTorch's version in a record."""
        return ".".join(self._read(name)["torch"].split(".")[:2])

    def _read(self, name: str) -> Any:
        return json.loads((self.folder / f"gpu-nvidia-{name}-pytorch.json").read_text())

    def steps_table(self) -> list[list[str]]:
        """Return the cells of the table of training steps of ResNet-50."""
        return [
            [
                words,
                f"{_BATCH / step['seconds']:.0f}",
                f"{self.faster(dtype, _BATCH):.1f}",
                f"{step['bytes'] / 1e9:.1f}",
            ]
            for dtype, words in _STEPS.items()
            for step in [self._step(dtype, _BATCH)]
        ]

    def _step(self, dtype: str, batch: int) -> Any:
        steps = self.times["training"]
        return next(one for one in steps if (one["dtype"], one["batch"]) == (dtype, batch))

    def faster(self, dtype: str, batch: int) -> float:
        """Return how many times as fast as in FP32 a training step of ResNet-50 is."""
        base, step = self._step("float32", batch), self._step(dtype, batch)
        return float(base["seconds"] / step["seconds"])

    def dense(self, dtype: str, *shape: int) -> float:
        """Return the seconds of a dense layer and its two gradients.

        ``shape`` is batch, inputs and units.
        """
        (found,) = (
            one["seconds"]
            for one in self.times["dense"]
            if (one["dtype"], *one["shape"]) == (dtype, *shape)
        )
        return float(sum(found.values()))

    def tflops(self, dtype: str) -> float:
        """Return the speed of a dense layer of 4,096 inputs and units, batch 4,096."""
        return 3 * 2 * _SIDE**3 / self.dense(dtype, *[_SIDE] * 3) / 1e12

    def sides_table(self) -> list[list[str]]:
        """Return the cells of the table of dense layers with one side a little larger."""
        fits = self.dense("float16", *[_SIDE] * 3)
        rows = []
        for more in (1, 2, 4, 8):
            sizes = [[_SIDE + more * (one == side) for one in range(3)] for side in range(3)]
            slower = [self.dense("float16", *size) / fits for size in sizes]
            rows.append([f"{_SIDE + more:,}", *(f"{one:.1f}" for one in slower)])
        return rows

    def convolution(self, layout: str, channels: int) -> float:
        """Return the seconds of a convolution in FP16 by the channels of its input."""
        (found,) = (
            one["seconds"]
            for one in self.times["convolutions"]
            if (one["dtype"], one["layout"], one["shape"][1]) == ("float16", layout, channels)
        )
        return float(found)

    def sums_table(self) -> list[list[str]]:
        """Return the cells of the table of trainings with either kind of sum."""
        runs = self._read("h200-cifar10")["runs"]
        rows = []
        for numbers, sums, row, here in _SUMS:
            correct = [one["correct_test_images"] for one in runs if one["row"] == row]
            rows.append([
                numbers, sums, ", ".join(f"{one / 100:.2f}" for one in correct), self._here(here),
            ])  # fmt: skip
        return rows

    def _here(self, row: Optional[str]) -> str:
        found = [
            100 * record.outcome.figures["test_accuracy"]
            for name, record in self.records.items()
            if row is not None and name.startswith(f"cifar10/{row}/")
        ]
        return plus_minus(found, 2) if found else ""
