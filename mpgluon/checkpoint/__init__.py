"""Checkpoints: everything that a training run depends on, in one file.

:data:`PARTS` lists the parts of a file. The owner of each part exports, checks and applies it; the
layout of the file is decided in :mod:`mpgluon.base.archive`. Data sets and loops put their state
into ``extra``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Callable, NamedTuple, Union

from mpgluon.base.archive import Arrays, read_archive, write_archive
from mpgluon.base.blocks import require_values
from mpgluon.checkpoint.average import AVERAGE_FIELDS, export_average, prepare_average
from mpgluon.checkpoint.fields import Kind, check_fields
from mpgluon.checkpoint.parameters import (
    FP32_FIELDS,
    check_parameters,
    completed,
    converted,
    export_fp32_values,
    export_values,
    prepare_fp32_values,
    prepare_values,
)
from mpgluon.checkpoint.random_states import (
    random_states,
    set_random_states,
    validated_random_states,
)
from mpgluon.checkpoint.saved import Apply, Content, Run
from mpgluon.checkpoint.scale_histories import (
    scale_histories,
    set_scale_histories,
    validated_scale_histories,
)
from mpgluon.checkpoint.trainer import (
    LOSS_SCALE_FIELDS,
    OPTIMIZER_FIELDS,
    export_loss_scale,
    export_optimizer,
    prepare_loss_scale,
    prepare_optimizer,
)
from mpgluon.errors import CheckpointError
from mpgluon.updates import gluon_trainer
from mpgluon.updates.masters import keep_masters

import mxnet as mx
import numpy as np
from mxnet import gluon

__all__ = [
    "PARTS",
    "Part",
    "check_parameters",
    "load_checkpoint",
    "read_extra",
    "read_parameters",
    "save_checkpoint",
]

_logger = logging.getLogger(__name__)


class Part(NamedTuple):
    """A part of a checkpoint: its keys in the file, and its owner's functions."""

    since: str
    """The first version of mpgluon whose files have it."""

    section: str
    """The part of the header that has the fields; "" for the header itself."""

    fields: Mapping[str, Kind]
    """The kinds of the header's fields, by their names."""

    arrays: Mapping[str, str]
    """The names of arrays in the file, by their kind; what differs is in ``<…>``."""

    export: Callable[[Run], Content]
    """Returns the part's content; changes nothing."""

    prepare: Callable[[Run, Content], Apply]
    """Checks a file's content, with ValueError, and returns the function that applies it."""

    refusal: str = "is damaged: {}; use an earlier one"
    """The error's words about a file whose content is refused."""


def _prepare_scale_histories(run: Run, saved: Content) -> Apply:
    return partial(set_scale_histories, run.net, validated_scale_histories(saved.arrays["history"]))


def _prepare_random_states(_: Run, saved: Content) -> Apply:
    return partial(set_random_states, validated_random_states(saved.fields["random"]))


def _prepare_extra(run: Run, saved: Content) -> Apply:
    return partial(run.extra.update, saved.fields["extra"])


_NO_ROWS = "which a checkpoint cannot hold"
_OTHER_TRAINER = "belongs to another Trainer: {}"

PARTS = {
    "FP32 values": Part(
        *("0.1.0", "", FP32_FIELDS, {"fp32": "fp32/<parameter>"}),
        *(export_fp32_values, prepare_fp32_values),
    ),
    "optimizer": Part(
        *("0.1.0", "trainer", OPTIMIZER_FIELDS),
        {
            "master": "trainer/<parameter>/master",
            "compensation": "trainer/<parameter>/compensation",
            "state": "trainer/<parameter, place>",
        },
        *(export_optimizer, prepare_optimizer, _OTHER_TRAINER),
    ),
    "loss scale": Part(
        *("0.1.0", "trainer", LOSS_SCALE_FIELDS, {}),
        *(export_loss_scale, prepare_loss_scale, _OTHER_TRAINER),
    ),
    "average": Part(
        *("0.2.0", "trainer", AVERAGE_FIELDS, {"average": "trainer/<parameter>/average"}),
        *(export_average, prepare_average, _OTHER_TRAINER),
    ),
    "parameters": Part(
        *("0.1.0", "", {}),
        {"value": "parameter/<parameter>", "replica": "replica/<device, parameter>"},
        *(export_values, prepare_values),
    ),
    "scale histories": Part(
        *("0.2.0", "", {}, {"history": "scale_history/<block, product>"}),
        *(lambda run: Content({}, {"history": scale_histories(run.net)}), _prepare_scale_histories),
    ),
    "random states": Part(
        *("0.1.0", "", {"random": {}}, {}),
        *(lambda _: Content({"random": random_states()}, {}), _prepare_random_states),
    ),
    "extra": Part(
        *("0.1.0", "", {"extra": {}}, {}),
        *(lambda run: Content({"extra": run.extra}, {}), _prepare_extra),
    ),
}
"""The parts of a checkpoint, in the order in which a file is applied."""


def save_checkpoint(
    path: Union[str, Path], net: gluon.Block, trainer: gluon.Trainer, **extra: Any
) -> None:
    """Write parameters, optimizer state, scales, weight average and random states to one file.

    The file is written under another name in the same folder, flushed to the disk and renamed, so
    that a crash at any moment leaves either the old file or the new one. Waits for the device.
    MXNet does not expose the state of its random generators, so they receive a new seed, a number
    drawn from them that the file contains: this run and one that continues from the file draw the
    same numbers.
    Weights that are infinite or NaN are written too, and a warning is logged.

    Parameters
    ----------
    path : str or Path
        Usually ends in ``.npz``.
    net : gluon.Block
        With initialized parameters; plain, cast or autocast.
    trainer : gluon.Trainer
        With or without a loss scale.
    **extra
        Whatever else the run needs, as JSON can hold it: the epoch, the config.

    Raises
    ------
    CheckpointError
        If the disk is full, the folder cannot be written, or the Trainer has parts that a file
        cannot hold, such as parameters that are not in ``net``; an existing file stays as it was.
    TypeError
        If JSON cannot hold ``extra``, as it holds no dict with keys other than text, or an argument
        is of another kind.
    ValueError
        If a parameter has no values yet.
    TrainerStateError
        If the Trainer's kvstore holds the optimizer's state (``update_on_kvstore``), if it has
        stepped before its network was cast, if a `mpgluon.WeightAverage` is in the network, or if
        weights are stored as rows (``row_sparse``).
    """
    _check_arguments(net, trainer)
    _refuse_other_keys(extra)
    gluon_trainer.refuse_sparse_weights(net.collect_params().values(), _NO_ROWS)
    require_values(net)
    path, run = Path(path), Run(net, trainer, extra)
    _refuse_what_is_trained_elsewhere(run, f"{path} was not written")
    mx.nd.waitall()  # a running inference may change the layout of a weight that is being read
    keep_masters(trainer)  # as the run does that goes on from the file
    contents = {name: part.export(run) for name, part in PARTS.items()}
    header: dict[str, Any] = {}
    arrays: Arrays = {}
    for name, part in PARTS.items():
        section = header.setdefault(part.section, {}) if part.section else header
        section.update(contents[name].fields)
        try:
            check_fields(contents[name].fields, part.fields, part.section)
        except ValueError as error:
            raise CheckpointError(f"{path} was not written: {error}") from error
        for kind, by_name in contents[name].arrays.items():
            before, after = _around(part.arrays[kind])
            arrays.update({f"{before}{key}{after}": array for key, array in by_name.items()})
    try:
        write_archive(path, header, arrays)
    except TypeError as error:
        raise TypeError(
            f"apart from its arrays a checkpoint keeps numbers, text, lists and dicts, and one of "
            f"{', '.join(extra)} is something else: {error}"
        ) from error
    _warn_of_bad_weights(path, _changing(run, contents), "was written; keep an earlier one")


def load_checkpoint(
    path: Union[str, Path], net: gluon.Block, trainer: gluon.Trainer
) -> dict[str, Any]:
    """Bring a network, its Trainer and the random states back to where a file left them.

    A step in progress, with a scaled loss and no ``trainer.step`` yet, is discarded. Weights
    that are infinite or NaN are loaded as they are, and a warning is logged.

    Parameters
    ----------
    path : str or Path
        What :func:`save_checkpoint` wrote.
    net : gluon.Block
        Initialized, with the structure that it had then; shapes that wait for the first call
        (``Dense(10)``) are taken from the file. Its cast may be another one: an FP32 parameter
        takes the master of a float16 one, and the reverse, bit for bit.
    trainer : gluon.Trainer
        Made for ``net`` in the same way as then, its loss scale and `mpgluon.WeightAverage`
        included. If parameters are of another format than in the file, one of the two may have no
        loss scale or ``"none"``: the Trainer's own then stays as it is.

    Returns
    -------
    dict
        The ``extra`` of :func:`save_checkpoint`.

    Raises
    ------
    CheckpointError
        If the file is missing, damaged, of another kind, or of another network or Trainer, or the
        Trainer trains parameters that are not in ``net``. All of it is read and compared before
        anything is changed.
    TrainerStateError
        If a `mpgluon.WeightAverage` is in the network, or weights are stored as rows.
    TypeError, ValueError
        If an argument is of another kind, or the network was not initialized.
    """
    _check_arguments(net, trainer)
    gluon_trainer.refuse_sparse_weights(net.collect_params().values(), _NO_ROWS)
    require_values(net, with_shapes=False)
    path, contents = Path(path), _read(Path(path))
    _refuse_what_is_trained_elsewhere(Run(net, trainer), f"{path} was not loaded")
    parameters = net._collect_params_with_prefix()
    in_file = contents["parameters"].arrays["value"]
    grids = contents["FP32 values"].fields["grids"] or {}
    values, wide = converted(path, parameters, in_file, _widest(contents), grids)
    run = Run(net, trainer, {}, values, wide)
    changes = []
    with completed(parameters, in_file):
        check_parameters(path, parameters, values)
        for name, part in PARTS.items():
            try:
                changes.append(part.prepare(run, contents[name]))
            except ValueError as error:
                raise CheckpointError(f"{path} {part.refusal.format(error)}") from error
    for apply in changes:  # from here on, nothing is refused
        apply()
    _warn_of_bad_weights(path, _changing(run, contents), "was loaded; use an earlier one")
    return run.extra


def _refuse_other_keys(value: Any) -> None:
    """Raise TypeError if a dict within ``extra`` has keys that JSON would turn into text."""
    if isinstance(value, (list, tuple)):
        value = dict(zip(map(str, range(len(value))), value))
    for key, inner in value.items() if isinstance(value, dict) else ():
        if not isinstance(key, str):
            raise TypeError(f"a dict in a checkpoint has text as its keys, received {key!r}")
        _refuse_other_keys(inner)


def read_extra(path: Union[str, Path]) -> dict[str, Any]:
    """Return the ``extra`` of a checkpoint without loading it.

    Raises
    ------
    CheckpointError
        If the file is missing, damaged or of another kind.
    """
    header, _ = read_archive(Path(path), only_header=True)
    try:
        check_fields(header, {"extra": {}})
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}; use an earlier one") from error
    extra: dict[str, Any] = header["extra"]
    return extra


def read_parameters(path: Union[str, Path]) -> Arrays:
    """Return the parameters of a checkpoint by name, for evaluation and inference.

    Those are their averages if the file has them (`mpgluon.WeightAverage`), otherwise FP32 masters
    where it has those.

    If some are infinite or NaN, a warning is logged.

    Raises
    ------
    CheckpointError
        If the file is missing, damaged or of another kind.
    """
    contents = _read(Path(path))
    values = {**_widest(contents), **contents["average"].arrays["average"]}
    values = {name: values[name] for name in contents["parameters"].arrays["value"]}
    _warn_of_bad_weights(Path(path), values, "was read; use an earlier one")
    return values


def _check_arguments(net: Any, trainer: Any) -> None:
    for value, kind, name in ((net, gluon.Block, "net"), (trainer, gluon.Trainer, "trainer")):
        if not isinstance(value, kind):
            raise TypeError(
                f"a checkpoint takes path, net, trainer: {name} must be a gluon.{kind.__name__}, "
                f"received {type(value).__name__}; for parameters alone, net.save_parameters and "
                "net.load_parameters"
            )


def _refuse_what_is_trained_elsewhere(run: Run, fate: str) -> None:
    elsewhere = run.trained_elsewhere
    if elsewhere:
        raise CheckpointError(
            f"{fate}: this Trainer trains {len(elsewhere)} parameters that are not in the network "
            f"({elsewhere[0]} first), and a file has the values of the network's; give all blocks "
            "that it trains a common one, nn.HybridSequential() for instance, and save that"
        )


def _around(pattern: str) -> tuple[str, str]:
    """Return the prefix and the suffix around the name in a pattern for arrays' names."""
    before, _, rest = pattern.partition("<")
    return before, rest.partition(">")[2]


def _read(path: Path) -> dict[str, Content]:
    """Return the contents of a file by part; fields that it lacks are ``None``."""
    header, arrays = read_archive(path)
    contents = {name: Content({}, {kind: {} for kind in PARTS[name].arrays}) for name in PARTS}
    try:
        for name, part in PARTS.items():
            check_fields(header, {part.section: {}} if part.section else {})
            section = header[part.section] if part.section else header
            check_fields(section, part.fields, part.section)
            contents[name].fields.update({field: section.get(field) for field in part.fields})
    except ValueError as error:
        raise CheckpointError(f"{path} {part.refusal.format(error)}") from error
    places = [
        (*_around(pattern), contents[name].arrays[kind])
        for name, part in PARTS.items()
        for kind, pattern in part.arrays.items()
    ]
    places.sort(key=lambda place: -len(place[0]) - len(place[1]))  # "trainer/<…>" comes last
    for key, array in arrays.items():
        for before, after, by_name in places:
            name = key.removeprefix(before).removesuffix(after)
            if key == f"{before}{name}{after}":  # not "trainer/average", the state of "average"
                by_name[name] = array
                break
    return contents


def _widest(contents: Mapping[str, Content]) -> Arrays:
    """Return each parameter's master, its FP32 value without one, or its value."""
    return {
        **contents["parameters"].arrays["value"],
        **contents["FP32 values"].arrays["fp32"],
        **contents["optimizer"].arrays.get("master", {}),
    }


def _changing(run: Run, contents: Mapping[str, Content]) -> Arrays:
    """Return the parameters in a file that training changes; a constant mask may be infinite."""
    values = contents["parameters"].arrays["value"]
    return {
        name: values[name]
        for name, parameter in run.parameters.items()
        if not isinstance(parameter, gluon.Constant)
    }


def _warn_of_bad_weights(path: Path, values: Arrays, fate: str) -> None:
    """Log which parameters and running statistics of a file are infinite or NaN."""
    bad = [
        f"{name} ({'NaN' if np.isnan(value).any() else 'infinite'})"
        for name, value in values.items()
        if not np.isfinite(value).all()
    ]
    if bad:
        _logger.warning(
            "%s holds weights that are not finite, %s%s: a run that continues from it trains "
            "nothing; it %s",
            path,
            ", ".join(bad[:3]),
            f" and {len(bad) - 3} more" if len(bad) > 3 else "",
            fate,
        )
