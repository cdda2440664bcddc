"""torchvision's names for the parameters of a network, as its counterpart in Gluon has them.

============================ ==============================================================
torchvision                  its counterpart
============================ ==============================================================
resnet18 … resnet152         gluoncv's resnet18_v1b … resnet152_v1b
vgg11 … vgg19, vgg11_bn …    the same names in both model zoos
mobilenet_v2                 mobilenetv2_1.0 in both; its head has no bias
EfficientNet-Lite0           efficientnet_lite0; names of efficientnet_lite_pytorch's
============================ ==============================================================

This module translates names and compares shapes; it reads no file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Optional

from mpgluon.errors import CheckpointError

import numpy as np
import numpy.typing as npt

__all__ = ["values_for"]

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

_AT_EACH_END = 10  # of a list of differences
_COUNTERPARTS = (
    "torchvision's resnet50 fits gluoncv's resnet50_v1b (18 to 152 alike), vgg16 fits vgg16, "
    "vgg16_bn fits vgg16_bn, mobilenet_v2 fits mobilenetv2_1.0, efficientnet_lite_pytorch's "
    "efficientnet-lite0 fits efficientnet_lite0"
)

# The names of layers: the part before ".weight" and so on.
_RESNET = re.compile(r"conv1|bn1|layer[1-4]\.\d+\.(conv[123]|bn[123]|downsample\.[01])|fc")
_VGG = re.compile(r"features\.\d+|classifier\.[036]")
_MOBILENET = re.compile(r"features\.\d+\.([01]|conv\.\d(\.[01])?)|classifier\.1")
_EFFICIENTNET = re.compile(
    r"_conv_stem|_conv_head|_bn[01]|_fc"
    r"|_blocks\.\d+\._(expand_conv|depthwise_conv|project_conv|bn[012])"
)

_EPSILON = 1e-5  # of every BatchNorm in all these networks


@dataclass(frozen=True)
class _FileArray:
    """An array of the file, with its name there."""

    name: str
    array: Array


Layers = dict[str, dict[str, _FileArray]]
"""By the name of a layer and by Gluon's name of the parameter in it, such as ``gamma``."""


def values_for(
    state: Mapping[str, Array], shapes: Mapping[str, Shape], *, classes: int
) -> tuple[dict[str, Array], list[str]]:
    """Return the values of a network's parameters from a state dict with torchvision's names.

    Parameters
    ----------
    state : mapping from name to ndarray
        Names of a ResNet, VGG, MobileNetV2 or EfficientNet-Lite0, in any order.
    shapes : mapping from name to tuple of int
        Shapes of the network's parameters, by their place (``"features.0.weight"``), in its order.
    classes : int
        If the head has this many rows in the network and another number in the file, it is new.

    Returns
    -------
    values : dict from name to ndarray, float32
        A value for every parameter except a new head's.
    new : list of str
        The parameters of a new head.

    Raises
    ------
    CheckpointError
        If the names are not torchvision's, or do not fit the network. The message has every
        difference, with its shapes.
    """
    in_file = _layers(state)
    if all(map(_EFFICIENTNET.fullmatch, in_file)):
        # Gluon's layers have the same names without underscores at the beginning of each word.
        in_file = {re.sub(r"\b_", "", layer): arrays for layer, arrays in in_file.items()}
        by_order = False
    else:
        by_order = not all(map(_RESNET.fullmatch, in_file))
    if by_order and all(map(_MOBILENET.fullmatch, in_file)):
        in_file = _arranged_as_in_gluon(in_file)
    elif by_order and not all(map(_VGG.fullmatch, in_file)):
        raise CheckpointError(
            "these are not the names of a ResNet, VGG or MobileNetV2 of torchvision, or of an "
            "EfficientNet-Lite0: "
            f"{', '.join(_unknown_names(in_file))}. {_COUNTERPARTS}"
        )
    in_net: dict[str, dict[str, str]] = {}
    for name in shapes:
        layer, _, word = name.rpartition(".")
        in_net.setdefault(layer, {})[word] = name
    pairs = (
        zip_longest(sorted(in_file, key=_place), in_net, fillvalue="")
        if by_order
        else ((layer, layer) for layer in {**in_net, **in_file})
    )
    values: dict[str, Array] = {}
    new: list[str] = []
    differences: list[str] = []
    head = next(reversed(in_net), None)
    for file_layer, net_layer in pairs:
        found, wanted = in_file.get(file_layer, {}), in_net.get(net_layer, {})
        if net_layer == head and _is_another_size(found, shapes.get(f"{head}.weight"), classes):
            new += wanted.values()
            continue
        for word in {**wanted, **found}:
            difference = _difference(found.get(word), wanted.get(word), shapes)
            if difference:
                differences.append(difference)
            else:
                values[wanted[word]] = found[word].array
    if differences:
        shown, more = differences, len(differences) - 2 * _AT_EACH_END
        if more > 0:
            ends = differences[:_AT_EACH_END], differences[-_AT_EACH_END:]
            shown = [*ends[0], f"… {more} more …", *ends[1]]
        listed = "\n  ".join(shown)
        raise CheckpointError(
            f"{len(differences)} differences between file and network:\n  {listed}\n{_COUNTERPARTS}"
        )
    return values, new


def _layers(state: Mapping[str, Array]) -> Layers:
    """Return a state dict by layers, in Gluon's words, without the counts of batches."""
    layers: Layers = {}
    for name, array in state.items():
        layer, _, word = name.rpartition(".")
        if word == "num_batches_tracked":
            continue
        if f"{layer}.running_mean" in state:
            word = {"weight": "gamma", "bias": "beta"}.get(word, word)
        layers.setdefault(layer, {})[word] = _FileArray(name, array)
    return layers


def _unknown_names(in_file: Layers) -> list[str]:
    """Return the first few names that the best fitting family does not have."""
    unknown = (
        [
            found.name
            for layer in in_file
            if not family.fullmatch(layer)
            for found in in_file[layer].values()
        ]
        for family in (_RESNET, _VGG, _MOBILENET, _EFFICIENTNET)
    )
    return min(unknown, key=len)[:5]


def _place(layer: str) -> tuple[bool, list[int]]:
    """Return where a layer of a VGG or MobileNet stands in the forward pass."""
    return layer.startswith("classifier"), [int(number) for number in re.findall(r"\d+", layer)]


def _arranged_as_in_gluon(in_file: Layers) -> Layers:
    """Return the layers of a MobileNetV2 as Gluon has them.

    Its first bottleneck begins with a convolution that torchvision leaves out, because it widens
    nothing; one that changes nothing is put there. Its head is a convolution without a bias, so a
    bias of zeros is left out.
    """
    arranged = dict(in_file)
    if "gamma" in in_file.get("features.0.1", {}):
        channels = len(in_file["features.0.1"]["gamma"].array)
        ones, zeros = np.ones(channels, np.float32), np.zeros(channels, np.float32)
        unit = np.eye(channels, dtype=np.float32).reshape(channels, channels, 1, 1)
        gamma = ones * np.sqrt(np.float32(1 + _EPSILON))  # the divisor of the BatchNorm
        norm = {"gamma": gamma, "beta": zeros, "running_mean": zeros, "running_var": ones}
        # Numbered so that they come behind features.0.1 and before features.1.conv.0.0.
        for layer, arrays in (("features.0.2", {"weight": unit}), ("features.0.3", norm)):
            arranged[layer] = {
                word: _FileArray(f"(an identity's {word})", array) for word, array in arrays.items()
            }
    head = arranged.get("classifier.1", {})
    if "weight" in head and head["weight"].array.ndim == 2:
        weight = head["weight"].array
        bias = {"bias": head["bias"]} if "bias" in head and head["bias"].array.any() else {}
        arranged["classifier.1"] = {
            "weight": _FileArray(head["weight"].name, weight.reshape(*weight.shape, 1, 1)),
            **bias,
        }
    return arranged


def _is_another_size(
    found: Mapping[str, _FileArray], wanted: Optional[Shape], classes: int
) -> bool:
    """Whether a head has another number of classes in the file, and is alike otherwise."""
    if wanted is None or "weight" not in found:
        return False
    shape = found["weight"].array.shape
    return wanted[0] == classes and shape[:1] != (classes,) and shape[1:] == wanted[1:]


def _difference(
    found: Optional[_FileArray], in_net: Optional[str], shapes: Mapping[str, Shape]
) -> Optional[str]:
    """Return in words how an array of the file and a parameter differ, or ``None``."""
    if in_net is None:
        assert found is not None
        return f"{found.name} {found.array.shape} is in the file only"
    if found is None:
        return f"{in_net} {shapes[in_net]} is in the network only"
    kind = "" if found.array.dtype == np.float32 else f" {found.array.dtype}"
    if found.array.shape == shapes[in_net] and not kind:
        return None
    in_file = f"{found.name} is{kind} {found.array.shape} in the file"
    return f"{in_file}, {in_net} {shapes[in_net]} in the network"
