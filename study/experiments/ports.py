"""Networks that were taken out of MXNet, and the table of their errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

__all__ = ["NETWORKS", "Ports"]

_FAMILIES: Mapping[str, tuple[tuple[int, ...], str]] = {
    "AlexNet, VGG": ((3, 64, 64), "alexnet vgg11 vgg11_bn vgg13 vgg16"),
    "ResNet v1, v2": (
        (3, 64, 64), "resnet18_v1 resnet34_v1 resnet50_v1 resnet101_v1 resnet18_v2 resnet34_v2 "
        "resnet50_v2 cifar_resnet20_v1 cifar_resnet20_v2 cifar_wideresnet16_10"),
    "ResNet v1b to v1s": (
        (3, 64, 64), "resnet18_v1b resnet50_v1b resnet50_v1c resnet50_v1d resnet50_v1e "
        "resnet50_v1s"),
    "ResNeXt, SE": (
        (3, 64, 64), "resnext50_32x4d se_resnet18_v1 se_resnet18_v2 se_resnext50_32x4d "
        "cifar_resnext29_16x64d"),
    "ResNeSt, residual attention": ((3, 64, 64), "resnest14 resnest50"),
    "DenseNet, DLA, Darknet": ((3, 64, 64), "densenet121 densenet161 dla34 darknet53"),
    "Inception, Xception": ((3, 96, 96), "googlenet inceptionv3 bn_inception xception"),
    "MobileNet v1 to v3": (
        (3, 64, 64), "mobilenet0.25 mobilenet1.0 mobilenetv2_0.25 mobilenetv2_1.0 "
        "mobilenetv3_small mobilenetv3_large"),
    "EfficientNet, SqueezeNet, ShuffleNet": (
        (3, 64, 64), "efficientnet_lite0 squeezenet1.0 squeezenet1.1 shufflenet_v1 shufflenet_v2"),
    "HRNet": ((3, 64, 64), "hrnet_w18_small_v1_c hrnet_w18_small_v1_s"),
    "Detection: SSD, YOLO v3, CenterNet": (
        (3, 128, 128), "ssd_300_mobilenet0.25_voc ssd_512_resnet18_v1_voc yolo3_mobilenet0.25_voc "
        "yolo3_darknet53_voc center_net_resnet18_v1b_voc center_net_mobilenetv3_small_duc_voc "
        "center_net_dla34_voc"),
    "Segmentation: FCN, PSP, DeepLab": (
        (3, 128, 128), "fcn_resnet50_voc psp_resnet50_ade deeplab_resnet50_ade"),
    "Pose": ((3, 128, 128), "mobile_pose_resnet18_v1b simple_pose_resnet18_v1b"),
    "Video": (
        (3, 16, 64, 64), "i3d_resnet50_v1_kinetics400 r2plus1d_resnet18_kinetics400 "
        "p3d_resnet50_kinetics400"),
}  # fmt: skip
NETWORKS: Mapping[str, tuple[int, ...]] = {
    name: shape for shape, names in _FAMILIES.values() for name in names.split()
}
"""The shape of an input, without the batch, by name of the network."""


@dataclass(frozen=True)
class Ports:
    """The record of ``study/scripts/record_ports.py``, read when it is asked for.

    Attributes
    ----------
    path : Path
    """

    path: Path

    @cached_property
    def errors(self) -> Mapping[str, Any]:
        """The errors by name of the network."""
        return dict(json.loads(self.path.read_text()))

    def table(self) -> list[list[str]]:
        """Return the cells of the table: families, their networks, and the largest errors."""
        rows = []
        for family, (_, names) in _FAMILIES.items():
            found = [self.errors[name] for name in names.split()]
            cells = [
                self._largest(found, kind) for kind in ("part", "torch", "onnxruntime", "openvino")
            ]
            rows.append([family, str(len(found)), *cells])
        return rows

    @staticmethod
    def _largest(found: list[Mapping[str, Any]], kind: str) -> str:
        errors = [one[kind] for one in found if kind in one]
        left_out = f" ({len(errors)} of {len(found)})" if 0 < len(errors) < len(found) else ""
        return f"{max(errors):.0e}".replace("e-0", "e-") + left_out if errors else "-"
