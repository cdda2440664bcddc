"""The part of a checkpoint that holds the average of a Trainer's weights."""

from __future__ import annotations

from mpgluon.base.devices import from_numpy, to_numpy
from mpgluon.checkpoint.fields import Kind, Maybe, is_count, is_finite
from mpgluon.checkpoint.saved import Apply, Content, Run
from mpgluon.updates import gluon_trainer

import numpy as np

__all__ = ["AVERAGE_FIELDS", "export_average", "prepare_average"]

AVERAGE_FIELDS: dict[str, Kind] = {"average": Maybe({"decay": is_finite, "updates": is_count})}


def export_average(run: Run) -> Content:
    """Return the average of a Trainer's weights, if it has one, for a checkpoint."""
    _refuse_while_swapped_in(run, "save_checkpoint")
    average = gluon_trainer.average_of(run.trainer)
    if average is None:
        return Content({"average": None}, {})
    arrays = {
        name: to_numpy(average.arrays[index])
        for name, index in run.indices.items()
        if index in average.arrays
    }
    fields = {"decay": average.decay, "updates": average.updates}
    return Content({"average": fields}, {"average": arrays})


def prepare_average(run: Run, saved: Content) -> Apply:
    """Check a content of :func:`export_average`, and return the function that applies it.

    Raises
    ------
    ValueError
        If only one of the two Trainers has an average, or it has another decay, other parameters,
        shapes or formats.
    TrainerStateError
        If an average is in the network, this Trainer's or another's.
    """
    _refuse_while_swapped_in(run, "load_checkpoint")
    average, of_file = gluon_trainer.average_of(run.trainer), saved.fields["average"]
    if average is None and of_file is None:
        return lambda: None
    if of_file is None:
        raise ValueError(
            "it has no average of the weights, and this one has; load it first, and then create "
            f"mpgluon.WeightAverage(trainer, {average.decay}), which begins after the next step"
        )
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
    in_file = saved.arrays["average"]
    unknown = sorted(in_file.keys() - run.indices.keys())
    if unknown:
        raise ValueError(f"it averaged parameters that this one does not have: {unknown[:5]}")
    parameters, arrays = gluon_trainer.parameters_of(run.trainer), {}
    for name, array in in_file.items():
        index = run.indices[name]
        weight = parameters[index].list_data()[0]
        wide = np.promote_types(weight.dtype, np.float32)
        if array.shape != weight.shape or array.dtype != wide:
            raise ValueError(
                f"its average of {parameters[index].name} is {array.dtype} of shape "
                f"{array.shape}, and this Trainer's is {wide} of shape {weight.shape}"
            )
        arrays[index] = from_numpy(array).as_in_context(weight.ctx)
    return lambda: average.set_all(arrays, of_file["updates"])


def _refuse_while_swapped_in(run: Run, what: str) -> None:
    for trainer in {run.trainer, *(one._trainer for one in run.parameters.values())} - {None}:
        average = gluon_trainer.average_of(trainer)
        if average is not None:
            average.refuse_while_swapped_in(what)
