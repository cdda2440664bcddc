"""Numbers that optimizers and schedules keep in their attributes, for a checkpoint."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, Optional

from mpgluon.errors import TrainerStateError
from mpgluon.formats.loss_scale import NUMBERS
from mpgluon.updates import gluon_trainer

import mxnet as mx
import numpy as np
from mxnet.lr_scheduler import LRScheduler

__all__ = [
    "numbers_to_set",
    "optimizer_numbers",
    "schedule_lists",
    "schedule_numbers",
    "set_schedule",
    "state_numbers",
    "tell_what_is_not_kept",
]

_logger = logging.getLogger(__name__)

# Settings that MXNet's optimizers have under another name than their constructors, and Nadam's
# running product, which has a field of its own in a file.
_OTHERS = {"float_stable_eps", "init_updates", "m_schedule"}


def optimizer_numbers(optimizer: mx.optimizer.Optimizer) -> dict[str, Any]:
    """Return the numbers that updates have left in attributes; ``None`` for one not yet known.

    LARS has ``last_lr``, for example. Options of the constructor, and attributes that every
    optimizer has, are not among them.
    """
    return {
        name: None if value is None else np.asarray(value).item()
        for name, value in _own_attributes(optimizer).items()
        if value is None or isinstance(value, NUMBERS)
    }


def numbers_to_set(
    optimizer: mx.optimizer.Optimizer, of_file: Optional[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the numbers of a file's :func:`optimizer_numbers` that an optimizer has or may get.

    It gets those that its first update makes. A number that it has and the file lacks stays, with
    a warning; a file without any is from an earlier version.
    """
    own = optimizer_numbers(optimizer)
    if of_file is None:
        return {}
    _warn_of_missing(optimizer, own.keys() - of_file.keys())
    may_have = {name for name in of_file if name in own or not hasattr(optimizer, name)}
    return {name: value for name, value in of_file.items() if name in may_have}


def state_numbers(states: Mapping[int, Any], names: Mapping[int, str]) -> dict[str, Any]:
    """Return the numbers in the states that are not arrays, by the places of `arrays_of_state`.

    Raises
    ------
    TrainerStateError
        If a state holds an object that is neither an array nor a number.
    """
    numbers = {}
    for index, state in states.items():
        for place, one in gluon_trainer.leaves_of_state(state, names[index]).items():
            if isinstance(one, NUMBERS):
                numbers[place] = np.asarray(one).item()
            elif not isinstance(one, mx.nd.NDArray):
                raise TrainerStateError(
                    f"the optimizer's state at {place} is a {type(one).__name__}, which a "
                    "checkpoint does not hold: create_state has to return arrays, numbers, or "
                    "lists, tuples and dictionaries of them"
                )
    return numbers


def _own_attributes(optimizer: mx.optimizer.Optimizer) -> dict[str, Any]:
    options = {
        name
        for kind in type(optimizer).__mro__
        if "__init__" in vars(kind)
        for name in inspect.signature(vars(kind)["__init__"]).parameters
    }
    known = options | _OTHERS | vars(mx.optimizer.Optimizer()).keys()
    return {name: value for name, value in vars(optimizer).items() if name not in known}


def schedule_numbers(schedule: Optional[LRScheduler]) -> dict[str, Any]:
    """Return the settings and counts of a schedule, and of those within it, that are numbers.

    ``None`` for one not yet known.
    """
    return {
        f"{place}{name}": None if value is None else np.asarray(value).item()
        for place, one in _schedules_in(schedule)
        for name, value in vars(one).items()
        if value is None or isinstance(value, NUMBERS)
    }


def schedule_lists(schedule: Optional[LRScheduler]) -> dict[str, list[Any]]:
    """Return the settings that are lists of numbers, such as its steps."""
    return {
        f"{place}{name}": [np.asarray(one).item() for one in value]
        for place, one in _schedules_in(schedule)
        for name, value in vars(one).items()
        if _is_list(value)
    }


def set_schedule(schedule: LRScheduler, saved: Mapping[str, Any]) -> None:
    """Put numbers and lists of a file into a schedule, and into those within it.

    A number that one has and the file lacks stays, with a warning.
    """
    numbers = {**schedule_numbers(schedule), **schedule_lists(schedule)}
    known = {name for name, value in numbers.items() if value is not None}
    _warn_of_missing(schedule, known - saved.keys())
    for place, one in _schedules_in(schedule):
        for key, value in saved.items():
            name = key.removeprefix(place)
            if key.startswith(place) and "." not in name:
                is_tuple = isinstance(getattr(one, name, None), tuple)
                vars(one)[name] = tuple(value) if is_tuple else value


def tell_what_is_not_kept(optimizer: mx.optimizer.Optimizer) -> None:
    """Log, once each, which attributes with arrays or dictionaries a checkpoint leaves out."""
    owners = [("", optimizer, _own_attributes(optimizer))]
    owners += [(place, one, vars(one)) for place, one in _schedules_in(optimizer.lr_scheduler)]
    for place, owner, attributes in owners:
        names = [f"{place}{name}" for name, value in attributes.items() if _is_lost(value)]
        if names:
            _warn(type(owner).__name__, ", ".join(names))


def _warn_of_missing(owner: Any, names: Collection[str]) -> None:
    if names:
        _logger.warning(
            "the file has no number for %s of this %s, which keeps its own; if updates have made "
            "it, load the file into a Trainer that has made no step",
            ", ".join(sorted(names)),
            type(owner).__name__,
        )


@cache
def _warn(owner: str, names: str) -> None:
    _logger.warning(
        "a checkpoint holds the numbers that %s keeps in its attributes, and not its arrays and "
        "dictionaries: a resumed run begins with a new %s",
        owner,
        names,
    )


def _schedules_in(
    schedule: Optional[LRScheduler], place: str = "", seen: tuple[Any, ...] = ()
) -> Iterator[tuple[str, LRScheduler]]:
    """Yield a schedule and those in its attributes, each with the beginning of its keys."""
    if schedule is None or any(schedule is one for one in seen):
        return
    yield place, schedule
    for name, value in vars(schedule).items():
        parts = {f"{name}.": value} if isinstance(value, LRScheduler) else {}
        if isinstance(value, (list, tuple)):
            parts = {f"{name}.{i}.": part for i, part in enumerate(value)}
        for key, part in parts.items():
            if isinstance(part, LRScheduler):
                yield from _schedules_in(part, f"{place}{key}", (*seen, schedule))


def _is_list(value: Any) -> bool:
    """Whether it is a list of numbers, or a tuple."""
    return isinstance(value, (list, tuple)) and all(isinstance(one, NUMBERS) for one in value)


def _is_lost(value: Any) -> bool:
    """Whether it may hold numbers, in a form that a file does not take."""
    if isinstance(value, (mx.nd.NDArray, np.ndarray)):
        return True
    if isinstance(value, (list, tuple)):
        return any(map(_is_lost, value))
    return isinstance(value, (dict, set)) and bool(value)
