"""Image classifiers by name, initialized: of MXNet's and gluoncv's model zoos, and our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Union

from mpgluon.base.blocks import blocks_of
from mpgluon.cast.numpy_arrays import in_current_interface
from mpgluon_tools.extras import extra
from mpgluon_tools.zoo.bn_inception import BNInception
from mpgluon_tools.zoo.efficientnet_lite import EfficientNetLite0

import mxnet as mx
from mxnet import gluon
from mxnet.gluon.model_zoo import vision

__all__ = ["build_network", "is_in_mxnet", "refuse_image_size", "refuse_unknown_network"]

# Which neither zoo has.
_OURS = {"bn_inception": BNInception, "efficientnet_lite0": EfficientNetLite0}


def build_network(
    name: str, *, classes: int, image_size: int, devices: Sequence[mx.Context]
) -> gluon.HybridBlock:
    """Return a classifier with FP32 parameters, all of known shape and initialized.

    Parameters
    ----------
    name : str
        ``"bn_inception"``, ``"efficientnet_lite0"``, or one of ``mxnet.gluon.model_zoo.vision``
        or, failing that, ``gluoncv.model_zoo``.
    classes : int
        Length of the logits.
    image_size : int
        Side of the input in pixels; some networks need a minimum. A final average over a fixed
        window of 7 x 7 or 8 x 8, which smaller images do not fill, becomes a global average.
    devices : sequence of Context
        Where the parameters live.

    Raises
    ------
    ValueError
        If no model zoo has the name, or the network does not work at that image size.
    ImportError
        If MXNet's has not and gluoncv is not installed.
    """
    net = _named_network(name, classes)
    net.initialize(mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2), ctx=devices)
    try:
        logits = _logits(net, name, image_size, devices[0])
    except TypeError as error:
        raise ValueError(f"{name!r} is not an image classifier: {error}") from None
    shapes = [tuple(part.shape) for part in _parts(logits)]
    if shapes != [(1, classes)]:
        raise ValueError(
            f"{name!r} is not a classifier for {classes} classes: it turns one image into "
            f"{', '.join(map(str, shapes))}, not (1, {classes}); choose another --model"
        )
    return net


def is_in_mxnet(name: str) -> bool:
    """Whether MXNet's own model zoo has a network of that name."""
    try:
        with mx.name.NameManager():  # the network that is made next is still the first of its name
            vision.get_model(name)
    except ValueError:
        return False
    return True


def refuse_unknown_network(name: str) -> None:
    """Raise ValueError if no model zoo has a classifier of that name."""
    with mx.name.NameManager():  # the network that is trained is still the first of its name
        _named_network(name, classes=2)


def refuse_image_size(
    net: gluon.HybridBlock, name: str, image_size: int, device: mx.Context
) -> None:
    """Raise ValueError if a network with known shapes does not work at another image size."""
    _logits(net, name, image_size, device)


def _logits(
    net: gluon.HybridBlock, name: str, image_size: int, device: mx.Context
) -> Union[mx.nd.NDArray, Sequence[Any]]:
    try:
        return _first_image(net, image_size, device)
    except (ValueError, mx.MXNetError) as error:
        reason = str(error).strip().splitlines()[-1]
        advice = "; choose a larger --image-size" if _is_about_size(reason) else ""
        raise ValueError(
            f"{name} does not work on images of {image_size} x {image_size} pixels{advice}. "
            f"MXNet says: {reason}"
        ) from error


def _named_network(name: str, classes: int) -> gluon.HybridBlock:
    with mx.cpu():
        if name in _OURS:
            return _OURS[name](classes=classes)
        try:
            return vision.get_model(name, classes=classes)
        except ValueError:
            return _gluoncv_network(name, classes)


def _first_image(
    net: gluon.HybridBlock, image_size: int, device: mx.Context
) -> Union[mx.nd.NDArray, Sequence[Any]]:
    """Return the result for one image; this infers shapes that were left open."""
    image = in_current_interface(mx.nd.zeros((1, 3, image_size, image_size), ctx=device))
    try:
        result = net(image)
        mx.nd.waitall()
    except mx.MXNetError:
        if not _average_all_places(net):
            raise
        result = net(image)
        mx.nd.waitall()
    return result


def _is_about_size(reason: str) -> bool:
    """Return whether a message of MXNet's is of the kind that too small images cause."""
    words = ("exceed", "shape", "size", "kernel", "dimension", "expected", "inconsistent")
    return any(word in reason.lower() for word in words)


def _average_all_places(net: gluon.Block) -> bool:
    """Make final averages over a fixed window global; return whether there is one.

    The options of the layer are changed, which Gluon reads in each forward pass: a layer of another
    type cannot be assigned to a block's attribute.
    """
    fixed = [
        layer
        for layer in blocks_of(net)
        if isinstance(layer, gluon.nn.AvgPool2D) and min(layer._kwargs["kernel"]) >= 7
    ]
    for layer in fixed:
        layer._kwargs.update(kernel=(1, 1), stride=(1, 1), global_pool=True)
    return bool(fixed)


def _parts(result: Any) -> list[mx.nd.NDArray]:
    return [result] if isinstance(result, mx.nd.NDArray) else [p for r in result for p in _parts(r)]


def _gluoncv_network(name: str, classes: int) -> gluon.HybridBlock:
    try:
        with extra("zoo"):
            from gluoncv import model_zoo  # takes a while: only where it is needed
    except RuntimeError as error:  # which it raises where PyTorch 2 is installed
        raise ValueError(
            f"{name!r} may be one of gluoncv's networks, but gluoncv cannot be imported: {error}; "
            "use an environment without PyTorch"
        ) from error
    try:
        net = model_zoo.get_model(name, classes=classes)
    except ValueError:
        raise ValueError(
            f"no model zoo has a network called {name!r}; see mxnet.gluon.model_zoo.vision and "
            "gluoncv.model_zoo for the names, for example resnet50_v2 or mobilenet1.0"
        ) from None
    # Detectors and pose networks take other options, or download a backbone.
    except (TypeError, KeyError, OSError) as error:
        reason = f"gluoncv answers with {type(error).__name__}, {error}"
        raise ValueError(f"{name!r} is not an image classifier: {reason}") from None
    if isinstance(net, gluon.SymbolBlock):
        raise ValueError(
            f"{name!r} is a graph for inference in 8-bit integers; choose the network that it was "
            f"made from, {name.removesuffix('_int8')}"
        )
    return net
