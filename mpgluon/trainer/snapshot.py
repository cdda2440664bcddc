"""What a Trainer's next steps depend on, as plain values and named arrays, and back.

Checkpoints are made of this. It knows nothing of files.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Callable

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import gluon
from mxnet.ndarray import NDArray

from mpgluon.errors import TrainerStateError
from mpgluon.numerics.dtypes import dtype_name
from mpgluon.numerics.loss_scale import NoLossScale
from mpgluon.trainer import inside
from mpgluon.trainer.masters import MasterWeights, keep_masters
from mpgluon.trainer.shared_scale import next_scale
from mpgluon.trainer.step import TrainerState

__all__ = ["export_trainer", "has_master", "import_trainer"]

Arrays = dict[str, npt.NDArray[Any]]
Parameters = Mapping[str, gluon.Parameter]


def _leaves(state: Any, place: str) -> Iterator[tuple[str, NDArray]]:
    """Yield the arrays in an optimizer's state for one parameter, each with its place."""
    if isinstance(state, NDArray):
        yield place, state
    elif isinstance(state, (list, tuple)):
        for position, item in enumerate(state):
            yield from _leaves(item, f"{place}/{position}")


def _state_arrays(states: dict[int, Any], names: dict[int, str]) -> dict[str, NDArray]:
    leaves = (_leaves(state, names[index]) for index, state in states.items())
    return dict(leaf for one in leaves for leaf in one)


def _names_by_index(trainer: gluon.Trainer, parameters: Parameters) -> dict[int, str]:
    """Return each parameter's name in the network's structure, which outlives the instance.

    The Trainer numbers them by the order of their global names, in which ``dense10`` comes
    before ``dense8``.
    """
    structural = {id(parameter): name for name, parameter in parameters.items()}
    parameters_in_order = enumerate(inside.parameters_of(trainer))
    return {i: structural.get(id(p), p.name) for i, p in parameters_in_order}


def _new_state(updater: mx.optimizer.Updater, index: int, weight: NDArray) -> Any:
    if isinstance(updater, MasterWeights):
        return updater.new_state(index, weight)
    return updater.optimizer.create_state_multi_precision(index, weight)


def _masters(updater: mx.optimizer.Updater) -> dict[int, NDArray]:
    return updater.masters if isinstance(updater, MasterWeights) else {}


def _named(
    states: dict[int, Any], masters: dict[int, NDArray], names: dict[int, str]
) -> dict[str, NDArray]:
    """Return all arrays under names of their own, whatever MXNet's arrangement of them is."""
    return {
        **_state_arrays(states, names),
        **{f"{names[index]}/master": master for index, master in masters.items()},
    }


def _refuse_kvstore(trainer: gluon.Trainer) -> None:
    if inside.will_update_in_kvstore(trainer):
        raise TrainerStateError(
            "this Trainer keeps momenta and masters inside its kvstore, where they can be neither "
            "saved nor loaded; create it with update_on_kvstore=False"
        )


def export_trainer(trainer: gluon.Trainer, parameters: Parameters) -> tuple[dict[str, Any], Arrays]:
    """Return what a Trainer's next steps depend on: plain values, and named arrays.

    Masters and momenta are the same on all devices; the first one's are returned.

    Parameters
    ----------
    trainer : gluon.Trainer
    parameters : mapping from name to Parameter
        The network's, under names that do not depend on the instance.

    Raises
    ------
    TrainerStateError
        If the kvstore holds the optimizer's state, out of reach.
    """
    _refuse_kvstore(trainer)
    optimizer = inside.optimizer_of(trainer)
    keep_masters(trainer)
    for index, parameter in enumerate(inside.parameters_of(trainer)):
        for device, updater in enumerate(inside.updaters_of(trainer)):
            if isinstance(updater, MasterWeights) and parameter.grad_req != "null":
                updater.complete(index, parameter.list_data()[device])
    updater = inside.updaters_of(trainer)[0]
    states, masters = updater.states, _masters(updater)
    names = _names_by_index(trainer, parameters)
    plain: dict[str, Any] = {
        "optimizer": type(optimizer).__name__,
        "num_update": optimizer.num_update,
        "update_counts": {
            str(device): {names[index]: count for index, count in counts.items()}
            for device, counts in optimizer._all_index_update_counts.items()
        },
        "m_schedule": getattr(optimizer, "m_schedule", None),  # Nadam's running product
        "learning_rate": optimizer.lr,
        "lr_scheduler": _scheduler_state(optimizer),
        "states": [names[index] for index in states],
        "loss_scale": None,
    }
    amp = inside.occupant(trainer)
    if isinstance(amp, TrainerState):
        plain["loss_scale"] = next_scale(amp.loss_scale, amp).state_dict()
        plain["skipped_steps"] = amp.skipped_steps
        plain["skips_at_the_floor"] = amp.skips_at_the_floor
    arrays = {name: one.asnumpy() for name, one in _named(states, masters, names).items()}
    return plain, arrays


def _scheduler_state(optimizer: mx.optimizer.Optimizer) -> dict[str, Any]:
    """Return what a schedule has counted so far, as far as it is numbers."""
    kept = vars(optimizer.lr_scheduler) if optimizer.lr_scheduler is not None else {}
    return {name: value for name, value in kept.items() if isinstance(value, (int, float))}


def has_master(trainer: gluon.Trainer, parameter: gluon.Parameter) -> bool:
    """Whether a Trainer updates an FP32 master of a parameter."""
    masters = _masters(inside.updaters_of(trainer)[0])
    indices = {id(p): i for i, p in enumerate(inside.parameters_of(trainer))}
    return indices.get(id(parameter)) in masters


def import_trainer(
    trainer: gluon.Trainer,
    parameters: Parameters,
    plain: dict[str, Any],
    arrays: Arrays,
    fp32_values: Arrays,
) -> Callable[[], None]:
    """Check what :func:`export_trainer` returned, and return a function that puts it in place.

    Nothing is changed before that function is called. Call it before the parameters are set: a
    Trainer on several devices copies the first one's to the others when it begins.

    Parameters
    ----------
    trainer : gluon.Trainer
    parameters : mapping from name to Parameter
    plain, arrays
        What :func:`export_trainer` returned.
    fp32_values : dict from a parameter's name to an array
        Of the parameters that were float16 then and are FP32 now, or the other way round: the
        masters that begin, or have become parameters.

    Raises
    ------
    ValueError
        If it belongs to another optimizer, loss scale or set of parameters.
    TrainerStateError
        If the Trainer will keep its state inside a kvstore, out of reach.
    """
    _refuse_kvstore(trainer)
    optimizer = inside.optimizer_of(trainer)
    if plain["optimizer"] != type(optimizer).__name__:
        raise ValueError(
            f"its optimizer was {plain['optimizer']}, this one is {type(optimizer).__name__}"
        )
    amp = inside.occupant(trainer)
    scale = amp.loss_scale if isinstance(amp, TrainerState) else None
    of_file = plain["loss_scale"]
    has_none = of_file is None or of_file["kind"] == NoLossScale.__name__
    keeps_scale = bool(fp32_values) and (
        has_none or scale is None or isinstance(scale, NoLossScale)
    )
    if not keeps_scale and (of_file is None) != (scale is None):
        raise ValueError(
            "only one of the two has a loss scale; call amp.init_trainer before loading exactly "
            "if it was called before saving"
        )
    if scale is not None and not keeps_scale:
        copy.copy(scale).load_state_dict(of_file)
    names = _names_by_index(trainer, parameters)
    indices = {name: index for index, name in names.items()}
    strangers = sorted(set(plain["states"]) - indices.keys())
    if strangers:
        raise ValueError(f"it trained parameters that this one does not have: {strangers[:5]}")
    keep_masters(trainer)
    trained = inside.parameters_of(trainer)
    updaters = inside.updaters_of(trainer)
    states_by_device, masters_by_device = [], []
    for device, updater in enumerate(updaters):
        weights = {
            indices[name]: trained[indices[name]].list_data()[device] for name in plain["states"]
        }
        has_masters = isinstance(updater, MasterWeights) and updater.optimizer.multi_precision
        states_by_device.append({i: _new_state(updater, i, w) for i, w in weights.items()})
        masters_by_device.append(
            {
                index: mx.nd.empty(weight.shape, ctx=weight.context, dtype="float32")
                for index, weight in weights.items()
                if has_masters and dtype_name(weight) == "float16"
            }
        )
    expected = _named(states_by_device[0], masters_by_device[0], names)
    arrays = _with_masters(arrays, expected, fp32_values)
    problems = sorted(
        name
        for name in expected.keys() | arrays.keys()
        if name not in expected
        or name not in arrays
        or (expected[name].shape, np.dtype(expected[name].dtype))
        != (arrays[name].shape, arrays[name].dtype)
    )
    if problems:
        raise ValueError(f"optimizer states differ at {', '.join(problems[:5])}")

    def put_in_place() -> None:
        inside.begin(trainer)
        for updater, states, masters in zip(updaters, states_by_device, masters_by_device):
            for name, array in _named(states, masters, names).items():
                array[:] = arrays[name]
            if isinstance(updater, MasterWeights):
                updater.set_all(states, masters)
            else:
                updater.states, updater.states_synced = states, dict.fromkeys(states, True)
        optimizer.num_update = plain["num_update"]
        counts = {
            int(device): {indices[name]: count for name, count in per_name.items()}
            for device, per_name in plain["update_counts"].items()
        }
        # A device that was not there then has made as many updates as the others.
        longest = max(counts.values(), key=len)
        devices = inside.devices_of(trainer)
        for context in devices:
            counts.setdefault(context.device_id, {})
            counts[context.device_id] = counts[context.device_id] or dict(longest)
        optimizer._all_index_update_counts = counts
        optimizer._index_update_count = counts[devices[0].device_id]
        if optimizer.lr_scheduler is None:
            optimizer.lr = plain["learning_rate"]
        else:
            vars(optimizer.lr_scheduler).update(plain["lr_scheduler"])
        if plain["m_schedule"] is not None:
            optimizer.m_schedule = plain["m_schedule"]
        if isinstance(amp, TrainerState):
            amp.forget()
        if isinstance(amp, TrainerState) and not keeps_scale:
            amp.loss_scale.load_state_dict(of_file)
            amp.skipped_steps = plain["skipped_steps"]
            amp.skips_at_the_floor = plain["skips_at_the_floor"]

    return put_in_place


def _with_masters(arrays: Arrays, expected: Mapping[str, Any], fp32_values: Arrays) -> Arrays:
    """Return arrays with the masters that a Trainer has now, in place of those that it had."""
    masters = {f"{name}/master": value for name, value in fp32_values.items()}
    kept = {name: one for name, one in arrays.items() if name in expected or name not in masters}
    return {**{name: one for name, one in masters.items() if name in expected}, **kept}
