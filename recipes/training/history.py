"""The history of a run: a file with one JSON object per event.

Events are ``start`` (config, versions, machine), ``step``, ``epoch`` and ``end``. A step has

- ``step`` (from 1), ``epoch`` (from 0), ``images``, ``correct`` (of them), ``loss`` (their mean),
- ``learning_rate``, ``loss_scale`` (of this step), ``skipped``,
- ``flags``, a line for each layer that overflowed or made a NaN (:func:`mpgluon.amp.step_flags`),
- ``overflow_began_in``, of a skipped step the pass and the layer, such as ``"backward dense0"``,
  and of several processes the rank (``"backward dense0 on rank 1"``) or ``"backward sum over
  processes"``; ``null`` if no layer raised a flag; ``network`` itself rounds the gradient of its
  result,
- ``gradient_norm`` in true units, ``null`` without a loss scale or clipping,
- ``images_per_second`` since the end of the previous step, including the wait for images,
- ``image_wait``, the share of that time in which the step waited for images, in [0, 1].

An epoch has ``train_loss``, ``train_accuracy``, ``training_seconds`` and

- ``tested``: ``"weights"``, or, of a run with ``--ema``, their ``"average"``,
- ``test_accuracy`` and ``test_accuracy_per_class`` (the mean over classes) of the tested weights,
- with ``--ema``, ``test_accuracy_of_weights``.

JSON has no infinity and no NaN: they are the strings ``"Infinity"``, ``"-Infinity"`` and ``"NaN"``,
as in the JSON of Protocol Buffers; Python's ``float`` reads them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Callable, Optional

from mpgluon.base.files import atomic_write, sync
from mpgluon.base.machine import describe_machine, installed_versions
from mpgluon.errors import DataError

__all__ = ["Event", "History", "describe_machine", "installed_versions", "to_json"]

Event = dict[str, Any]

_NO_JSON = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


class History:
    """The events of a run, in memory and in a file.

    Parameters
    ----------
    path : Path or None
        The JSON-lines file; ``None`` keeps the events in memory only.
    steps_done : int
        The step from which a run continues: later events are dropped, since they will happen
        again. Zero starts a new file.

    Raises
    ------
    DataError
        If the file lacks a step before.

    Attributes
    ----------
    events : list of dict
        Oldest first, with infinite and NaN numbers as numbers.
    listeners : list of callable
        Callbacks, called with each event that is added.
    """

    def __init__(self, path: Optional[Path], steps_done: int = 0) -> None:
        self.events: list[Event] = []
        self.listeners: list[Callable[[Event], None]] = []
        self._path = path
        if path is None:
            return
        if steps_done:
            lines = path.read_text().splitlines() if path.exists() else []
            complete = (_parse(line) for line in lines)
            self.events = [e for e in complete if e and e.get("step", 0) <= steps_done]
            missing = set(range(1, steps_done + 1)) - {e["step"] for e in self.of("step")}
            if missing:
                raise DataError(
                    f"{path} lacks {len(missing)} of the {steps_done} steps before the checkpoint, "
                    f"step {min(missing)} first: the figures of the whole run cannot be computed; "
                    "put the file back, or begin again with another output_dir"
                )
        with atomic_write(path) as file:
            file.writelines(f"{to_json(event)}\n".encode() for event in self.events)

    def add(self, event: str, **values: Any) -> None:
        """Append an event to the list and to the file."""
        self.events.append({"event": event, **values})
        if self._path is not None:
            with open(self._path, "a") as file:
                file.write(to_json(self.events[-1]) + "\n")
        for listener in self.listeners:
            listener(self.events[-1])

    def sync(self) -> None:
        """Flush the added events to the disk, so that they survive a power cut."""
        if self._path is not None:
            sync(self._path)

    def of(self, event: str) -> list[Event]:
        """Return the events of one kind, oldest first."""
        return [e for e in self.events if e["event"] == event]


def to_json(values: dict[str, Any], *, indent: Optional[int] = None) -> str:
    """Return an object in strict JSON; its values may be infinite or NaN, but not nested ones."""
    portable = {name: _portable(value) for name, value in values.items()}
    return json.dumps(portable, indent=indent, allow_nan=False)


def _portable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)  # a string such as "NaN"
    return value


def _parse(line: str) -> Event:
    try:
        event: Event = json.loads(line)
    except ValueError:  # the last line of a run that was killed while writing it
        return {}
    return {n: _NO_JSON.get(v, v) if isinstance(v, str) else v for n, v in event.items()}
