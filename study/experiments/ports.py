"""Networks that were taken out of MXNet, and the table of their errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from study.experiments.figures.looks import BELOW

__all__ = ["NETWORKS", "Ports", "draw_continued"]

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
        "se_resnet34_v1"),
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
    "Mask R-CNN": (
        (3, 128, 128), "custom_mask_rcnn_fpn"),
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
    """The records of ``study/scripts/record_ports.py`` and ``record_continued.py``.

    Attributes
    ----------
    folder : Path
        With ``ports.json`` and ``continued.json``, which are read when they are asked for.
    """

    folder: Path

    @cached_property
    def errors(self) -> Mapping[str, Any]:
        """The errors by name of the network."""
        return dict(json.loads((self.folder / "ports.json").read_text()))

    @cached_property
    def continued(self) -> Mapping[str, Any]:
        """Loss and loss scale of each step: before, and then in MXNet and in PyTorch."""
        return dict(json.loads((self.folder / "continued.json").read_text()))

    def loss(self, kind: str, last: int = 20) -> float:
        """Return the mean loss of the last steps."""
        losses = [float(loss) for loss, _ in self.continued[kind][-last:]]
        return sum(losses) / len(losses)

    def first_difference(self) -> float:
        """Return how far the first loss in PyTorch is from MXNet's, relative to it."""
        (ours, _), (theirs, _) = (self.continued[kind][0] for kind in ("mxnet", "torch"))
        return float(abs(theirs - ours) / ours)

    @property
    def largest(self) -> float:
        """The largest error of a PyTorch program."""
        return float(max(one["torch"] for one in self.errors.values()))

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


def draw_continued(figure: Any, record: Mapping[str, Any]) -> None:
    """Draw the losses of a run that goes on in MXNet and in PyTorch."""
    axes, count = figure.subplots(), len(record["before"])
    looks = (
        ("before", 0, {"label": "MXNet, FP16", "color": "0.25"}),
        ("mxnet", count, {"label": "goes on in MXNet", "color": "#0072B2", "linestyle": "--"}),
        ("torch", count, {"label": "goes on in PyTorch", "color": "#D55E00"}),
    )
    for kind, first, look in looks:
        losses = [loss for loss, _ in record[kind]]
        axes.plot(range(first + 1, first + len(losses) + 1), losses, linewidth=1.3, **look)
    axes.axvline(count + 0.5, color="0.7", linewidth=0.8)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.set_ylim(bottom=0)
    figure.legend(ncols=3, **BELOW)
