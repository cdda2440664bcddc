"""A Trainer's state as plain values and named arrays, and back.

Checkpoints consist of this. Export and validation change nothing; a validated plan is applied
without a further refusal. This module knows nothing of files.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from mpgluon.devices import to_numpy
from mpgluon.errors import TrainerStateError
from mpgluon.fields import check_fields, is_count, is_number, is_text, is_texts, optional
from mpgluon.formats.loss_scale import NoLossScale
from mpgluon.trainer import gluon_trainer
from mpgluon.trainer.masters import MasterWeights, has_master, keep_masters, new_state
from mpgluon.trainer.rounded_updates import (
    RoundedUpdates,
    UpdateRounding,
    grid_weights,
    rounding_of,
    validated_rounding,
)
from mpgluon.trainer.shared_scale import next_scale
from mpgluon.trainer.step import TrainerState
from mpgluon.trainer.updates import Updates

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet import gluon
from mxnet.ndarray import NDArray

__all__ = ["TrainerPlan", "apply_trainer", "export_trainer", "validate_trainer"]

Arrays = dict[str, npt.NDArray[Any]]
Parameters = Mapping[str, gluon.Parameter]

_FIELDS = {
    "optimizer": is_text,
    "num_update": is_count,
    "update_counts": {str: {str: is_count}},
    "m_schedule": optional(is_number),
    "learning_rate": is_number,
    "lr_scheduler": {str: is_number},
    "states": is_texts,
}
_FIELDS_OF_PARTS = {
    "loss_scale": {"kind": is_text},
    "average": {"decay": is_number, "updates": is_count},
    "rounding": {"way": is_text, "seed": is_count, "steps": is_count, "numbers": {str: is_count}},
}

_AVERAGE = "/average"  # after a parameter's name
_COMPENSATION = f"/{RoundedUpdates.extra_name}"


def export_trainer(trainer: gluon.Trainer, parameters: Parameters) -> tuple[dict[str, Any], Arrays]:
    """Return what a Trainer's next steps depend on: plain values, and named arrays.

    Masters and momenta are the same on all devices; the first one's are returned. Changes nothing.

    Parameters
    ----------
    trainer : gluon.Trainer
    parameters : mapping from name to Parameter
        The network's, under names that do not depend on the instance.

    Raises
    ------
    TrainerStateError
        If the kvstore holds the optimizer's state, where it cannot be read.
    """
    _refuse_kvstore(trainer)
    optimizer = gluon_trainer.optimizer_of(trainer)
    updater = gluon_trainer.updaters_of(trainer)[0]
    names = _names_by_index(trainer, parameters)
    average = gluon_trainer.average_of(trainer)
    of_average, averages = average.export(names) if average is not None else (None, {})
    plain: dict[str, Any] = {
        "optimizer": type(optimizer).__name__,
        "num_update": optimizer.num_update,
        "update_counts": {
            str(device): {names[index]: count for index, count in counts.items()}
            for device, counts in optimizer._all_index_update_counts.items()
        },
        "m_schedule": getattr(optimizer, "m_schedule", None),  # Nadam's running product
        "learning_rate": optimizer.lr,
        "lr_scheduler": _numbers_in(optimizer.lr_scheduler),
        "states": [names[index] for index in updater.states],
        "loss_scale": None,
        "average": of_average,
        "rounding": None,
    }
    amp = gluon_trainer.loss_scaler_of(trainer)
    if isinstance(amp, TrainerState):
        plain["loss_scale"] = next_scale(amp.loss_scale, amp).state_dict()
        plain["skipped_steps"] = amp.skipped_steps
        plain["skips_at_the_floor"] = amp.skips_at_the_floor
    extra, kind = {}, ""
    if isinstance(updater, Updates):
        extra, kind = updater.extra, updater.extra_name
    if isinstance(updater, RoundedUpdates) and rounding_of(trainer) is not None:
        plain["rounding"] = updater.export_rounding(names)
    named = _named(updater.states, extra, names, kind)
    arrays = {name: to_numpy(one) for name, one in named.items()}
    return plain, arrays | {f"{name}{_AVERAGE}": array for name, array in averages.items()}


@dataclass(frozen=True, eq=False)
class TrainerPlan:
    """All that :func:`apply_trainer` writes."""

    trainer: gluon.Trainer
    states: list[dict[int, Any]]  # for each device, by a parameter's index; new and filled
    extra: list[dict[int, NDArray]]  # for each device too: masters, or compensations
    optimizer: dict[str, Any]  # attributes
    lr_scheduler: dict[str, Any]  # attributes
    loss_scale: Optional[dict[str, Any]]  # its state; ``None``: the Trainer keeps its own
    skips: dict[str, int]  # attributes of the Trainer's state
    averages: dict[int, NDArray]  # by a parameter's index
    average_updates: int
    rounding: Optional[UpdateRounding]  # ``None`` if updates are not rounded
    numbers: dict[int, int]  # of the arrays, for stochastic rounding


def validate_trainer(
    trainer: gluon.Trainer,
    parameters: Parameters,
    plain: dict[str, Any],
    arrays: Arrays,
    fp32_values: Arrays,
) -> TrainerPlan:
    """Check what :func:`export_trainer` returned, and plan what to write. Changes nothing.

    Parameters
    ----------
    trainer : gluon.Trainer
    parameters : mapping from name to Parameter
    plain, arrays
        What :func:`export_trainer` returned.
    fp32_values : dict from a parameter's name to an array
        FP32 values of parameters whose format has changed between float16 and FP32: new
        masters, or masters that have become parameters.

    Raises
    ------
    ValueError
        If it belongs to another optimizer, loss scale or set of parameters.
    TrainerStateError
        If the Trainer will keep its state inside a kvstore.
    """
    _refuse_kvstore(trainer)
    # The latter two are absent in files from before there were any.
    plain = {"average": None, "rounding": None, **plain}
    present = {k: v for k, v in _FIELDS_OF_PARTS.items() if plain.get(k, v) is not None}
    of_skips = ("skipped_steps", "skips_at_the_floor") if "loss_scale" in present else ()
    check_fields(plain, {**_FIELDS, **present, **dict.fromkeys(of_skips, is_count)}, "trainer")
    optimizer = gluon_trainer.optimizer_of(trainer)
    if plain["optimizer"] != type(optimizer).__name__:
        raise ValueError(
            f"its optimizer was {plain['optimizer']}, this one is {type(optimizer).__name__}"
        )
    loss_scale = _validated_loss_scale(trainer, plain["loss_scale"], converted=bool(fp32_values))
    names = _names_by_index(trainer, parameters)
    indices = {name: index for index, name in names.items()}
    unknown = sorted(set(plain["states"]) - indices.keys())
    if unknown:
        raise ValueError(f"it trained parameters that this one does not have: {unknown[:5]}")
    averages = {n: a for n, a in arrays.items() if n.endswith(_AVERAGE)}
    arrays = {name: array for name, array in arrays.items() if name not in averages}
    of_average = plain["average"]
    new_averages = _validated_averages(trainer, of_average, averages, indices)
    of_rounding = plain["rounding"]
    rounding, numbers = validated_rounding(trainer, of_rounding, indices)
    compensates = rounding is not None and of_rounding and rounding.way == "kahan"
    if not compensates:
        arrays = {n: a for n, a in arrays.items() if not n.endswith(_COMPENSATION)}
    states, extra = [], []
    trained = gluon_trainer.parameters_of(trainer)
    stepped = [indices[name] for name in plain["states"]]
    for device in range(len(gluon_trainer.updaters_of(trainer))):
        weights = {i: trained[i].list_data()[device] for i in stepped}
        states.append({i: new_state(optimizer, i, weight) for i, weight in weights.items()})
        extra.append(
            {
                i: mx.nd.empty(weight.shape, ctx=weight.context, dtype="float32")
                for i, weight in weights.items()
                if has_master(optimizer, trained[i]) or (compensates and grid_weights([trained[i]]))
            }
        )
        kind = RoundedUpdates.extra_name if compensates else MasterWeights.extra_name
        _fill(_named(states[-1], extra[-1], names, kind), arrays, fp32_values)
    counts = _update_counts(trainer, plain["update_counts"], indices)
    attributes = {
        "num_update": plain["num_update"],
        "_all_index_update_counts": counts,
        "_index_update_count": counts[gluon_trainer.devices_of(trainer)[0].device_id],
    }
    if optimizer.lr_scheduler is None:
        attributes["lr"] = plain["learning_rate"]
    if plain["m_schedule"] is not None:
        attributes["m_schedule"] = plain["m_schedule"]
    skips = {name: plain[name] for name in of_skips if loss_scale is not None}
    return TrainerPlan(
        trainer,
        states,
        extra,
        optimizer=attributes,
        lr_scheduler=plain["lr_scheduler"],
        loss_scale=loss_scale,
        skips=skips,
        averages=new_averages,
        average_updates=0 if of_average is None else of_average["updates"],
        rounding=rounding,
        numbers=numbers,
    )


def apply_trainer(plan: TrainerPlan) -> None:
    """Bring a Trainer to the state of a plan; refuses nothing.

    Call it before the parameters are set: a Trainer on several devices copies the first one's to
    the others when it begins.
    """
    trainer, optimizer = plan.trainer, gluon_trainer.optimizer_of(plan.trainer)
    gluon_trainer.begin(trainer)
    for updater in gluon_trainer.updaters_of(trainer):
        updater.states, updater.states_synced = {}, {}
    keep_masters(trainer)
    for updater, states, extra in zip(gluon_trainer.updaters_of(trainer), plan.states, plan.extra):
        updater.set_all(states, extra)
        if plan.rounding is not None:
            updater.rounding = plan.rounding
            updater.numbers.update(plan.numbers)
    vars(optimizer).update(plan.optimizer)
    if optimizer.lr_scheduler is not None:
        vars(optimizer.lr_scheduler).update(plan.lr_scheduler)
    amp = gluon_trainer.loss_scaler_of(trainer)
    if isinstance(amp, TrainerState):
        amp.discard()
        if plan.loss_scale is not None:
            amp.loss_scale.load_state_dict(plan.loss_scale)
        vars(amp).update(plan.skips)
    average = gluon_trainer.average_of(trainer)
    if average is not None:
        average.set_all(plan.averages, plan.average_updates)


def _refuse_kvstore(trainer: gluon.Trainer) -> None:
    if gluon_trainer.will_update_in_kvstore(trainer):
        raise TrainerStateError(
            "this Trainer keeps momenta and masters inside its kvstore, where they can be neither "
            "saved nor loaded; create it with update_on_kvstore=False"
        )


def _names_by_index(trainer: gluon.Trainer, parameters: Parameters) -> dict[int, str]:
    """Return each parameter's name in the network's structure, which outlives the instance.

    The Trainer numbers them by the order of their global names, in which ``dense10`` comes
    before ``dense8``.
    """
    structural = {id(parameter): name for name, parameter in parameters.items()}
    parameters_in_order = enumerate(gluon_trainer.parameters_of(trainer))
    return {i: structural.get(id(p), p.name) for i, p in parameters_in_order}


def _named(
    states: dict[int, Any], extra: dict[int, NDArray], names: dict[int, str], kind: str
) -> dict[str, NDArray]:
    """Return all arrays under their parameters' names and their places in the states.

    A master without a state is left out: it is the FP32 value of its parameter.
    """
    found = {}
    for index, state in states.items():
        found.update(gluon_trainer.arrays_of_state(state, names[index]))
        if index in extra:
            found[f"{names[index]}/{kind}"] = extra[index]
    return found


def _numbers_in(lr_scheduler: Optional[mx.lr_scheduler.LRScheduler]) -> dict[str, Any]:
    """Return what a schedule has counted so far, as far as it is numbers."""
    kept = vars(lr_scheduler) if lr_scheduler is not None else {}
    return {name: value for name, value in kept.items() if isinstance(value, (int, float))}


def _validated_loss_scale(
    trainer: gluon.Trainer, of_file: Optional[dict[str, Any]], *, converted: bool
) -> Optional[dict[str, Any]]:
    """Return the loss scale's state to load; ``None`` if the Trainer keeps its own, or has none.

    Where formats were ``converted``, one of the two may have none or ``"none"``.
    """
    amp = gluon_trainer.loss_scaler_of(trainer)
    scale = amp.loss_scale if isinstance(amp, TrainerState) else None
    file_has_none = of_file is None or of_file["kind"] == NoLossScale.__name__
    if converted and (file_has_none or scale is None or isinstance(scale, NoLossScale)):
        return None
    if (of_file is None) != (scale is None):
        raise ValueError(
            "only one of the two Trainers has a loss scale; call amp.init_trainer before loading "
            "if, and only if, it was called before saving"
        )
    if scale is not None and of_file is not None:
        copy.copy(scale).load_state_dict(of_file)
    return of_file


def _validated_averages(
    trainer: gluon.Trainer,
    of_file: Optional[dict[str, Any]],
    arrays: Arrays,
    indices: dict[str, int],
) -> dict[int, NDArray]:
    """Return the averages to load, by a parameter's index."""
    average = gluon_trainer.average_of(trainer)
    if of_file is None and average is not None:
        raise ValueError(
            "it has no average of the weights, and this one has; load it first, and then create "
            f"mpgluon.WeightAverage(trainer, {average.decay}), which begins after the next step"
        )
    if of_file is None:
        return {}
    if average is None:
        raise ValueError(
            "it has an average of the weights, and this one has none; create "
            f"mpgluon.WeightAverage(trainer, {of_file['decay']}) before loading"
        )
    if of_file["decay"] != average.decay:
        raise ValueError(
            f"its average had the decay {of_file['decay']}, this Trainer's has {average.decay}; "
            "load with the former, and then set average.decay"
        )
    named = {name.removesuffix(_AVERAGE): array for name, array in arrays.items()}
    unknown = sorted(named.keys() - indices.keys())
    if unknown:
        raise ValueError(f"it averaged parameters that this one does not have: {unknown[:5]}")
    found: dict[int, NDArray] = average.loaded({indices[n]: array for n, array in named.items()})
    return found


def _fill(expected: dict[str, NDArray], arrays: Arrays, fp32_values: Arrays) -> None:
    """Write arrays of a file into new ones, with the masters that a Trainer has now."""
    masters = {f"{name}/master": value for name, value in fp32_values.items()}
    found = {name: one for name, one in masters.items() if name in expected}
    found |= {name: one for name, one in arrays.items() if name in expected or name not in masters}
    problems = sorted(
        name
        for name in expected.keys() | found.keys()
        if name not in expected
        or name not in found
        or (expected[name].shape, np.dtype(expected[name].dtype))
        != (found[name].shape, found[name].dtype)
    )
    if problems:
        raise ValueError(f"optimizer states differ at {', '.join(problems[:5])}")
    for name, array in expected.items():
        array[:] = found[name]


def _update_counts(
    trainer: gluon.Trainer, of_file: dict[str, dict[str, int]], indices: dict[str, int]
) -> dict[int, dict[int, int]]:
    """Return the numbers of updates by device and index."""
    of_others = {name for by_name in of_file.values() for name in by_name} - indices.keys()
    if of_others or not of_file or not all(device.isdecimal() for device in of_file):
        raise ValueError(f"its trainer/update_counts cannot be {of_file!r}")
    counts = {
        int(device): {indices[name]: count for name, count in by_name.items()}
        for device, by_name in of_file.items()
    }
    longest = max(counts.values(), key=len)
    for context in gluon_trainer.devices_of(trainer):
        # A device that the file does not know has made as many updates as the others.
        counts[context.device_id] = counts.get(context.device_id) or dict(longest)
    return counts
