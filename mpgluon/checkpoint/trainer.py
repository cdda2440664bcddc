"""The Trainer's parts of a checkpoint: the optimizer's state, and the loss scale's.

Export and preparation change nothing. This module knows nothing of files.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any, Optional

from mpgluon.base.archive import Arrays
from mpgluon.base.blocks import arrays_of, is_mxnets_own
from mpgluon.base.devices import to_numpy
from mpgluon.checkpoint.attributes import (
    numbers_to_set,
    optimizer_numbers,
    schedule_lists,
    schedule_numbers,
    set_schedule,
    state_numbers,
    tell_what_is_not_kept,
)
from mpgluon.checkpoint.fields import (
    Kind,
    Maybe,
    check_fields,
    is_count,
    is_finite,
    is_number,
    is_numbers,
    is_seed,
    is_text,
    is_texts,
)
from mpgluon.checkpoint.saved import Apply, Content, Run
from mpgluon.errors import TrainerStateError
from mpgluon.formats.loss_scale import NoLossScale
from mpgluon.trainer.shared_scale import next_scale
from mpgluon.trainer.step import TrainerState
from mpgluon.updates import gluon_trainer
from mpgluon.updates.masters import MasterWeights, keep_masters, new_state
from mpgluon.updates.rounded_updates import (
    RoundedUpdates,
    grid_weights,
    rounding_of,
    validated_rounding,
)
from mpgluon.updates.updater import Updates, has_master

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.lr_scheduler import LRScheduler
from mxnet.ndarray import NDArray

__all__ = [
    "LOSS_SCALE_FIELDS",
    "OPTIMIZER_FIELDS",
    "export_loss_scale",
    "export_optimizer",
    "prepare_loss_scale",
    "prepare_optimizer",
]

_logger = logging.getLogger(__name__)

_MASTER, _COMPENSATION = MasterWeights.extra_name, RoundedUpdates.extra_name

OPTIMIZER_FIELDS: dict[str, Kind] = {
    "optimizer": is_text,
    "num_update": is_count,
    "update_counts": {str: {str: is_count}},
    "m_schedule": Maybe(is_finite),  # Nadam's running product
    "learning_rate": Maybe(is_finite),  # none where only the schedule has one
    "optimizer_numbers": Maybe({str: Maybe(is_number)}),
    "lr_scheduler": {str: Maybe(is_number)},
    "lr_scheduler_lists": Maybe({str: is_numbers}),
    "lr_scheduler_kind": Maybe(is_text),
    "states": is_texts,
    "state_numbers": Maybe({str: is_number}),
    "rounding": Maybe(
        {"way": is_text, "seed": is_seed, "steps": is_count, "numbers": {str: is_count}}
    ),
}
# Numbers of MXNet's own schedules, which would never end with a step of 0.
_SCHEDULE: dict[Any, Kind] = {
    str: is_finite,
    "step": lambda value: is_count(value) and value > 0,
    **dict.fromkeys(("count", "cur_step_ind", "max_update", "max_steps", "warmup_steps"), is_count),
}
LOSS_SCALE_FIELDS: dict[str, Kind] = {
    "loss_scale": Maybe({"kind": is_text}),
    "skipped_steps": Maybe(is_count),
    "skips_at_the_floor": Maybe(is_count),
}


def export_optimizer(run: Run) -> Content:
    """Return the state that the optimizer's next updates depend on.

    States and masters are the same on all devices; the first one's are returned. A master without a
    state is left out: it is the FP32 value of its parameter.

    Raises
    ------
    TrainerStateError
        If the kvstore holds the optimizer's state, where it cannot be read, or a state has parts
        that are neither arrays nor numbers.
    """
    trainer, names = run.trainer, run.names
    _refuse_kvstore(trainer)
    optimizer = gluon_trainer.optimizer_of(trainer)
    tell_what_is_not_kept(optimizer)
    schedule, updater = optimizer.lr_scheduler, gluon_trainer.updaters_of(trainer)[0]
    fields: dict[str, Any] = {
        "optimizer": type(optimizer).__name__,
        "num_update": optimizer.num_update,
        "update_counts": {
            str(device): {names[index]: count for index, count in counts.items()}
            for device, counts in optimizer._all_index_update_counts.items()
        },
        "m_schedule": getattr(optimizer, "m_schedule", None),
        "learning_rate": None if optimizer.lr is None else float(optimizer.lr),
        "optimizer_numbers": optimizer_numbers(optimizer),
        "lr_scheduler": schedule_numbers(schedule),
        "lr_scheduler_lists": schedule_lists(schedule),
        "lr_scheduler_kind": None if schedule is None else type(schedule).__name__,
        "states": [names[index] for index in updater.states],
        "state_numbers": state_numbers(updater.states, names),
        "rounding": None,
    }
    if isinstance(updater, RoundedUpdates) and rounding_of(trainer) is not None:
        fields["rounding"] = updater.export_rounding(names)
    extra, kind = {}, _MASTER
    if isinstance(updater, MasterWeights):
        extra = run.masters
    elif isinstance(updater, Updates):
        extra, kind = updater.extra, updater.extra_name
    arrays: dict[str, Arrays] = {}
    for (of_kind, name), array in _keyed(updater.states, extra, names, kind).items():
        arrays.setdefault(of_kind, {})[name] = to_numpy(array)
    return Content(fields, arrays)


def prepare_optimizer(run: Run, saved: Content) -> Apply:
    """Check a content of :func:`export_optimizer`, and return the function that applies it.

    To be applied before the parameters are set: a Trainer on several devices copies the first one's
    to the others when it begins.

    Raises
    ------
    ValueError
        If it belongs to another optimizer or set of parameters.
    TrainerStateError
        If the Trainer will keep its state inside a kvstore.
    """
    trainer, fields = run.trainer, saved.fields
    _refuse_kvstore(trainer)
    optimizer = gluon_trainer.optimizer_of(trainer)
    _refuse_other_training(run, fields)
    rounding, numbers = validated_rounding(trainer, fields["rounding"], run.indices)
    compensates = rounding is not None and fields["rounding"] and rounding.way == "kahan"
    kind = _COMPENSATION if compensates else _MASTER
    arrays = {
        (of_kind, name): array
        for of_kind, by_name in saved.arrays.items()
        if compensates or of_kind != _COMPENSATION
        for name, array in by_name.items()
    }
    filled = []  # for each device
    for device in range(len(gluon_trainer.updaters_of(trainer))):
        states, extra = _empty_states(run, fields, device, compensates=compensates)
        _fill(_keyed(states, extra, run.names, kind), arrays, run.fp32_values)
        filled.append((states, extra))
    attributes = _optimizer_attributes(run, fields)
    apply_schedule = _prepare_schedule(optimizer.lr_scheduler, fields)

    def apply() -> None:
        gluon_trainer.begin(trainer)
        for updater in gluon_trainer.updaters_of(trainer):
            updater.states, updater.states_synced = {}, {}
        keep_masters(trainer)
        for updater, of_device in zip(gluon_trainer.updaters_of(trainer), filled):
            updater.set_all(*of_device)
            if rounding is not None:
                updater.rounding = rounding
                updater.numbers.update(numbers)
        vars(optimizer).update(attributes)
        apply_schedule()

    return apply


def _refuse_other_training(run: Run, fields: Mapping[str, Any]) -> None:
    """Raise ValueError if the file belongs to another optimizer or set of parameters."""
    optimizer = type(gluon_trainer.optimizer_of(run.trainer)).__name__
    if fields["optimizer"] != optimizer:
        raise ValueError(f"its optimizer was {fields['optimizer']}, this one is {optimizer}")
    unknown = sorted(set(fields["states"]) - run.indices.keys())
    if unknown:
        raise ValueError(f"it trained parameters that this one does not have: {unknown[:5]}")


def _empty_states(
    run: Run, fields: Mapping[str, Any], device: int, *, compensates: bool
) -> tuple[dict[int, Any], dict[int, NDArray]]:
    """Return new states, and masters or compensations, by a parameter's index, to be filled."""
    optimizer = gluon_trainer.optimizer_of(run.trainer)
    trained = gluon_trainer.parameters_of(run.trainer)
    stepped = [run.indices[name] for name in fields["states"]]
    weights = {i: arrays_of(trained[i])[device] for i in stepped}
    states = {
        i: gluon_trainer.with_numbers(
            new_state(optimizer, i, weight), run.names[i], fields["state_numbers"] or {}
        )
        for i, weight in weights.items()
    }
    extra = {
        i: mx.nd.empty(weight.shape, ctx=weight.ctx, dtype="float32")
        for i, weight in weights.items()
        if has_master(optimizer, trained[i]) or (compensates and grid_weights([trained[i]]))
    }
    return states, extra


def _optimizer_attributes(run: Run, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer's attributes that the file sets."""
    trainer = run.trainer
    optimizer = gluon_trainer.optimizer_of(trainer)
    counts = _update_counts(trainer, fields["update_counts"], run.indices)
    attributes = {
        "num_update": fields["num_update"],
        "_all_index_update_counts": counts,
        "_index_update_count": counts[gluon_trainer.devices_of(trainer)[0].device_id],
    }
    scheduled = optimizer.lr_scheduler is not None or _has_schedule(fields)
    if not scheduled and fields["learning_rate"] is not None:
        attributes["lr"] = fields["learning_rate"]
    if fields["m_schedule"] is not None:
        attributes["m_schedule"] = fields["m_schedule"]
    return {**attributes, **numbers_to_set(optimizer, fields["optimizer_numbers"])}


def _has_schedule(fields: Mapping[str, Any]) -> bool:
    return bool(fields["lr_scheduler_kind"] or fields["lr_scheduler"])


def _prepare_schedule(schedule: Optional[LRScheduler], fields: Mapping[str, Any]) -> Apply:
    """Check the file's schedule, and return what continues it, or warns that this one differs."""
    kind_of_file = fields["lr_scheduler_kind"]
    continues = schedule is not None and kind_of_file in (None, type(schedule).__name__)
    if continues and is_mxnets_own(type(schedule)):
        check_fields(fields["lr_scheduler"], _SCHEDULE, "trainer/lr_scheduler")

    def apply() -> None:
        if continues:
            lists = fields["lr_scheduler_lists"] or {}
            set_schedule(schedule, {**fields["lr_scheduler"], **lists})
        elif _has_schedule(fields):
            own = "no schedule" if schedule is None else f"a {type(schedule).__name__}"
            _logger.warning(
                "the file's learning rate follows a %s, and this Trainer has %s; it keeps its own",
                kind_of_file or "schedule",
                own,
            )

    return apply


def export_loss_scale(run: Run) -> Content:
    """Return the loss scale that the next loss will find, and how many steps were skipped."""
    state = gluon_trainer.loss_scaler_of(run.trainer)
    if not isinstance(state, TrainerState):
        return Content({"loss_scale": None}, {})
    scale = next_scale(state.loss_scale, state).state_dict()
    skips = {name: getattr(state, name) for name in _SKIPS}
    return Content({"loss_scale": scale, **skips}, {})


def prepare_loss_scale(run: Run, saved: Content) -> Apply:
    """Check a content of :func:`export_loss_scale`, and return the function that applies it.

    Where parameters change their format, one of the two Trainers may have no loss scale or
    ``"none"``: this one then keeps its own.

    Raises
    ------
    ValueError
        If only one of them has a loss scale, or it is of another kind.
    """
    state = gluon_trainer.loss_scaler_of(run.trainer)
    scale = state.loss_scale if isinstance(state, TrainerState) else None
    of_file: Optional[dict[str, Any]] = saved.fields["loss_scale"]
    file_has_none = of_file is None or of_file["kind"] == NoLossScale.__name__
    keeps_own = bool(run.fp32_values) and (
        file_has_none or scale is None or isinstance(scale, NoLossScale)
    )
    if not keeps_own and (of_file is None) != (scale is None):
        raise ValueError(
            "only one of the two Trainers has a loss scale; call amp.init_trainer before loading "
            "if, and only if, it was called before saving"
        )
    skips = {name: saved.fields[name] for name in _SKIPS}
    if of_file is not None and None in skips.values():
        raise ValueError("its trainer/skipped_steps or trainer/skips_at_the_floor is missing")
    if not keeps_own and scale is not None and of_file is not None:
        copy.copy(scale).load_state_dict(of_file)

    def apply() -> None:
        if not isinstance(state, TrainerState):
            return
        state.discard()
        if not keeps_own:
            state.loss_scale.load_state_dict(of_file or {})
            vars(state).update(skips)

    return apply


_SKIPS = ("skipped_steps", "skips_at_the_floor")


def _refuse_kvstore(trainer: gluon.Trainer) -> None:
    if gluon_trainer.will_update_in_kvstore(trainer):
        raise TrainerStateError(
            "this Trainer keeps momenta and masters inside its kvstore, where they can be neither "
            "saved nor loaded; create it with update_on_kvstore=False"
        )


def _keyed(
    states: dict[int, Any], extra: dict[int, NDArray], names: dict[int, str], kind: str
) -> dict[tuple[str, str], NDArray]:
    """Return all arrays by their kind, and by their parameters' names and places in the states."""
    by_key = {}
    for index, state in states.items():
        for name, array in gluon_trainer.arrays_of_state(state, names[index]).items():
            by_key["state", name] = array
        if index in extra:
            by_key[kind, names[index]] = extra[index]
    return by_key


def _fill(
    expected: dict[tuple[str, str], NDArray],
    arrays: dict[tuple[str, str], Any],
    fp32_values: Arrays,
) -> None:
    """Write arrays of a file into new ones, with the masters that a Trainer has now."""
    masters = {(_MASTER, name): value for name, value in fp32_values.items()}
    content = {key: one for key, one in masters.items() if key in expected}
    content |= {key: one for key, one in arrays.items() if key in expected or key not in masters}
    problems = sorted(
        name if kind == "state" else f"{name}/{kind}"
        for kind, name in expected.keys() | content.keys()
        if (kind, name) not in expected
        or (kind, name) not in content
        or (expected[kind, name].shape, np.dtype(expected[kind, name].dtype))
        != (content[kind, name].shape, content[kind, name].dtype)
    )
    if problems:
        raise ValueError(f"optimizer states differ at {', '.join(problems[:5])}")
    for key, array in expected.items():
        array[:] = content[key]


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
