"""Whether a network will train well with this Trainer and these labels."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Optional

from mpgluon.base.findings import Finding, error, examples, note, ok, warning
from mpgluon.cast.arithmetic import policy_arithmetic
from mpgluon.cast.block import blocks_of, device_type_of
from mpgluon.cast.forward import forward_of
from mpgluon.cast.network_cast import NetworkCast, cast_of
from mpgluon.cast.plan import BATCH_NORMS, is_hybrid
from mpgluon.errors import PrecisionError
from mpgluon.formats.loss_scale import NoLossScale
from mpgluon.graph.nodes import Graph
from mpgluon.graph.output_operators import HAS_GRAD_SCALE, OWN_GRADIENT
from mpgluon.kernels.dtypes import dtype_name
from mpgluon.trainer.master_keeper import MasterKeeper
from mpgluon.trainer.step import TrainerState
from mpgluon.updates import gluon_trainer
from mpgluon.updates.rounded_updates import NEAREST, rounding_of
from mpgluon.updates.weight_findings import (
    float16_parameters,
    narrow_gradients,
    on_loss_scale,
    on_masters,
    on_plain_cast,
    plainly_cast,
)

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn

__all__ = ["training"]

_LAST_COUNTED = 2**11  # float16 holds every integer up to here


def training(net: Any, trainer: Any, labels: Any) -> Iterator[Finding]:
    """Yield findings; see :func:`mpgluon_tools.diagnostics.doctor.check_training`."""
    if net is None and trainer is None and labels is None:
        raise ValueError("give check_training a net, a trainer or labels; it received none")
    for value, kind, name in ((net, gluon.Block, "net"), (trainer, gluon.Trainer, "trainer")):
        if value is not None and not isinstance(value, kind):
            raise TypeError(
                f"{name} must be a gluon.{kind.__name__}, received {type(value).__name__}"
            )
    arrays = _label_arrays(labels)
    subject = _Training.of(net, trainer)
    yield from subject.cast_findings()
    yield from subject.shared_parameters()
    yield from subject.batch_norm()
    yield from subject.sync_batch_norm()
    yield from subject.output()
    if trainer is not None:
        yield from subject.masters()
        yield from subject.loss_scale()
    yield from subject.own_gradients()
    if trainer is not None:
        yield from subject.kvstore()
        yield from subject.optimizer()
    yield from _contrib()
    yield from _labels(arrays)


@dataclass(frozen=True)
class _Training:
    """A network and its Trainer, either of which may be missing."""

    blocks: list[gluon.Block]
    parameters: list[gluon.Parameter]
    trainer: Optional[gluon.Trainer]
    cast: Optional[NetworkCast]
    plain: list[gluon.Parameter]  # float16 ones that mpgluon did not cast

    @classmethod
    def of(cls, net: Optional[gluon.Block], trainer: Optional[gluon.Trainer]) -> _Training:
        parameters = []
        if net is not None:
            parameters = list(net.collect_params().values())
        elif trainer is not None:
            parameters = gluon_trainer.parameters_of(trainer)
        return cls(
            blocks=[] if net is None else list(blocks_of(net)),
            parameters=parameters,
            trainer=trainer,
            cast=next((cast for cast in map(cast_of, parameters) if cast is not None), None),
            plain=plainly_cast(parameters),
        )

    @property
    def devices(self) -> list[set[mx.Context]]:
        """The devices of each parameter; none before initialization."""
        return [
            set(parameter.list_ctx())
            for parameter in self.parameters
            if parameter._data is not None or parameter._deferred_init
        ]

    @property
    def device_count(self) -> int:
        return max(map(len, self.devices), default=0)

    @property
    def computes_float16(self) -> bool:
        """Whether gradients pass through float16, or less, where small ones become zero."""
        return narrow_gradients(self.parameters) is not None

    @property
    def scaler(self) -> Any:
        """The object that the Trainer asks whether to skip a step; ``None`` for no loss scale."""
        scaler = gluon_trainer.loss_scaler_of(self.trainer)
        if isinstance(scaler, TrainerState) and isinstance(scaler.loss_scale, NoLossScale):
            return None
        return None if isinstance(scaler, MasterKeeper) else scaler

    def cast_findings(self) -> Iterator[Finding]:
        on_cpu = any(device.device_type == "cpu" for group in self.devices for device in group)
        yield from on_plain_cast(self.parameters, on_cpu=on_cpu)
        if self.cast is not None:
            policy = self.cast.policy
            yield ok(
                "cast",
                f"parameters {policy.param_dtype}, computation {policy.compute_dtype}, "
                f"result {policy.output_dtype}",
            )
            if policy.compute_dtype == "bfloat16" and _is_emulated(self.cast):
                yield note(
                    "speed",
                    "bfloat16 is emulated: this processor has no instructions for it, or the "
                    "policy asks for it",
                    "each result is computed in FP32 and rounded once; a hybridized step takes a "
                    "little longer than FP32's",
                    "for speed train in float32 here, or in bfloat16 on a processor that has it",
                )
        elif not self.plain and (self.parameters or self.trainer):
            yield note(
                "cast",
                "nothing is in 16 bits",
                "the network trains in FP32, with no saving of time or memory",
                'mpgluon.cast_block(net), or amp.autocast(net, "bfloat16"), before the Trainer is '
                "made",
            )

    def shared_parameters(self) -> Iterator[Finding]:
        """Yield the first layer that is not cast although a parameter of its is."""
        for block in self.blocks:
            for parameter in block._reg_params.values():
                cast = cast_of(parameter) if np.dtype(parameter.dtype) == np.float16 else None
                if cast is None or forward_of(block) or block in blocks_of(cast.root):
                    continue
                yield error(
                    "sharing",
                    f"{block.name} in {self.blocks[0].name} is not cast, and shares "
                    f"{parameter.name} with {cast.root.name}, which is cast to {cast.policy}",
                    "MXNet meets FP32 data and a float16 parameter: Incompatible attr",
                    f"mpgluon.cast_block({self.blocks[0].name}) too, or amp.autocast both, which "
                    "leaves parameters in FP32",
                )
                return

    def batch_norm(self) -> Iterator[Finding]:
        norms = [block for block in self.blocks if isinstance(block, BATCH_NORMS)]
        names = [b.name for b in norms if float16_parameters(b._reg_params.values())]
        if names:
            yield error(
                "BatchNorm",
                f"float16 parameters or statistics in {examples(names)}",
                "MXNet's operator takes FP32 ones only, and running means of small values would "
                "stall",
                "before the cast, for each of these layers: "
                'for p in layer.collect_params().values(): p.cast("float32"); '
                "cast_block and net.cast leave them alone",
            )

    def sync_batch_norm(self) -> Iterator[Finding]:
        norms = [b for b in self.blocks if isinstance(b, gluon.contrib.nn.SyncBatchNorm)]
        if not norms:
            return
        names, devices = examples([norm.name for norm in norms]), self.device_count
        if self.plain:
            yield error(
                "SyncBatchNorm",
                f"{names} in a network cast with net.cast",
                "its operator takes FP32 data only: data type do not match specified type",
                "mpgluon.cast_block(net) on a network in FP32 passes FP32 data to it",
            )
        wrong = [norm for norm in norms if int(norm._kwargs["ndev"]) != devices]
        if wrong and devices:
            count = int(wrong[0]._kwargs["ndev"])
            yield error(
                "SyncBatchNorm",
                f"{wrong[0].name} has num_devices={count}, the network is on {devices}",
                "it waits forever for devices that take no part"
                if count > devices
                else "devices are not synchronized with each other",
                f"SyncBatchNorm(num_devices={devices}); its default is all GPUs of the machine",
            )
        elif not self.plain:
            yield ok("SyncBatchNorm", f"{names} over {devices} devices")

    def output(self) -> Iterator[Finding]:
        by_policy = self.cast is not None and self.cast.policy.output_dtype == "float16"
        if not by_policy and not self.plain:
            return
        yield warning(
            "logits",
            "the network returns float16"
            if by_policy
            else "the network returns float16 unless a layer of its own casts the result",
            "softmax and the loss sum exponentials, on a CPU in float16 itself, and metrics "
            "overflow at 65504",
            'Policy(..., output_dtype="float32")'
            if by_policy
            else 'mpgluon.cast_block(net) returns FP32; or loss_fn(net(images).astype("float32"), '
            "…)",
        )

    def masters(self) -> Iterator[Finding]:
        rounding = rounding_of(self.trainer) or NEAREST
        yield from on_masters(self.trainer, rounding.way)

    def loss_scale(self) -> Iterator[Finding]:
        scaler = self.scaler
        if type(scaler).__module__.startswith("mxnet.contrib.amp"):
            yield error(
                "loss scale",
                "the Trainer has the loss scale of mxnet.contrib.amp",
                "it fails on float16 and FP32 gradients together, looks at the first device only, "
                "and backs off a step late",
                "from mpgluon import amp instead, without amp.init(); a new Trainer, then "
                "amp.init_trainer(trainer)",
            )
        elif scaler is None and self.computes_float16:
            yield from on_loss_scale(self.parameters)
        elif scaler is None:
            yield ok("loss scale", "none, and none is needed")
        elif isinstance(scaler, TrainerState):
            yield ok("loss scale", "mpgluon's")
        else:
            yield note(
                "loss scale",
                f"the Trainer asks an object of class {type(scaler).__name__} whether to skip a "
                "step",
                "it is neither mpgluon's nor MXNet's",
                "amp.init_trainer on a new Trainer, unless this is meant",
            )

    def own_gradients(self) -> Iterator[Finding]:
        """Yield operators that ignore their gradients, and that no loss scale reaches."""
        is_scaled = isinstance(self.scaler, TrainerState) if self.trainer else self.computes_float16
        names = [
            f"{operator} in {block.name}"
            for block in self.blocks
            for operator in sorted(OWN_GRADIENT.keys() & _operators_named(block))
            if operator not in HAS_GRAD_SCALE or _is_compiled(block)
        ]
        if is_scaled and names:
            yield error(
                "own gradient",
                f"{examples(names)} ignores the gradient that it receives",
                "no loss scale reaches the network's gradients, and amp.scale_loss refuses such a "
                "loss",
                "let the network return what goes into the operator, and use a loss of gluon.loss; "
                "call hybridize(False) on the block if the operator has a grad_scale; or "
                'amp.init_trainer(trainer, loss_scale="none")',
            )

    def kvstore(self) -> Iterator[Finding]:
        if self.computes_float16 and gluon_trainer.will_update_in_kvstore(self.trainer):
            yield error(
                "kvstore",
                "the Trainer updates weights inside its kvstore",
                "no step with infinite gradients can be skipped there, and a changed loss scale "
                "raises",
                "gluon.Trainer(…, update_on_kvstore=False), or amp.init_trainer right after "
                "creating one that was not told (the default on several devices is True)",
            )

    def optimizer(self) -> Iterator[Finding]:
        """Yield optimizers that make NaN, or whose updates differ from device to device."""
        if self.trainer is None:
            return
        optimizer = gluon_trainer.optimizer_of(self.trainer)
        name = type(optimizer).__name__
        if name in ("Nadam", "SGLD") and self.device_count > 1:
            yield error(
                "optimizer",
                f"{name} on {self.device_count} devices",
                "it keeps one product of momenta for all, or draws other noise on each device: the "
                "weights of the devices drift apart",
                "Adam or SGD, or one device",
            )
        if name == "Adamax" and optimizer.wd == 0:
            yield warning(
                "optimizer",
                "Adamax without weight decay",
                "it divides by the largest gradient so far, so a weight becomes NaN whose gradient "
                "is 0 in the first step, as gradients are that round to 0",
                "a weight decay (wd), or Adam",
            )
        parameters = gluon_trainer.parameters_of(self.trainer)
        still = [p.name for p in parameters if p.lr_mult == 0 and p.grad_req != "null"]
        if name in ("FTML", "Ftrl") and still:
            yield error(
                "optimizer",
                f"{name} with lr_mult=0 for {examples(still)}",
                "it divides by the learning rate: the weights become NaN",
                'grad_req="null"',
            )


def _is_emulated(cast: NetworkCast) -> bool:
    try:
        return policy_arithmetic(cast.policy, device_type_of(cast.root)).kind == "emulated"
    except PrecisionError:  # on a GPU, which computes no bfloat16
        return False


def _is_compiled(block: gluon.Block) -> bool:
    """Whether the block's gradients are fixed before a loss is scaled."""
    return isinstance(block, gluon.SymbolBlock) or bool(getattr(block, "_active", False))


def _operators_named(block: gluon.Block) -> set[str]:
    """Return the operators of an imported graph; else all names in a block's forward method."""
    if isinstance(block, gluon.SymbolBlock):
        _, graph = block._cached_graph
        return {node.operator for node in Graph.read(graph).nodes}
    if isinstance(block, nn.HybridLambda):  # made from an operator's name, or a function
        return {block._func_name, *_names_in(block._func)}
    return _names_in(type(block).hybrid_forward if is_hybrid(block) else type(block).forward)


def _names_in(function: Any) -> set[str]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return set(code.co_names) if code is not None else set()


def _contrib() -> Iterator[Finding]:
    contrib = sys.modules.get("mxnet.contrib.amp.amp")
    if getattr(contrib, "_amp_initialized", False):
        yield error(
            "contrib.amp",
            "mxnet.contrib.amp.init() was called in this process",
            "it has patched mx.nd and mx.sym for good: operators cast their inputs without "
            "mpgluon, and after init('float16') an FP32 convolution on a CPU fails",
            "remove the call and start again: from mpgluon import amp needs no init",
        )


def _label_arrays(labels: Any) -> list[Any]:
    if labels is None:
        return []
    arrays = list(labels) if isinstance(labels, (list, tuple)) else [labels]
    for array in arrays:
        if not isinstance(array, (mx.nd.NDArray, np.ndarray)):
            raise TypeError(
                f"labels must be NDArrays or NumPy arrays, received one of {type(array).__name__}"
            )
    return arrays


def _labels(arrays: list[Any]) -> Iterator[Finding]:
    dtypes = [dtype_name(array) or "" for array in arrays]
    narrow = [array for array, dtype in zip(arrays, dtypes) if dtype == "float16"]
    if not narrow:
        if arrays:
            yield ok("labels", ", ".join(sorted(set(dtypes))))
        return
    values = [one.asnumpy() if isinstance(one, mx.nd.NDArray) else one for one in narrow]
    largest = max(float(np.abs(one.astype(np.float64)).max(initial=0)) for one in values)
    rounded = largest >= _LAST_COUNTED
    yield Finding(
        "error" if rounded else "warning",
        "labels",
        f"float16, the largest {largest:g}",
        "float16 counts to 2048 only: 2049 has become 2048 already"
        if rounded
        else "float16 counts to 2048 only, and rounds targets of a regression to 11 bits",
        "leave labels as they are, int32 or float32, whatever the network's format",
    )
