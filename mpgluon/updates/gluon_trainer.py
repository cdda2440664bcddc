"""Gluon's Trainer from inside: the one module that touches its private fields.

Each function reads one fact about a Trainer or makes one small change to it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Callable

from mpgluon.errors import TrainerStateError

import mxnet as mx
from mxnet import gluon
from mxnet.ndarray import NDArray


def loss_scaler_of(trainer: gluon.Trainer) -> Any:
    """Return the object whose ``has_overflow`` the Trainer calls before an update, or ``None``."""
    return getattr(trainer, "_amp_loss_scaler", None)


def set_loss_scaler(trainer: gluon.Trainer, state: Any) -> None:
    """Make the Trainer call an object's ``has_overflow`` before each update."""
    trainer._amp_loss_scaler = state


def parameters_of(trainer: gluon.Trainer) -> list[gluon.Parameter]:
    """Return the parameters by index: the order of their names if they came in a dict."""
    return list(trainer._params)


def is_statistic(parameter: gluon.Parameter) -> bool:
    """Whether a parameter is none of the optimizer's, such as a running mean of BatchNorm."""
    return not parameter._differentiable


def trained(parameters: Iterable[gluon.Parameter]) -> list[gluon.Parameter]:
    """Return the parameters that have a gradient; raise TrainerStateError if there is none."""
    with_gradient = [parameter for parameter in parameters if parameter.grad_req != "null"]
    if not with_gradient:
        raise TrainerStateError(
            "this Trainer has no parameter with a gradient: all are frozen (grad_req='null'), so "
            "a step changes nothing"
        )
    return with_gradient


def devices_of(trainer: gluon.Trainer) -> list[mx.Context]:
    """Return the devices of the parameters."""
    return list(trainer._contexts)


def optimizer_of(trainer: gluon.Trainer) -> mx.optimizer.Optimizer:
    """Return the optimizer, which ``load_states`` may have replaced."""
    return trainer._optimizer


def update_counts(trainer: gluon.Trainer) -> int:
    """Return the number of updates so far, each of one parameter on one device."""
    counts = trainer._optimizer._all_index_update_counts.values()
    return sum(sum(per_parameter.values()) for per_parameter in counts)


def updaters_of(trainer: gluon.Trainer) -> list[mx.optimizer.Updater]:
    """Return the objects that apply the optimizer, one for each device."""
    return list(trainer._updaters)


def set_updaters(trainer: gluon.Trainer, updaters: Sequence[mx.optimizer.Updater]) -> None:
    """Replace the objects that apply the optimizer, one for each device."""
    trainer._updaters = list(updaters)


def scale_of(trainer: gluon.Trainer) -> float:
    """Return the user's factor for gradients, which Horovod too uses to average."""
    return float(trainer._scale)


def begin(trainer: gluon.Trainer) -> None:
    """Begin as the first step does: copy parameters to all devices."""
    if not trainer._kv_initialized:
        trainer._init_kvstore()
    if trainer._params_to_init:
        trainer._init_params()


def reduces_gradients(trainer: gluon.Trainer) -> bool:
    """Whether a step replaces gradients by their sum over devices; known once it has begun."""
    return trainer._kvstore is not None or _reduces_in_its_own_way(trainer)


def processes_of(trainer: gluon.Trainer) -> int:
    """Return over how many processes a kvstore sums gradients; known once the Trainer has begun."""
    return 1 if trainer._kvstore is None else int(trainer._kvstore.num_workers)


def is_alone(trainer: gluon.Trainer) -> bool:
    """Whether no other process sums gradients with this one; known once the Trainer has begun."""
    return processes_of(trainer) == 1 and not _reduces_in_its_own_way(trainer)


def _reduces_in_its_own_way(trainer: gluon.Trainer) -> bool:
    return type(trainer)._allreduce_grads is not gluon.Trainer._allreduce_grads  # Horovod's


def sums_locally(trainer: gluon.Trainer) -> bool:
    """Whether MXNet's own kvstore sums gradients in this process, without NCCL or compression."""
    kind = getattr(trainer._kvstore, "type", None)
    return kind in ("local", "device") and not trainer._compression_params


@contextmanager
def kvstore_replaced(trainer: gluon.Trainer, replace: Callable[[Any], Any]) -> Iterator[None]:
    """Inside the block, let the Trainer use what ``replace`` makes of its kvstore."""
    kvstore = trainer._kvstore
    trainer._kvstore = replace(kvstore)
    try:
        yield
    finally:
        trainer._kvstore = kvstore


def updates_in_kvstore(trainer: gluon.Trainer) -> bool:
    """Whether the kvstore holds the optimizer and its state, which cannot be read there."""
    return bool(trainer._update_on_kvstore)


def will_update_in_kvstore(trainer: gluon.Trainer) -> bool:
    """Whether the kvstore will hold the optimizer, as far as that is known before the first step.

    MXNet turns it off itself for a ``"local"`` store with an array of more than 2**24 elements.
    """
    if trainer._kv_initialized:
        return updates_in_kvstore(trainer)
    asked_for = trainer._kvstore_params["update_on_kvstore"]
    if asked_for is not None:
        return bool(asked_for)
    return len(trainer._contexts) > 1 and trainer._kvstore_params["kvstore"] is not None


def refuse_a_late_beginning(trainer: gluon.Trainer) -> None:
    """Raise TrainerStateError if the Trainer would race with other processes, or train alone."""
    kvstore = trainer._kvstore_params["kvstore"]
    named = kvstore.lower() if isinstance(kvstore, str) else ""
    plugged_in = {"horovod", "byteps"} | mx.kvstore.KVStoreBase.kv_registry.keys()
    if named in plugged_in and len(trainer._contexts) == 1:
        raise TrainerStateError(
            f"with one device MXNet ignores the name of the kvstore, {kvstore!r}: each process "
            "would train alone; pass the kvstore itself, such as "
            "mpgluon.distributed.MpiKVStore(), or use Horovod's own hvd.DistributedTrainer"
        )
    kind = kvstore if isinstance(kvstore, str) else getattr(kvstore, "type", "")
    if "dist" in kind and not trainer._kv_initialized:
        raise TrainerStateError(
            f"with kvstore {kind!r} this Trainer would set it up inside its first step, where the "
            "processes race and every other run goes wrong; call "
            "mpgluon.distributed.begin(trainer) before init_trainer and before the first forward "
            "pass, or use mpgluon.distributed.MpiKVStore"
        )


def keep_updates_out_of_the_kvstore(trainer: gluon.Trainer) -> None:
    """Make the Trainer itself update weights, also on several devices.

    Raises
    ------
    TrainerStateError
        If its user has asked for the opposite, or it has begun so; nothing is changed then.
    """
    asked_for = trainer._kvstore_params["update_on_kvstore"]
    if asked_for or (trainer._kv_initialized and trainer._update_on_kvstore):
        raise TrainerStateError(
            "this Trainer updates weights inside its kvstore (update_on_kvstore=True), where a "
            "step with infinite gradients cannot be skipped; create it with "
            "update_on_kvstore=False, and call init_trainer before the first step"
        )
    if not trainer._kv_initialized:
        trainer._kvstore_params["update_on_kvstore"] = False  # None means True on several devices


def refuse_sparse_weights(
    parameters: Iterable[gluon.Parameter], why: str, otherwise: str = ""
) -> None:
    """Raise TrainerStateError if weights are stored as rows."""
    sparse = [parameter.name for parameter in parameters if parameter._stype != "default"]
    if sparse:
        raise TrainerStateError(
            f"{len(sparse)} weights are stored as rows ({', '.join(sparse[:3])}: row_sparse), "
            f"{why}; use dense weights with sparse gradients, nn.Embedding(…, sparse_grad=True)"
            f"{otherwise}"
        )


def put_before_reduction(
    trainer: gluon.Trainer, decorate: Callable[[Callable[[], None]], Callable[[], None]]
) -> None:
    """Decorate the function that sums gradients over devices or processes."""
    trainer._allreduce_grads = decorate(trainer._allreduce_grads)


def put_around_updates(
    trainer: gluon.Trainer, decorate: Callable[[Callable[..., None]], Callable[..., None]]
) -> None:
    """Replace the last part of a step, which judges gradients and updates, by a decorated one."""
    trainer._update = decorate(trainer._update)


def call_before_steps(trainer: gluon.Trainer, callback: Callable[[], object]) -> None:
    """Call a function first in each ``step`` and ``update``, which do nothing if it raises."""
    set_rescale = trainer._check_and_rescale_grad

    def call_and_set(rescale: float) -> None:
        callback()
        set_rescale(rescale)

    trainer._check_and_rescale_grad = call_and_set


def average_of(trainer: gluon.Trainer) -> Any:
    """Return the average of the Trainer's weights, or ``None``."""
    return vars(trainer).get("mpgluon_average")


def set_average(trainer: gluon.Trainer, average: Any) -> None:
    """Attach an average to a Trainer, for :func:`average_of`."""
    trainer.mpgluon_average = average


def trained_weights(
    trainer: gluon.Trainer, grad_reqs: Container[str] = ("write", "add")
) -> Iterator[NDArray]:
    """Yield the weights that have a gradient, on all devices."""
    for parameter in trainer._params:
        if parameter._grad is not None and parameter._grad_req in grad_reqs:
            yield from parameter._data


def some_weights(trainer: gluon.Trainer) -> Iterator[NDArray]:
    """Yield the weights on the first device of the first, the middle and the last parameter."""
    parameters = trainer._params
    for parameter in parameters[:1] + parameters[len(parameters) // 2 :][:1] + parameters[-1:]:
        if parameter._grad is not None:
            yield parameter._data[0]


def first_of(trainer: gluon.Trainer, weights: Container[int]) -> str:
    """Return `` (name first)`` of the first parameter with an array of an ``id`` in ``weights``."""
    for parameter in trainer._params:
        if any(id(array) in weights for array in parameter._data or ()):
            return f" ({parameter.name} first)"
    return ""


def accumulated_gradients(trainer: gluon.Trainer) -> Iterator[NDArray]:
    """Yield the gradients that backward passes add to (``grad_req="add"``), on all devices."""
    for parameter in trainer._params:
        if parameter._grad is not None and parameter.grad_req == "add":
            yield from parameter._grad


def arrays_of_state(state: Any, place: str = "") -> dict[str, NDArray]:
    """Return the arrays in an optimizer's state for one parameter, by their places in it."""
    leaves = leaves_of_state(state, place)
    return {place: one for place, one in leaves.items() if isinstance(one, NDArray)}


def leaves_of_state(state: Any, place: str = "") -> dict[str, Any]:
    """Return the values in a state, of any type but None, by place in lists and dictionaries."""
    if state is None:
        return {}
    if not isinstance(state, (list, tuple, dict)):
        return {place: state}
    leaves = {}
    for key, part in state.items() if isinstance(state, dict) else enumerate(state):
        leaves.update(leaves_of_state(part, f"{place}/{key!r}"))
    return leaves


def with_numbers(state: Any, place: str, numbers: Mapping[str, Any]) -> Any:
    """Return a state of the same arrays, with numbers by their places."""
    if isinstance(state, dict):
        return {k: with_numbers(part, f"{place}/{k!r}", numbers) for k, part in state.items()}
    if isinstance(state, (list, tuple)):
        parts = [with_numbers(part, f"{place}/{i}", numbers) for i, part in enumerate(state)]
        return parts if isinstance(state, list) else tuple(parts)
    return numbers.get(place, state)
