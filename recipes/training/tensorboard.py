"""The curves of a run for TensorBoard: a copy of the numbers in ``history.jsonl``.

The package is imported only for a run with ``--tensorboard``; it needs neither TensorFlow nor
PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Optional

from mpgluon_tools.recorder.numerics.files import NumericsStep

from recipes.training.history import Event

__all__ = ["TensorBoard"]

_STEP = ("loss", "learning_rate", "loss_scale", "gradient_norm", "images_per_second")
_EPOCH = (
    *("train_loss", "train_accuracy", "test_accuracy", "test_accuracy_per_class"),
    "test_accuracy_of_weights",
)


class TensorBoard:
    """The event file of a run, in a folder that is written from :meth:`begin` on.

    Raises
    ------
    ValueError
        If TensorBoard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.summary import Writer
        except ImportError as error:
            raise ValueError(
                f"TensorBoard cannot be imported ({error}); install it with "
                "'pip install tensorboard', or leave out --tensorboard: history.jsonl holds the "
                "same numbers"
            ) from error
        self._make_writer = Writer
        self._folder = folder
        self._writer: Optional[Any] = None
        self._skipped_steps = 0

    def begin(self, events: Iterable[Event]) -> None:
        """Replace the files of the folder by one with these events.

        A continued run thus has every step once, even if it began without TensorBoard. These
        events have the time of this call.
        """
        for path in self._folder.glob("events.out.tfevents.*"):
            path.unlink()
        self._writer = self._make_writer(str(self._folder))
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Write the numbers of a step or an epoch; ignore other events."""
        if event["event"] == "step":
            self._skipped_steps += event["skipped"]
            scalars = {name: event.get(name) for name in _STEP}
            scalars["accuracy"] = event["correct"] / event["images"]
            scalars["skipped_steps"] = self._skipped_steps
        elif event["event"] == "epoch":
            scalars = {name: event.get(name) for name in _EPOCH}
        else:
            return
        assert self._writer is not None
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(f"{event['event']}/{name}", value, event["step"])
        if event["event"] == "epoch":
            self._writer.flush()

    def add_numerics(self, step: NumericsStep) -> None:
        """Write the recorded numbers of a step, layer by layer."""
        assert self._writer is not None
        for tensor in step.of("activation", "activation gradient", "gradient"):
            place = f"{tensor.id.kind}s/{tensor.id.name}"
            self._writer.add_scalar(f"largest {place}", tensor.statistics.largest, step.number)
            self._writer.add_scalar(f"underflowing {place}", tensor.underflow, step.number)
        for name, ratio in step.update_ratios().items():
            self._writer.add_scalar(f"update over weight/{name}", ratio, step.number)

    def close(self) -> None:
        """Flush and close the file; further calls do nothing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
