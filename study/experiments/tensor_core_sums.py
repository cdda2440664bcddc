"""Sums of products as the Tensor Cores of three generations make them, in a CIFAR ResNet.

The base is float16 with FP32 sums. All rows but float32 have FP32 parameters, float16 products and
a dynamic loss scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mpgluon.formats.tensor_core import ACCUMULATIONS

from study.experiments.parity import Network
from study.experiments.variants import Variants, Ways, group_of

__all__ = ["GROUP"]


@dataclass(frozen=True)
class _Sums(Variants):
    group, base = "tensor_core_sums", "float16"
    networks = (Network("cifar_resnet20_v1", 32, 0.002),)
    ways: ClassVar[Ways] = {
        "float32": {"dtype": "float32"},
        "float16": {"dtype": "mixed_float16"},
        **{
            name: {"dtype": f"params=float32,compute=float16,accumulation={name}"}
            for name in ACCUMULATIONS
        },
    }


GROUP = group_of(_Sums, "tensor-core-sums")
