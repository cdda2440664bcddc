"""Facts about a network, its Trainer and its labels, gathered without judging them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Optional

from mpgluon.cast.arithmetic import policy_arithmetic
from mpgluon.cast.block import blocks_of, device_type_of
from mpgluon.cast.network_cast import NetworkCast, cast_of
from mpgluon.cast.plan import BATCH_NORMS, is_hybrid
from mpgluon.errors import PrecisionError
from mpgluon.formats.loss_scale import NoLossScale
from mpgluon.formats.policy import Policy
from mpgluon.graph.nodes import Graph
from mpgluon.graph.output_operators import HAS_GRAD_SCALE, OWN_GRADIENT
from mpgluon.kernels.dtypes import dtype_name
from mpgluon.trainer.master_keeper import MasterKeeper
from mpgluon.trainer.step import TrainerState
from mpgluon.updates import gluon_trainer
from mpgluon.updates.float16_weights import (
    float16_weights,
    obstacle_without_masters,
    plainly_cast,
)
from mpgluon.updates.masters import MasterWeights
from mpgluon.updates.rounded_updates import RoundedUpdates, grid_weights

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn

__all__ = ["LabelFacts", "TrainerFacts", "TrainingFacts", "gather"]


@dataclass(frozen=True)
class TrainerFacts:
    """Facts about a Trainer that matter to 16 bits."""

    optimizer: str = "SGD"
    multi_precision: bool = True
    float16_weights: tuple[str, ...] = ()  # names of those that it trains
    bfloat16_weights: tuple[str, ...] = ()  # names too; in FP32 arrays
    update_rounding: str = "nearest"  # of those, without masters
    obstacle: Optional[str] = None  # why it cannot update float16 weights without masters
    # Its loss scale: "mpgluon", "mpgluon, none", "contrib", "none", or the name of a class.
    scaler: str = "mpgluon"
    keeps_masters: bool = True  # mpgluon's, not MXNet's
    updates_in_kvstore: bool = False  # or will from the first step on


@dataclass(frozen=True)
class LabelFacts:
    """A batch of labels: its format, and its largest magnitude."""

    dtype: str
    largest: float


@dataclass(frozen=True)
class TrainingFacts:
    """Facts about a network, its Trainer and its labels."""

    policy: Optional[Policy] = None  # of mpgluon's cast
    arithmetic: str = "native"  # or "emulated": how this device computes products in the format
    plainly_cast: tuple[str, ...] = ()  # float16 parameters that mpgluon did not cast
    float16_batch_norms: tuple[str, ...] = ()  # layers with a float16 parameter
    sync_batch_norms: tuple[tuple[str, int], ...] = ()  # and their number of devices
    # Blocks, and an operator in each that ignores its gradient, and that no loss scale reaches.
    own_gradients: tuple[tuple[str, str], ...] = ()
    device_types: frozenset[str] = frozenset()  # "cpu", "gpu"; empty before initialization
    devices: int = 0
    trainer: Optional[TrainerFacts] = None
    labels: tuple[LabelFacts, ...] = ()
    contrib_initialized: bool = False  # mxnet.contrib.amp.init was called in this process

    @property
    def computes_float16(self) -> bool:
        """Whether gradients pass through float16, where small ones become zero."""
        by_policy = self.policy is not None and self.policy.compute_dtype == "float16"
        return by_policy or bool(self.plainly_cast)


def gather(net: Any, trainer: Any, labels: Any) -> TrainingFacts:
    """Return the facts; see :func:`mpgluon.diagnostics.doctor.check_training`."""
    if net is None and trainer is None and labels is None:
        raise ValueError("give check_training a net, a trainer or labels; it received none")
    for value, kind, name in ((net, gluon.Block, "net"), (trainer, gluon.Trainer, "trainer")):
        if value is not None and not isinstance(value, kind):
            raise TypeError(
                f"{name} must be a gluon.{kind.__name__}, received {type(value).__name__}"
            )
    blocks = list(blocks_of(net)) if net is not None else []
    parameters: list[gluon.Parameter] = []
    if net is not None:
        parameters = list(net.collect_params().values())
    elif trainer is not None:
        parameters = gluon_trainer.parameters_of(trainer)
    casts = [found for found in map(cast_of, parameters) if found is not None]
    devices = [set(parameter.list_ctx()) for parameter in parameters if _has_devices(parameter)]
    contrib = sys.modules.get("mxnet.contrib.amp.amp")
    return TrainingFacts(
        policy=casts[0].policy if casts else None,
        arithmetic=_arithmetic_of(casts[0]) if casts else "native",
        plainly_cast=_names(plainly_cast(parameters)),
        float16_batch_norms=tuple(
            block.name
            for block in blocks
            if isinstance(block, BATCH_NORMS) and any(map(_is_float16, block._reg_params.values()))
        ),
        sync_batch_norms=tuple(
            (block.name, int(block._kwargs["ndev"]))
            for block in blocks
            if isinstance(block, gluon.contrib.nn.SyncBatchNorm)
        ),
        own_gradients=tuple(
            (block.name, operator)
            for block in blocks
            for operator in sorted(OWN_GRADIENT.keys() & _operators_named(block))
            if operator not in HAS_GRAD_SCALE or _is_compiled(block)
        ),
        device_types=frozenset(device.device_type for group in devices for device in group),
        devices=max(map(len, devices), default=0),
        trainer=_trainer_facts(trainer) if trainer is not None else None,
        labels=tuple(_label_facts(one) for one in _label_arrays(labels)),
        contrib_initialized=bool(getattr(contrib, "_amp_initialized", False)),
    )


def _arithmetic_of(network_cast: NetworkCast) -> str:
    """Return the arithmetic of a cast network's device; "native" also if it has none."""
    try:
        return policy_arithmetic(network_cast.policy, device_type_of(network_cast.root)).kind
    except PrecisionError:  # its own finding
        return "native"


def _has_devices(parameter: gluon.Parameter) -> bool:
    return parameter._data is not None or bool(parameter._deferred_init)


def _is_float16(parameter: gluon.Parameter) -> bool:
    return bool(np.dtype(parameter.dtype) == np.float16)


def _names(parameters: Iterable[gluon.Parameter]) -> tuple[str, ...]:
    return tuple(parameter.name for parameter in parameters)


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


def _trainer_facts(trainer: gluon.Trainer) -> TrainerFacts:
    optimizer = gluon_trainer.optimizer_of(trainer)
    updaters = gluon_trainer.updaters_of(trainer)
    return TrainerFacts(
        optimizer=type(optimizer).__name__,
        multi_precision=bool(optimizer.multi_precision),
        float16_weights=_names(float16_weights(trainer)),
        bfloat16_weights=_names(grid_weights(gluon_trainer.parameters_of(trainer))),
        update_rounding=next(
            (one.rounding.way for one in updaters if isinstance(one, RoundedUpdates)), "nearest"
        ),
        obstacle=None if optimizer.multi_precision else obstacle_without_masters(optimizer),
        scaler=_scaler(gluon_trainer.loss_scaler_of(trainer)),
        keeps_masters=isinstance(gluon_trainer.loss_scaler_of(trainer), MasterKeeper)
        or any(isinstance(updater, MasterWeights) for updater in updaters),
        updates_in_kvstore=gluon_trainer.will_update_in_kvstore(trainer),
    )


def _scaler(scaler: Any) -> str:
    if scaler is None or isinstance(scaler, MasterKeeper):
        return "none"
    if isinstance(scaler, TrainerState):
        none = isinstance(scaler.loss_scale, NoLossScale)
        return "mpgluon, none" if none else "mpgluon"
    of_contrib = type(scaler).__module__.startswith("mxnet.contrib.amp")
    return "contrib" if of_contrib else type(scaler).__name__


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


def _label_facts(array: Any) -> LabelFacts:
    values = array.asnumpy() if isinstance(array, mx.nd.NDArray) else array
    return LabelFacts(
        dtype=dtype_name(array) or "",
        largest=float(np.abs(values.astype(np.float64)).max(initial=0)),
    )
