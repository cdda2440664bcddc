"""The network that a command line names: opened, with example input where it comes with none."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from mpgluon.base.devices import parse_devices
from mpgluon.cast.arrays import arrays_in
from mpgluon.cast.numpy_arrays import in_current_interface
from mpgluon.graph.description import trace
from mpgluon_tools.commands.arguments import refuse_given
from mpgluon_tools.commands.checkout import is_run, opener
from mpgluon_tools.diagnostics.observe import Batch
from mpgluon_tools.named_code import call_named, file_of
from mpgluon_tools.onnx.metadata import ServingMetadata
from mpgluon_tools.parameter_files import is_state_dict_file, load_parameter_file
from mpgluon_tools.zoo import build_network, is_in_mxnet

import mxnet as mx
from mxnet import gluon

__all__ = ["OpenedNetwork", "batch_of", "example_batch", "one_device", "open_network"]

_RETURNS = "an initialized network, or (network, mpgluon.diagnostics.Batch(inputs, labels, loss))"
_ADVICE = (
    "Give --input-shape, once for each input, or let the function return (network, "
    "mpgluon.diagnostics.Batch(inputs, labels, loss))"
)
_IMAGES = {"mean": "mean", "std": "std", "crop": "centre_crop"}  # options and their meaning
# Operators between an input and an Embedding, through which indices pass unchanged.
_PASSES_INDICES = ("transpose", "Reshape", "SwapAxis", "expand_dims", "Flatten", "_copy")


@dataclass(frozen=True, eq=False)
class OpenedNetwork:
    """A network with FP32 values, and where it comes from.

    Attributes
    ----------
    net : gluon.HybridBlock
    name : str
        For people.
    about : sequence of str
        Sentences: where the network and its batch come from.
    image_size : int, optional
        Side of its images in pixels.
    classes : tuple of str, optional
        Names of the categories.
    batch : Batch, optional
        Inputs, labels and loss.
    preprocessing : mapping from str to any
        Values of ``centre_crop``, ``mean`` and ``std`` of
        :class:`~mpgluon_tools.onnx.ServingMetadata`, where they are known.
    """

    net: gluon.HybridBlock
    name: str
    about: Sequence[str] = ()
    image_size: Optional[int] = None
    classes: Optional[tuple[str, ...]] = None
    batch: Optional[Batch] = None
    preprocessing: Mapping[str, Any] = field(default_factory=dict)

    def metadata(self, image_size: int = 224) -> ServingMetadata:
        """Return how the network takes photographs, of so many pixels where it does not say.

        Raises
        ------
        ValueError
            If the network does not work on them, or has another number of logits than names.
        """
        size = self.image_size or image_size
        advice = "Photographs have three colours; --image-size is their side"
        batch, _ = example_batch(self.net, [(1, 3, size, size)], mx.cpu(), advice=advice)
        shapes = [one.shape for one in arrays_in(self.net(*batch.arguments))]
        if [shape[:-1] for shape in shapes] != [(1,)]:
            raise ValueError(
                "a classifier returns one array of shape (images, classes); for one image this "
                f"network returns {', '.join(map(str, shapes)) or 'no array'}"
            )
        logits = shapes[0][1]
        classes = tuple(map(str, range(logits))) if self.classes is None else self.classes
        if len(classes) != logits:
            raise ValueError(f"the network has {logits} logits, but classes names {len(classes)}")
        return ServingMetadata(self.name, size, classes, **self.preprocessing)


def one_device(text: str) -> mx.Context:
    """Return the device of ``--device``.

    Raises
    ------
    ValueError, PrecisionError
        If it is not one device that MXNet sees.
    """
    devices = parse_devices(text, "--device")
    if len(devices) > 1:
        raise ValueError(f"--device takes one device, received {text!r}")
    return devices[0]


def open_network(
    options: argparse.Namespace, device: mx.Context, *, all_values: bool = False
) -> OpenedNetwork:
    """Return the network that the options name.

    Parameters
    ----------
    options : Namespace
        With ``network``, ``image_size``, and for networks of a zoo ``classes``, ``class_names`` and
        ``parameters``. With ``batch_size``, a run comes with a batch of its images.
    device : Context
        For a zoo's network and for a run; a function chooses its own.
    all_values : bool
        Whether a network of a zoo needs a file with all parameters.

    Raises
    ------
    ValueError, TypeError
        If there is no such network, or the function returns something else.
    """
    if is_run(options.network):
        return _opened_run(options, device)
    name, parameters = options.network, getattr(options, "parameters", None)
    names = _class_names(getattr(options, "class_names", None))
    if names:
        refuse_given(options, ("classes",), f"{options.class_names} has {len(names)} names")
    classes = len(names) if names else options.classes
    batch, is_code = None, _is_code(name)
    if is_code and not parameters:
        refuse_given(options, ("classes",), f"the network of {name} has its own number of classes")
    if is_code:
        net, batch = _from_function(name)
        about = [f"{type(net).__name__} from {name}."]
        if batch is not None:
            about.append(f"Its own batch: {', '.join(str(x.shape) for x in batch.arguments)}.")
    else:
        if os.sep in name or name in (os.curdir, os.pardir):
            raise ValueError(
                f"there is no run {name} (a folder with checkpoints); a network is named as in a "
                "model zoo, or as module:function"
            )
        if all_values and not parameters:
            raise ValueError(
                f"{name} is neither module:function nor a run, and a network of a model zoo needs "
                "--parameters FILE"
            )
        net = build_network(name, classes=classes, image_size=options.image_size, devices=[device])
        about = [f"{name} of the model zoo with {classes} classes."]
    if parameters:
        load = load_parameter_file
        if is_state_dict_file(parameters):
            load = opener(f"{parameters} is named as a state dict").load_pretrained
        fresh = load(net, Path(parameters), classes=classes)
        if fresh and all_values:
            raise ValueError(
                f"{parameters} has another number of classes than {classes}, so that "
                f"{', '.join(fresh)} would be random numbers; give --classes or --class-names for "
                "it"
            )
        about.append(f"Parameters from {parameters}.")
    elif not is_code:
        about.append("Weights as they were drawn: an untrained network.")
    asked = {key: getattr(options, key, None) for key in _IMAGES}
    preprocessing = {_IMAGES[key]: value for key, value in asked.items() if value is not None}
    assumed = ", ".join(f"--{key}" for key, value in asked.items() if value is None)
    of_images = not getattr(options, "input_shape", None) and getattr(options, "to", "") != "torch"
    if assumed and hasattr(options, "mean") and of_images:
        about.append(f"Not given, and assumed as for ImageNet: {assumed}.")
    return OpenedNetwork(net, name, about, options.image_size, names, batch, preprocessing)


def _opened_run(options: argparse.Namespace, device: mx.Context) -> OpenedNetwork:
    path = Path(options.network)
    refuse_given(
        options,
        ("parameters", "classes", "class_names", "image_size", "input_shape", *_IMAGES),
        f"{path} is a run, whose parameters, categories and images are its own",
    )
    runs = opener(f"{path} is a run of train_caltech.py")
    if hasattr(options, "batch_size"):
        run: OpenedNetwork = runs.open_a_run_with_images(path, device, options.batch_size)
    else:
        run = runs.open_a_run(path, device)
    return run


def _is_code(name: str) -> bool:
    """Whether a name is ``module:function``, or a module's name without its function."""
    is_module = name.endswith(".py") or file_of(name) is not None
    return ":" in name or (is_module and not is_in_mxnet(name))


def _class_names(path: Optional[str]) -> Optional[tuple[str, ...]]:
    if not path:
        return None
    try:
        names = Path(path).read_text("utf-8-sig").splitlines()
    except OSError as error:
        raise ValueError(
            f"--class-names {path} cannot be read: {error.strerror}; it is a text file with one "
            "name in each line"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--class-names {path} is not text in UTF-8: {error}") from error
    empty = next((number for number, name in enumerate(names, 1) if not name.strip()), 0)
    if empty or not names:
        raise ValueError(
            f"--class-names {path} has no name in line {empty or 1}; each line is the name of a "
            "category, in the order of the network's outputs"
        )
    return tuple(names)


def _from_function(name: str) -> tuple[gluon.HybridBlock, Optional[Batch]]:
    made = call_named(name, _RETURNS)
    net, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(net, gluon.HybridBlock) or not isinstance(batch, (Batch, type(None))):
        kinds = [type(one).__name__ for one in (made if isinstance(made, tuple) else (made,))]
        raise TypeError(
            f"{name} returned {', '.join(kinds)}, not a HybridBlock; it must return {_RETURNS}"
        )
    if any(p._data is None and not p._deferred_init for p in net.collect_params().values()):
        raise ValueError(f"{name} must initialize its network: net.initialize()")
    return net, batch


def batch_of(
    opened: OpenedNetwork, options: argparse.Namespace, device: mx.Context
) -> tuple[Batch, list[str]]:
    """Return a network's own batch, or one of noise, and sentences about it.

    Parameters
    ----------
    opened : OpenedNetwork
    options : Namespace
        With ``input_shape``, ``image_size`` and ``batch_size``.
    device : Context

    Raises
    ------
    ValueError
        If sizes are given that have no effect, or the network does not work on such input.
    """
    if opened.batch is not None:
        if _is_code(options.network):
            sizes = ("input_shape", "image_size", "batch_size")
            refuse_given(options, sizes, f"{options.network} returns its own batch")
        return opened.batch, []
    if options.input_shape:
        refuse_given(options, ("image_size", "batch_size"), "--input-shape has every size")
    size = options.image_size
    shapes = options.input_shape or [(options.batch_size, 3, size, size)]
    batch, about = example_batch(opened.net, shapes, device)
    return batch, [about]


def example_batch(
    net: gluon.HybridBlock,
    shapes: Sequence[tuple[int, ...]],
    device: mx.Context,
    *,
    advice: str = _ADVICE,
) -> tuple[Batch, str]:
    """Return a batch of noise with labels for each output, and a sentence about it.

    An input that an Embedding takes holds indices. An output of K numbers has labels from 0 to K-1
    for a cross entropy along its last axis (of images: the second one); an output of one number has
    normal noise for an L2 loss.

    Parameters
    ----------
    net : gluon.HybridBlock
        Initialized; shapes that wait for the first call become known.
    shapes : sequence of tuple of int
        The shape of each input, the batch included.
    device : Context
    advice : str
        A sentence for a network that does not work on such input.

    Raises
    ------
    ValueError
        If the network does not work on such input.
    """
    limits = _index_limits(net, shapes)
    inputs = in_current_interface(
        tuple(
            mx.nd.random.normal(shape=shape, ctx=device)
            if limit is None
            else mx.nd.random.randint(0, limit, shape=shape, ctx=device).astype("float32")
            for shape, limit in zip(shapes, limits)
        )
    )
    try:
        outputs = arrays_in(net(*inputs))
        mx.nd.waitall()
    except (mx.MXNetError, ValueError, TypeError, AssertionError) as error:
        raise ValueError(
            f"the network does not work on input of shape {', '.join(map(str, shapes))}: "
            f"{str(error).strip().splitlines()[-1]}. {advice}"
        ) from error
    pairs = [_labels_and_loss(output) for output in outputs]
    labels = in_current_interface([one for one, _ in pairs])
    losses = [loss for _, loss in pairs]

    def loss_fn(result: Any, labels: Any) -> mx.nd.NDArray:
        if len(losses) == 1:
            return losses[0](*arrays_in(result), labels)
        every = zip(losses, arrays_in(result), labels)
        return sum(loss(output, label).sum() for loss, output, label in every)

    one = len(inputs) == 1
    batch = Batch(inputs[0] if one else inputs, labels if len(labels) > 1 else labels[0], loss_fn)
    if one and len(shapes[0]) == 4 and shapes[0][1] == 3:
        return batch, f"Images of normal noise, {shapes[0]}: no data set."
    kinds = ("normal noise" if limit is None else "random indices" for limit in limits)
    listed = ", ".join(f"{kind} {shape}" for kind, shape in zip(kinds, shapes))
    return batch, f"Input: {listed}; no data set."


def _labels_and_loss(output: mx.nd.NDArray) -> tuple[mx.nd.NDArray, Callable[..., Any]]:
    axis = 1 if output.ndim == 4 else output.ndim - 1
    kinds = output.shape[axis] if output.ndim > 1 else 1
    if kinds == 1:
        return mx.nd.random.normal(shape=output.shape, ctx=output.ctx), gluon.loss.L2Loss()
    shape = output.shape[:axis] + output.shape[axis + 1 :]
    labels = mx.nd.arange(output.size // kinds, ctx=output.ctx) % kinds
    return labels.reshape(shape), gluon.loss.SoftmaxCrossEntropyLoss(axis=axis)


def _index_limits(net: gluon.HybridBlock, shapes: Sequence[tuple[int, ...]]) -> list[Optional[int]]:
    """Return for each input the number of rows of the Embedding that takes it; None for others."""
    names = ["data"] if len(shapes) == 1 else [f"data{place}" for place in range(len(shapes))]
    try:
        graph = trace(net, list(shapes))
    except (ValueError, TypeError):  # which running the network explains better
        return [None] * len(shapes)
    limits: dict[str, int] = {}
    for node in graph.nodes:
        if node.operator == "Embedding":
            source = node.inputs[0].node
            while source.operator in _PASSES_INDICES:
                source = source.inputs[0].node
            limits[source.name] = int(node.attributes["input_dim"])
    return [limits.get(name) for name in names]
