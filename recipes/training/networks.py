"""Networks of a run: built by name, started from a parameter file, and cast."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpgluon.base.blocks import set_value, shape_of
from mpgluon.base.devices import from_numpy
from mpgluon.cast.block import apply_policy, blocks_of
from mpgluon.cast.plain_graph import use_own_operators
from mpgluon.distributed import synchronize_batch_norm
from mpgluon.errors import CheckpointError
from mpgluon.tools.zoo import build_network, refuse_image_size, refuse_unknown_network
from mpgluon_tools.parameter_files import is_state_dict_file, load_parameter_file

import mxnet as mx
from mxnet import gluon

from recipes.training.config import TrainingConfig
from recipes.weights import read_state_dict, values_for

__all__ = [
    "PreparedNetwork",
    "build_network",
    "has_input_normalization",
    "load_pretrained",
    "prepare_network",
    "refuse_unknown_network",
]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class PreparedNetwork:
    """A network that is ready to be trained.

    Attributes
    ----------
    net : gluon.HybridBlock
        Cast as the config says, and hybridized.
    arithmetic : str
        How products in the compute format are computed; see `mpgluon.CastReport`.
    fresh_parameters : list of str
        Those with initial values although a parameter file was loaded.
    normalizes_input : bool
        See `has_input_normalization`.
    """

    net: gluon.HybridBlock
    arithmetic: str
    fresh_parameters: list[str]
    normalizes_input: bool


def prepare_network(
    config: TrainingConfig, *, classes: int, devices: Sequence[mx.Context]
) -> PreparedNetwork:
    """Build the network of a config, load its parameter file, and cast it."""
    net = build_network(
        config.model, classes=classes, image_size=config.image_size, devices=devices
    )
    if config.test_image_size is not None:
        refuse_image_size(net, config.model, config.test_image_size, devices[0])
    normalizes_input = has_input_normalization(net)
    fresh: list[str] = []
    if config.pretrained is not None:
        fresh = load_pretrained(net, Path(config.pretrained), classes=classes)
        if fresh:
            _logger.info("new head, not from %s: %s", config.pretrained, ", ".join(fresh))
    if config.test_image_size is None:
        _average_in_one_window(net, config.image_size, devices[0])
    if config.sync_batch_norm and len(devices) > 1:
        synchronize_batch_norm(net, len(devices))
    arithmetic = "native"
    if config.policy.compute_dtype != "float32":
        arithmetic = apply_policy(net, config.policy).arithmetic
    else:
        use_own_operators(net)  # as mpgluon.prepare does, with MXNet's bits
    net.hybridize(static_alloc=True, static_shape=True)
    return PreparedNetwork(net, arithmetic, fresh, normalizes_input)


def _average_in_one_window(net: gluon.Block, image_size: int, device: mx.Context) -> None:
    """Give global averages the window that their input fills at this image size.

    The averages are the same. For the gradient of a global one, whose stride is 1, oneDNN 2.4 may
    choose a layout that it has no fast code for, neither here nor in the BatchNorms that the
    gradient reaches: a step of ``cifar_resnet20_v1`` takes half as long again in FP32.
    """

    def fill(layer: gluon.Block, inputs: tuple[mx.nd.NDArray, ...]) -> None:
        window = inputs[0].shape[2:]
        layer._kwargs.update(kernel=window, stride=window, global_pool=False)

    hooks = [
        layer.register_forward_pre_hook(fill)
        for layer in blocks_of(net)
        if isinstance(layer, gluon.nn.GlobalAvgPool2D)
    ]
    net(mx.nd.zeros((1, 3, image_size, image_size), ctx=device))
    for hook in hooks:
        hook.detach()


def has_input_normalization(net: gluon.Block) -> bool:
    """Return whether the network begins with a BatchNorm without gradients, as ResNet v2 does.

    MXNet updates running statistics in the backward pass only, which reaches such a layer only if
    the images have gradients: otherwise the statistics stay 0 and 1, and the network is tested
    with other statistics than it was trained with.
    """
    images = 3
    return any(
        layer.beta.shape == (images,) and layer.gamma.grad_req == layer.beta.grad_req == "null"
        for layer in blocks_of(net)
        if isinstance(layer, gluon.nn.BatchNorm)
    )


def load_pretrained(net: gluon.Block, path: Path, *, classes: int) -> list[str]:
    """Set a network's parameters from a file, except for a head of another size.

    A ``.safetensors`` or ``.pth`` file is a state dict with torchvision's names: of a ResNet for
    gluoncv's ``resnet*_v1b``, or of a VGG or MobileNetV2. No code in it is run.

    Parameters
    ----------
    net : gluon.Block
        Initialized, FP32.
    path : Path
        A state dict, or a file for :func:`mpgluon_tools.parameter_files.load_parameter_file`, which
        says what ``classes`` and the result are, and which errors are raised.
    """
    if not path.is_file():
        raise CheckpointError(
            f"there is no parameter file {path}; data/README.md says how to get weights"
        )
    if is_state_dict_file(path):
        return _load_state_dict(net, path, classes)
    return load_parameter_file(net, path, classes=classes)


def _load_state_dict(net: gluon.Block, path: Path, classes: int) -> list[str]:
    parameters = net._collect_params_with_prefix()
    shapes = {name: shape_of(parameter) for name, parameter in parameters.items()}
    state = read_state_dict(path)
    try:
        values, fresh = values_for(state, shapes, classes=classes)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    for name, value in values.items():
        set_value(parameters[name], from_numpy(value))
    return fresh
