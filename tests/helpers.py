"""Functions for tests of several folders: ways to 16 bits, training, comparing, processes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import mpgluon
from mpgluon import Policy, amp

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

EMULATED = Policy.parse("emulated_bfloat16")
WAYS = {
    "cast float16": lambda net, **kwargs: mpgluon.cast_block(net, "float16", **kwargs),
    "autocast float16": lambda net, **kwargs: amp.autocast(net, "float16", **kwargs),
    "autocast bfloat16": lambda net, **kwargs: amp.autocast(net, "bfloat16", **kwargs),
    "emulated bfloat16": lambda net, **kwargs: amp.autocast(net, EMULATED, **kwargs),
}
STATIC = {"static_alloc": True, "static_shape": True}
# A graph stays in native bfloat16 from one convolution to the next; an imperative run does not.
SAME_BITS_HYBRIDIZED = ("cast float16", "autocast float16", "emulated bfloat16")
EACH_WAY = pytest.mark.parametrize("way", list(WAYS))
BOTH = pytest.mark.parametrize("hybridize", [False, True], ids=["imperative", "hybridized"])


def in_sequence(*layers: gluon.Block) -> nn.HybridSequential:
    net = nn.HybridSequential()
    net.add(*layers)
    return net


def initialized(net: gluon.Block, *arguments, **options) -> gluon.Block:
    """Initialize a network, and return it."""
    net.initialize(*arguments, **options)
    return net


def cast_net(net: gluon.Block, *arguments, **options) -> gluon.Block:
    """Cast a network with ``mpgluon.cast_block``, and return it."""
    mpgluon.cast_block(net, *arguments, **options)
    return net


def autocast_net(net: gluon.Block, *arguments, **options) -> gluon.Block:
    """Cast what a network computes with ``amp.autocast``, and return it."""
    amp.autocast(net, *arguments, **options)
    return net


def in_way(way: str, net: gluon.Block, **options) -> gluon.Block:
    """Cast a network in one of ``WAYS``, and return it."""
    WAYS[way](net, **options)
    return net


def with_loss_scale(trainer: gluon.Trainer, *arguments, **options) -> gluon.Trainer:
    """Give a Trainer a loss scale, and return it."""
    amp.init_trainer(trainer, *arguments, **options)
    return trainer


def backward_from(loss_of: Callable, trainer=None):
    """Record a loss, go backward from it, scaled if there is a Trainer, and return it."""
    with autograd.record():
        loss = loss_of()
        if trainer is not None:
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
    if trainer is None:
        autograd.backward(loss)
    return loss


def outputs_of(result) -> list[mx.nd.NDArray]:
    """Return the arrays of a network's result, however deep it packs them."""
    if isinstance(result, (list, tuple)):
        return [array for item in result for array in outputs_of(item)]
    return [result]


def parameters_of(net: gluon.Block) -> dict[str, np.ndarray]:
    """Return the values of all parameters by their place in the network ("0.weight")."""
    # oneDNN may change the layout of a weight while a running inference still uses it.
    mx.nd.waitall()
    return {
        place: parameter.data().asnumpy()
        for place, parameter in net._collect_params_with_prefix().items()
    }


def gradients_of(net: gluon.Block) -> dict[str, np.ndarray]:
    """Return the gradients of all parameters that have one, by their place in the network."""
    return {
        place: parameter.grad().asnumpy()
        for place, parameter in net._collect_params_with_prefix().items()
        if parameter.grad_req != "null"
    }


def assert_same_bits(one, other) -> None:
    """Compare two dicts, or two sequences, of NumPy arrays."""
    if not isinstance(one, dict):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    assert one.keys() == other.keys() != set()
    unequal = [name for name in one if _bits(one[name]) != _bits(other[name])]
    assert not unequal


def _bits(array: np.ndarray) -> tuple:
    return array.dtype, array.shape, array.tobytes()


def trainer_of(net: gluon.Block, learning_rate: float = 0.01) -> gluon.Trainer:
    options = {"learning_rate": learning_rate, "momentum": 0.9, "multi_precision": True}
    return gluon.Trainer(net.collect_params(), "sgd", options)


def train(net: gluon.Block, inputs: list, labels, steps: int, seed: int = 0) -> list[np.ndarray]:
    """Train with loss scale 1 and return the loss vector of each step."""
    trainer = trainer_of(net)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    losses = []
    for step in range(steps):
        mx.random.seed(seed + step)  # the same Dropout masks in every run
        with autograd.record():
            outputs = outputs_of(net(*inputs))
            assert all(output.dtype == np.float32 for output in outputs)
            loss = sum(loss_fn(output, labels) for output in outputs)
        loss.backward()
        trainer.step(len(labels))
        losses.append(loss.asnumpy())
    return losses


def module_from(path: Path) -> ModuleType:
    """Import a file that is in no package: a script."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def starting_a_sleeper(file: Path) -> str:
    """Return code that starts a process, writes its number to a file, and waits for it."""
    return (
        "import pathlib, subprocess; sleeper = subprocess.Popen(['sleep', '60']); "
        f"pathlib.Path({str(file)!r}).write_text(str(sleeper.pid)); sleeper.wait()"
    )


def soon_ends(file: Path) -> bool:
    """Whether the process with the number in a file ends within five seconds."""
    stat = Path("/proc", file.read_text(), "stat")
    for _ in range(100):
        if not stat.exists() or " Z " in stat.read_text():  # Z: nobody has asked for its status
            return True
        time.sleep(0.05)
    return False


def run_python(code: str, *arguments: object, **options) -> subprocess.CompletedProcess:
    """Run Python code in a fresh process, and return its status and its output as text."""
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, **options
    )
