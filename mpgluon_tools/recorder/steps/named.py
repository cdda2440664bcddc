"""Networks and losses by name, as a recorded step keeps them: code is named, never stored.

``module:function`` is imported and called without arguments (a loss: with output and labels). Other
names are from a model zoo or ``gluon.loss``, with plain values as arguments.
"""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import sys
from collections.abc import Sequence
from typing import Any, Callable

from mpgluon_tools.named_code import call_named, function_named, split_name
from mpgluon_tools.zoo import build_network, refuse_unknown_network

import mxnet as mx
from mxnet import gluon

__all__ = ["check_loss_name", "check_network_name", "named_loss", "named_network"]

_ZOO_DEFAULTS = {"classes": 1000, "image_size": 224}


def named_network(name: str, devices: Sequence[mx.Context]) -> gluon.Block:
    """Return the network of a name: ``"module:function"``, or one of a model zoo.

    The latter is like ``"resnet50_v2(classes=10, image_size=64)"``, on these devices.

    Raises
    ------
    ValueError
        If there is no such function or network.
    TypeError
        If the function returns something else than a Block.
    """
    if ":" not in name:
        model, arguments = _zoo_call(name)
        return build_network(model, **arguments, devices=devices)
    net = call_named(name)
    if not isinstance(net, gluon.Block):
        raise TypeError(f"{name} returned {type(net).__name__}, not a gluon.Block")
    return net


def named_loss(name: str) -> Callable[[Any, Any], Any]:
    """Return the loss of a name: ``"module:function"``, or like ``"L2Loss(weight=2.0)"``.

    Raises
    ------
    ValueError
        If there is no such function or loss.
    """
    if ":" in name:
        return function_named(name, "a loss")
    kind, arguments = _call(name)
    loss_class = getattr(gluon.loss, kind, None)
    if not (isinstance(loss_class, type) and issubclass(loss_class, gluon.loss.Loss)):
        raise ValueError(
            f"mxnet.gluon.loss has no {kind!r}; name one of its losses, with arguments as in "
            "L2Loss(weight=2.0), or module:function of your own"
        )
    try:
        loss: Callable[[Any, Any], Any] = loss_class(**arguments)
    except TypeError as error:
        raise ValueError(f"{name!r} is not a call of gluon.loss.{kind}: {error}") from None
    return loss


def check_network_name(name: str) -> None:
    """Raise ValueError if a name cannot name a network; imports and calls nothing."""
    if ":" in name:
        _check_function(name)
    else:
        refuse_unknown_network(_zoo_call(name)[0])


def check_loss_name(name: str) -> None:
    """Raise ValueError if a name cannot name a loss; imports nothing."""
    if ":" in name:
        _check_function(name)
    else:
        named_loss(name)


def _zoo_call(name: str) -> tuple[str, dict[str, int]]:
    model, arguments = _call(name)
    for key, value in arguments.items():
        good = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if key not in _ZOO_DEFAULTS or not good:
            raise ValueError(
                f"a network of a zoo has the arguments classes and image_size, positive integers; "
                f"received {key}={value!r} in {name!r}. Name a function of your own for others: "
                "module:function"
            )
    return model, {**_ZOO_DEFAULTS, **arguments}


def _call(text: str) -> tuple[str, dict[str, Any]]:
    """Return name and keyword arguments of a call in Python's notation; evaluates literals only."""
    name, bracket, rest = text.partition("(")
    if not bracket:
        return name.strip(), {}
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError("only keyword arguments can be given")
        return name.strip(), {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"a name with arguments is like resnet18_v1(classes=10), received {text!r}: {error}"
        ) from None


def _check_function(name: str) -> None:
    module, _ = split_name(name)
    try:
        if module in sys.modules:
            exists = callable(pkgutil.resolve_name(name))
        else:
            exists = importlib.util.find_spec(module) is not None
    except (ImportError, AttributeError):
        exists = False
    if not exists:
        raise ValueError(
            f"{name!r} names no function that can be imported; name one at the top of a module in "
            "a folder of sys.path"
        )
