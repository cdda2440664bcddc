"""A network for inference: BatchNorm folded, in 16 bits, its graph compiled.

The trained network is not changed. bfloat16 is the fast format on a CPU with instructions for it.
float16 is for a GPU; a CPU gives its results, but not its speed, and without those instructions
the same holds for bfloat16.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Union

from mpgluon import kernels
from mpgluon.base.blocks import arrays_of, replace_value, set_value
from mpgluon.base.devices import from_numpy
from mpgluon.cast import fp32
from mpgluon.cast.arithmetic import policy_arithmetic
from mpgluon.cast.arrays import arrays_in
from mpgluon.cast.block import apply_policy
from mpgluon.formats.float_format import BFLOAT16, FLOAT16, FLOAT32, FloatFormat
from mpgluon.formats.policy import Policy
from mpgluon.graph.nodes import Node
from mpgluon.graph.replay import replay
from mpgluon.kernels import bfloat16
from mpgluon.kernels.dtypes import BFLOAT16_DTYPE, cast, round_array
from mpgluon_tools.deployment.folding import fold
from mpgluon_tools.deployment.recording import Recording, record

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import gluon
from mxnet.base import MXNetError
from mxnet.gluon import nn

__all__ = ["InferenceNetwork", "inference_network"]

_logger = logging.getLogger("mpgluon.deployment")

_FORMATS = {str(fmt): fmt for fmt in (FLOAT32, FLOAT16, BFLOAT16)}
_PRODUCTS = ("Convolution", "FullyConnected")  # whose weights oneDNN takes in bfloat16
_STATIC = {"static_alloc": True, "static_shape": True}
_POLICIES = {"float16": Policy.parse("float16"), "bfloat16": Policy.parse("mixed_bfloat16")}


class InferenceNetwork(gluon.HybridBlock):
    """A block that computes a recording, operator by operator.

    Like any other HybridBlock it can be called, cast, hybridized and exported. Its parameters have
    shapes and no values; :func:`inference_network` sets them.

    Parameters
    ----------
    recording : Recording
    prefix : str
        Prefix of the names of its parameters.

    Attributes
    ----------
    fused : bool
        Whether oneDNN computes convolutions together with the operators that follow them.
    """

    def __init__(self, recording: Recording, prefix: str = "") -> None:
        super().__init__(prefix=prefix)
        self.fused = False
        self._recording = recording
        # BatchNorm is a block of its own, which keeps its parameters in FP32 under every cast.
        self._norms: dict[Node, nn.BatchNorm] = {}
        # The name of each parameter's value in the recording.
        self._names: dict[gluon.Parameter, str] = {}
        weights = {
            entry.node.name
            for node in recording.graph.nodes
            if node.operator in _PRODUCTS
            for entry in node.inputs[1:]
        }
        used = {entry.node for entry in recording.graph.heads}
        with self.name_scope():
            for node in recording.graph.nodes:
                values = recording.values_after_data(node)
                if node.operator != "BatchNorm" or values is None:
                    used.update(entry.node for entry in node.inputs)
                    continue
                used.add(node.inputs[0].node)
                norm = _batch_norm(node, prefix, channels=len(values[0]))
                parameters = (norm.gamma, norm.beta, norm.running_mean, norm.running_var)
                for parameter, entry in zip(parameters, node.inputs[1:]):
                    self._names[parameter] = entry.node.name
                self._norms[node] = norm
                self.register_child(norm)
            for name in (node.name for node in recording.graph.nodes if node in used):
                if name in recording.values:
                    shape = recording.values[name].shape
                    # A cast leaves those without gradient in FP32.
                    trained = {} if name not in recording.given else {"grad_req": "null"}
                    parameter = self.params.get(name.removeprefix(prefix), shape=shape, **trained)
                    self._reg_params[name] = parameter
                    self._names[parameter] = name
        self._weights = [
            p for p, name in self._names.items() if name in weights.difference(recording.given)
        ]

    def set_values(
        self, values: Mapping[str, npt.NDArray[np.float32]], ctx: Sequence[mx.Context]
    ) -> None:
        """Set every parameter, rounded once to its own format."""
        self.initialize(mx.init.Zero(), ctx=list(ctx))
        for parameter, name in self._names.items():
            dtype = np.dtype(parameter.dtype).name
            set_value(parameter, cast(from_numpy(values[name]), dtype))

    def keep_weights_in(self, dtype: str, *, rounded_to: FloatFormat = FLOAT32) -> None:
        """Keep weights and biases of convolutions and dense layers, rounded already, in a dtype.

        Parameters
        ----------
        dtype : {"float32", "float16", "bfloat16"}
            ``"bfloat16"`` rounds now, and not in each call. ``"float32"`` takes twice the memory of
            16 bits, and each call takes the numbers as they are.
        rounded_to : FloatFormat, optional
            Of FP32 parameters that are kept in FP32, the format of their numbers.
        """
        for parameter in self._weights:
            values = cast(arrays_of(parameter)[0], dtype)
            if rounded_to != FLOAT32:
                values = round_array(values, rounded_to)
            replace_value(parameter, values, BFLOAT16_DTYPE if dtype == "bfloat16" else dtype)
            fp32.mark_rounded(parameter)

    def hybrid_forward(self, F: Any, *inputs: Any, **parameters: Any) -> Any:  # noqa: N803
        """Compute the recording; in a cast block ``F`` is the cast's stand-in."""
        variables = {**dict(zip(self._recording.inputs, inputs)), **parameters}
        graph = self._recording.graph
        outputs = replay(graph, F, variables, blocks=self._norms, prefix=self.prefix)
        results = [outputs[entry.key] for entry in graph.heads]
        return results[0] if len(results) == 1 else results


def _batch_norm(node: Node, prefix: str, *, channels: int) -> nn.BatchNorm:
    options = node.options
    return nn.BatchNorm(
        axis=options.get("axis", 1),
        epsilon=options["eps"],
        scale=not options["fix_gamma"],
        use_global_stats=True,
        in_channels=channels,
        prefix=f"{node.name.removeprefix(prefix)}_",
    )


def inference_network(
    net: gluon.HybridBlock,
    dtype: str = "bfloat16",
    *,
    inputs: Sequence[str] = ("data",),
    ctx: Union[mx.Context, Sequence[mx.Context], None] = None,
    fuse_for: Union[mx.nd.NDArray, Sequence[mx.nd.NDArray], None] = None,
) -> InferenceNetwork:
    """Return a new network with the predictions of ``net``, in 16 bits and without BatchNorms.

    BatchNorms that follow a convolution or dense layer are folded into it, from FP32 values, and
    weights that are computed from parameters alone are computed once; the result is rounded to
    ``dtype`` once. Other BatchNorms stay, in FP32. Dropout is left out. The new network takes FP32
    input, returns FP32, is hybridized, and shares nothing with ``net``.

    Parameters
    ----------
    net : gluon.HybridBlock
        Plain, cast or autocast, with values; of a cast network, its FP32 masters.
    dtype : {"bfloat16", "float16", "float32"}
        ``"bfloat16"`` is for a CPU; on one with instructions for it, weights and biases of
        convolutions and dense layers are stored in it, the others in FP32. ``"float16"``
        parameters take half the memory on a GPU. On a CPU without instructions for the format,
        convolutions and dense layers have its numbers in FP32 arrays. ``"float32"`` folds
        only.
    inputs : sequence of str
        A name for each argument of the network.
    ctx : Context or sequence of Context, optional
        The devices of the new parameters; by default the devices of ``net``.
    fuse_for : NDArray, or sequence of one for each argument, optional
        Typical images. With them, on a CPU in FP32 and native bfloat16, oneDNN's fusion of
        convolutions with the operators after them is tried: up to seven times as fast, and wrong
        in some networks. It is kept only if the results on these images are right, see ``fused``.
        Other images and batch sizes are possible later.

    Returns
    -------
    InferenceNetwork

    Raises
    ------
    ValueError
        If ``dtype`` is none of these, or a parameter has no values yet.
    TypeError
        If ``net`` is not a ``HybridBlock``.
    PrecisionError
        If a weight is larger than float16's largest number.

    Notes
    -----
    With folding, other values are rounded, so results differ in their last bits from ``net``
    under ``cast_block``. :func:`agreement` measures the effect on predictions.
    """
    if dtype not in _FORMATS:
        raise ValueError(f"dtype must be one of {', '.join(_FORMATS)}; received {dtype!r}")
    recording = fold(record(net, inputs), _FORMATS[dtype])
    recording.check_range(_FORMATS[dtype])
    parameters = net.collect_params().values()
    if ctx is None:
        ctx = next(iter(parameters)).list_ctx() if parameters else [mx.current_context()]
    result = InferenceNetwork(recording, prefix=net.prefix)
    if dtype in _POLICIES:
        apply_policy(result, _POLICIES[dtype])
    devices = [ctx] if isinstance(ctx, mx.Context) else list(ctx)
    result.set_values(recording.values, devices)
    on_cpu = all(device.device_type == "cpu" for device in devices)
    if dtype == "bfloat16" and bfloat16.has_native_bfloat16():
        result.keep_weights_in("bfloat16")
    elif dtype in _POLICIES and on_cpu and kernels.available():
        result.keep_weights_in("float32", rounded_to=_FORMATS[dtype])
    result.hybridize(**_STATIC)
    emulated = dtype in _POLICIES and policy_arithmetic(_POLICIES[dtype], "cpu").kind == "emulated"
    if fuse_for is not None and not emulated and devices[0].device_type == "cpu":
        images = [fuse_for] if isinstance(fuse_for, mx.nd.NDArray) else list(fuse_for)
        in_fp32 = InferenceNetwork(recording, prefix=net.prefix)
        in_fp32.set_values(recording.values, devices)
        # Imperatively, MXNet cannot infer the batch of a recurrent layer's first states.
        in_fp32.hybridize()
        _fuse_where_right(result, in_fp32, images)
    return result


def _fuse_where_right(
    net: InferenceNetwork, in_fp32: InferenceNetwork, images: Sequence[mx.nd.NDArray]
) -> None:
    """Fuse a network's operators with oneDNN if its error does not grow.

    MXNet 1.9.1 fuses some graphs wrongly: the result of CIFAR ResNet-20 v2 is then wrong by a
    third, and SE-ResNeXt-50 fails. In 14 other networks of the zoos the error was never more than
    1.2 times that without fusion, nor, in FP32, than 1e-4 of the norm.
    """
    reference = _all_outputs(in_fp32, images)
    scale = np.linalg.norm(reference)

    def error() -> float:
        return float(np.linalg.norm(_all_outputs(net, images) - reference) / scale)

    # Above an error of an eighth, wrong and right results could not be distinguished.
    allowed = min(max(2 * error(), 2.0**-10), 2.0**-3)
    net.hybridize(backend="MKLDNN", **_STATIC)
    try:
        fused_error = error()
        why = f"the result was off by {fused_error:.2g}"
        net.fused = fused_error <= allowed
    except MXNetError as failure:
        why = str(failure).strip().splitlines()[-1]
    if not net.fused:
        net.hybridize(**_STATIC)
        _logger.info("oneDNN's fusion is left out: %s", why)


def _all_outputs(net: InferenceNetwork, images: Sequence[mx.nd.NDArray]) -> npt.NDArray[np.float64]:
    """Return the elements of all outputs in one row."""
    outputs = arrays_in((net(*images),))
    return np.concatenate([array.asnumpy().astype(np.float64).ravel() for array in outputs])
