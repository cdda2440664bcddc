"""torchvision's names for the parameters of a network, in the words of its twin in Gluon.

============================ ==============================================================
torchvision                  its twin
============================ ==============================================================
resnet18 … resnet152         gluoncv's resnet18_v1b … resnet152_v1b
vgg11 … vgg19, vgg11_bn …    the same names in both model zoos
mobilenet_v2                 mobilenetv2_1.0 in both; its head has no bias
============================ ==============================================================

It translates names and compares shapes, and reads no file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Optional

import numpy as np
import numpy.typing as npt

from mpgluon.errors import CheckpointError

__all__ = ["values_for"]

Array = npt.NDArray[Any]
Shape = tuple[int, ...]

_TWINS = (
    "torchvision's resnet50 belongs into gluoncv's resnet50_v1b (18 to 152 alike), vgg16 into "
    "vgg16, vgg16_bn into vgg16_bn, mobilenet_v2 into mobilenetv2_1.0"
)

# The names of layers: whatever precedes ".weight" and so on.
_RESNET = re.compile(r"conv1|bn1|layer[1-4]\.\d+\.(conv[123]|bn[123]|downsample\.[01])|fc")
_VGG = re.compile(r"features\.\d+|classifier\.[036]")
_MOBILENET = re.compile(r"features\.\d+\.([01]|conv\.\d(\.[01])?)|classifier\.1")

_EPSILON = 1e-5  # of every BatchNorm in all these networks


@dataclass(frozen=True)
class _Given:
    """An array of the file, with its name there."""

    name: str
    array: Array


Layers = dict[str, dict[str, _Given]]
"""By the name of a layer and by our word for the parameter, such as ``gamma``."""


def values_for(
    state: Mapping[str, Array], shapes: Mapping[str, Shape], *, classes: int
) -> tuple[dict[str, Array], list[str]]:
    """Return the values of a network's parameters from a state dict with torchvision's names.

    Parameters
    ----------
    state : mapping from name to ndarray
        Of a ResNet, VGG or MobileNetV2; in any order.
    shapes : mapping from name to tuple of int
        Of the network's parameters, by their place in it (``"features.0.weight"``), in its order.
    classes : int
        A head with this many rows in the network and another number in the file is new.

    Returns
    -------
    values : dict from name to ndarray, float32
        Of every parameter but those of a new head.
    fresh : list of str
        The parameters of a new head.

    Raises
    ------
    CheckpointError
        If the names are none of torchvision's, or do not fit the network. Every difference is
        named, with its shapes.
    """
    theirs = _layers(state)
    by_order = not all(map(_RESNET.fullmatch, theirs))
    if by_order and all(map(_MOBILENET.fullmatch, theirs)):
        theirs = _in_gluons_arrangement(theirs)
    elif by_order and not all(map(_VGG.fullmatch, theirs)):
        raise CheckpointError(
            "these are not the names of a ResNet, VGG or MobileNetV2 of torchvision: "
            f"{', '.join(_strangers(theirs))}. {_TWINS}"
        )
    ours: dict[str, dict[str, str]] = {}
    for name in shapes:
        layer, _, word = name.rpartition(".")
        ours.setdefault(layer, {})[word] = name
    pairs = (
        zip_longest(sorted(theirs, key=_place), ours, fillvalue="")
        if by_order
        else ((layer, layer) for layer in {**ours, **theirs})
    )
    values: dict[str, Array] = {}
    fresh: list[str] = []
    differences: list[str] = []
    head = next(reversed(ours), None)
    for their_layer, our_layer in pairs:
        given, wanted = theirs.get(their_layer, {}), ours.get(our_layer, {})
        if our_layer == head and _is_another_size(given, shapes.get(f"{head}.weight"), classes):
            fresh += wanted.values()
            continue
        for word in {**wanted, **given}:
            difference = _difference(given.get(word), wanted.get(word), shapes)
            if difference:
                differences.append(difference)
            else:
                values[wanted[word]] = given[word].array
    if differences:
        listed = "\n  ".join(differences)
        raise CheckpointError(
            f"{len(differences)} differences between file and network:\n  {listed}\n{_TWINS}"
        )
    return values, fresh


def _layers(state: Mapping[str, Array]) -> Layers:
    """Return a state dict by layers, in Gluon's words, without the counts of batches."""
    layers: Layers = {}
    for name, array in state.items():
        layer, _, word = name.rpartition(".")
        if word == "num_batches_tracked":
            continue
        if f"{layer}.running_mean" in state:
            word = {"weight": "gamma", "bias": "beta"}.get(word, word)
        layers.setdefault(layer, {})[word] = _Given(name, array)
    return layers


def _strangers(theirs: Layers) -> list[str]:
    """Return the first few names that the likeliest family does not know."""
    unknown = (
        [
            given.name
            for layer in theirs
            if not family.fullmatch(layer)
            for given in theirs[layer].values()
        ]
        for family in (_RESNET, _VGG, _MOBILENET)
    )
    return min(unknown, key=len)[:5]


def _place(layer: str) -> tuple[bool, list[int]]:
    """Return where a layer of a VGG or MobileNet stands in the forward pass."""
    return layer.startswith("classifier"), [int(number) for number in re.findall(r"\d+", layer)]


def _in_gluons_arrangement(theirs: Layers) -> Layers:
    """Return the layers of a MobileNetV2 as Gluon has them.

    Its first bottleneck begins with a convolution that torchvision leaves out, because it widens
    nothing; one that changes nothing is put there. Its head is a convolution without a bias, so a
    bias of zeros is left out.
    """
    arranged = dict(theirs)
    if "gamma" in theirs.get("features.0.1", {}):
        channels = len(theirs["features.0.1"]["gamma"].array)
        ones, zeros = np.ones(channels, np.float32), np.zeros(channels, np.float32)
        unit = np.eye(channels, dtype=np.float32).reshape(channels, channels, 1, 1)
        gamma = ones * np.sqrt(np.float32(1 + _EPSILON))  # what the BatchNorm will divide by
        norm = {"gamma": gamma, "beta": zeros, "running_mean": zeros, "running_var": ones}
        # Numbered so that they come behind features.0.1 and before features.1.conv.0.0.
        for layer, arrays in (("features.0.2", {"weight": unit}), ("features.0.3", norm)):
            arranged[layer] = {
                word: _Given(f"(an identity's {word})", array) for word, array in arrays.items()
            }
    head = arranged.get("classifier.1", {})
    if "weight" in head and head["weight"].array.ndim == 2:
        weight = head["weight"].array
        bias = {"bias": head["bias"]} if "bias" in head and head["bias"].array.any() else {}
        arranged["classifier.1"] = {
            "weight": _Given(head["weight"].name, weight.reshape(*weight.shape, 1, 1)),
            **bias,
        }
    return arranged


def _is_another_size(given: Mapping[str, _Given], wanted: Optional[Shape], classes: int) -> bool:
    """Whether a head has another number of classes in the file, and is alike otherwise."""
    if wanted is None or "weight" not in given:
        return False
    found = given["weight"].array.shape
    return wanted[0] == classes and found[:1] != (classes,) and found[1:] == wanted[1:]


def _difference(
    given: Optional[_Given], ours: Optional[str], shapes: Mapping[str, Shape]
) -> Optional[str]:
    """Return in words how an array of the file and a parameter differ, or ``None``."""
    if ours is None:
        assert given is not None
        return f"{given.name} {given.array.shape} is in the file only"
    if given is None:
        return f"{ours} {shapes[ours]} is in the network only"
    kind = "" if given.array.dtype == np.float32 else f" {given.array.dtype}"
    if given.array.shape == shapes[ours] and not kind:
        return None
    found = f"{given.name} is{kind} {given.array.shape} in the file"
    return f"{found}, {ours} {shapes[ours]} in the network"
