"""One training step, and one test, over all devices and processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, Optional

from mpgluon import amp
from mpgluon.cast.status_flags import LayerFlags
from mpgluon.distributed import Processes
from mpgluon.errors import DataError
from mpgluon.updates.average import WeightAverage
from mpgluon_tools.recorder.numerics.recorder import NumericsRecorder, RecordedLoss
from mpgluon_tools.recorder.steps.flight_recorder import FlightRecorder

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from numpy.typing import NDArray

from recipes.training.config import TrainingConfig

__all__ = ["Answers", "Stepper", "evaluate", "numerics_recorder_of", "recorder_of"]


class Stepper:
    """A callable that does one training step of ``net``.

    Parameters
    ----------
    net : Block
    trainer : gluon.Trainer
        With a loss scale, and a kvstore that sums over the devices and processes.
    devices : sequence of Context
    processes : Processes
    differentiate_inputs : bool
        Whether to compute gradients of the images, too; see `has_input_normalization`.
    accumulate : int
        The number of batches that the images of a step are divided into. With more than one,
        gradients of the trained parameters are set to accumulate (``grad_req="add"``).
    label_smoothing : float
        The share of a label's probability that all ``classes`` divide equally among them.
    classes : int
        The number of the network's results; used with ``label_smoothing``.
    average : WeightAverage, optional
        The average to update after each step.
    recorder : FlightRecorder, optional
        The recorder that receives each batch.
    numerics : NumericsRecorder, optional
        The recorder of the steps' numbers.
    """

    def __init__(
        self,
        net: gluon.Block,
        trainer: gluon.Trainer,
        devices: Sequence[mx.Context],
        processes: Processes,
        *,
        differentiate_inputs: bool,
        accumulate: int = 1,
        label_smoothing: float = 0.0,
        classes: int = 0,
        average: Optional[WeightAverage] = None,
        recorder: Optional[FlightRecorder] = None,
        numerics: Optional[NumericsRecorder] = None,
    ) -> None:
        self._net, self._trainer = net, trainer
        self._devices, self._processes = list(devices), processes
        self._differentiate_inputs, self._recorder = differentiate_inputs, recorder
        self._accumulate, self._average, self._numerics = accumulate, average, numerics
        self._smoothing, self._classes = label_smoothing, classes
        self._loss_fn = gluon.loss.SoftmaxCrossEntropyLoss(sparse_label=not label_smoothing)
        self._trained = [p for p in net.collect_params().values() if p.grad_req != "null"]
        if accumulate > 1:
            for parameter in self._trained:
                parameter.grad_req = "add"

    def __call__(
        self, images: mx.nd.NDArray, labels: mx.nd.NDArray, *, seed: int
    ) -> dict[str, Any]:
        """Do one step; return its figures for the history, over all processes.

        ``seed`` seeds MXNet's generators, for dropout.
        """
        mx.random.seed(seed)
        with self._recording_numbers(images, labels) as recorded:
            return self._step(images, labels, seed, recorded)

    def _recording_numbers(
        self, images: mx.nd.NDArray, labels: mx.nd.NDArray
    ) -> AbstractContextManager[RecordedLoss]:
        """Record the numbers of a step, if there is a recorder for them."""
        if self._numerics is None:
            return nullcontext(RecordedLoss())
        return self._numerics.step(images, labels)

    def _step(
        self, images: mx.nd.NDArray, labels: mx.nd.NDArray, seed: int, recorded: RecordedLoss
    ) -> dict[str, Any]:
        scale = amp.loss_scale(self._trainer)
        logits: list[mx.nd.NDArray] = []
        losses: list[mx.nd.NDArray] = []
        # If images are missing, each batch still has one for each device.
        batches = max(1, min(self._accumulate, len(labels) // len(self._devices)))
        ends = [len(labels) * number // batches for number in range(batches + 1)]
        for begin, end in zip(ends, ends[1:]):
            new_logits, new_losses = self._backward(images[begin:end], labels[begin:end], seed)
            logits += new_logits
            losses += new_losses
        recorded.loss = losses
        # Before the step, which divides by the images of all processes; waits for the forward pass.
        loss, correct, seen = self._processes.sum(
            [
                float(_on_host(losses).sum(dtype=np.float64)),
                int((_on_host(logits).argmax(axis=1) == labels.asnumpy()).sum()),
                len(labels),
            ],
            "the figures of a step",
        )
        if self._recorder is not None:
            self._recorder.check_loss(losses)
        self._trainer.step(int(seen))
        if self._accumulate > 1:
            for parameter in self._trained:
                parameter.zero_grad()
        if self._average is not None:
            self._average.update()
        return {
            "loss": loss / seen,
            "learning_rate": self._trainer.learning_rate,
            "loss_scale": scale,
            "skipped": amp.step_was_skipped(self._trainer),
            "flags": [str(self._shortly_named(one)) for one in amp.step_flags(self._trainer)],
            "overflow_began_in": self._where_it_began(),
            "gradient_norm": amp.gradient_norm(self._trainer),
            "correct": int(correct),
            "images": int(seen),
        }

    def _backward(
        self, images: mx.nd.NDArray, labels: mx.nd.NDArray, seed: int
    ) -> tuple[list[mx.nd.NDArray], list[mx.nd.NDArray]]:
        """Compute the gradients of one batch; return logits and losses of each device."""
        image_parts = gluon.utils.split_and_load(images, self._devices, even_split=False)
        label_parts = gluon.utils.split_and_load(labels, self._devices, even_split=False)
        if self._smoothing:
            label_parts = [self._smoothed(part) for part in label_parts]
        if self._differentiate_inputs:
            for part in image_parts:
                part.attach_grad()
        with self._recording(image_parts, label_parts, seed), autograd.record():
            logits = [self._net(part) for part in image_parts]
            losses = [self._loss_fn(*pair) for pair in zip(logits, label_parts)]
            with amp.scale_loss(losses, self._trainer) as scaled_losses:
                autograd.backward(scaled_losses)
        return logits, losses

    def _smoothed(self, labels: mx.nd.NDArray) -> mx.nd.NDArray:
        """Return the probabilities of the classes, shape (images, classes)."""
        others = self._smoothing / self._classes
        on = 1 - self._smoothing + others
        return mx.nd.one_hot(labels, self._classes, on_value=on, off_value=others)

    def _where_it_began(self) -> Optional[str]:
        """Return the pass and the layer in which the overflow of a skipped step began, if known."""
        if not amp.step_was_skipped(self._trainer):
            return None
        for direction in ("forward", "backward"):
            layer = amp.step_flags(self._trainer).first(direction)
            if layer is not None:
                rank = "" if layer.rank is None else f" on rank {layer.rank}"
                return f"{direction} {self._shortly_named(layer).layer}{rank}"
        return None

    def _shortly_named(self, flags: LayerFlags) -> LayerFlags:
        """Return flags whose layer's name lacks the network's prefix, which counts networks."""
        name = flags.layer.removeprefix(self._net.prefix)
        return replace(flags, layer="network" if flags.layer == self._net.name else name)

    def _recording(
        self, image_parts: list[mx.nd.NDArray], label_parts: list[mx.nd.NDArray], seed: int
    ) -> AbstractContextManager[None]:
        """Pass a batch to the recorder, if there is one; it sets a new seed."""
        if self._recorder is None:
            return nullcontext()
        return self._recorder.step(image_parts, label_parts, seed=seed)


def recorder_of(
    config: TrainingConfig,
    net: gluon.Block,
    trainer: gluon.Trainer,
    processes: Processes,
    classes: int,
) -> Optional[FlightRecorder]:
    """Return a recorder of the steps that overflow, each process's own; None if unwanted."""
    if not config.record_overflows:
        return None
    folder = config.output_path / "overflows"
    return FlightRecorder(
        net,
        trainer,
        folder if processes.world_size == 1 else folder / f"rank-{processes.rank}",
        network=f"{config.model}(classes={classes}, image_size={config.image_size})",
        loss=f"SoftmaxCrossEntropyLoss(sparse_label={not config.label_smoothing})",
        keep=config.record_overflows,
    )


def numerics_recorder_of(
    config: TrainingConfig, net: gluon.Block, trainer: gluon.Trainer, processes: Processes
) -> Optional[NumericsRecorder]:
    """Return a recorder of the numbers of steps, on the first process; None if unwanted."""
    if not config.record_numerics or not processes.is_first:
        return None
    folder = config.output_path / "numerics"
    return NumericsRecorder(net, trainer, folder, every=config.record_numerics)


class Answers(NamedTuple):
    """A network's answers to the images of a test, in the order of its batches.

    Attributes
    ----------
    labels, answers : ndarray of int, shape (N,)
        The right and the most probable classes.
    probabilities, of_right : ndarray of float, shape (N,)
        The probabilities of the answers, and of the right classes.
    """

    labels: NDArray[Any]
    answers: NDArray[Any]
    probabilities: NDArray[Any]
    of_right: NDArray[Any]


def evaluate(
    net: gluon.Block,
    batches: Iterable[tuple[mx.nd.NDArray, mx.nd.NDArray]],
    classes: int,
    devices: Sequence[mx.Context],
    processes: Processes,
    average: Optional[WeightAverage] = None,
) -> tuple[dict[str, Any], Answers]:
    """Return a test's figures for the history, over all processes, and this process's answers.

    They belong to the average of the weights if there is one; the weights' accuracy is added then.
    Processes may have different numbers of batches, or none.
    """
    answers = _answers(net, batches, devices)
    accuracy, per_class = _accuracies(answers, classes, processes)
    of_weights = {}
    if average is not None:
        of_weights = {"test_accuracy_of_weights": accuracy}
        with average.swapped_in():
            answers = _answers(net, batches, devices)
        accuracy, per_class = _accuracies(answers, classes, processes)
    figures = {
        "tested": "weights" if average is None else "average",
        "test_accuracy": accuracy,
        "test_accuracy_per_class": per_class,
        **of_weights,
    }
    return figures, answers


def _answers(
    net: gluon.Block,
    batches: Iterable[tuple[mx.nd.NDArray, mx.nd.NDArray]],
    devices: Sequence[mx.Context],
) -> Answers:
    def each_batch() -> Iterator[Answers]:
        yield Answers(*np.empty((2, 0), int), *np.empty((2, 0)))  # of a process without images
        for images, labels in batches:
            used = list(devices[: len(images)])  # a last batch with fewer images than devices
            parts = gluon.utils.split_and_load(images, used, even_split=False)
            logits = _on_host([net(part) for part in parts]).astype(np.float64)
            with np.errstate(invalid="ignore"):  # of logits that have become infinite
                powers = np.exp(logits - logits.max(axis=1, keepdims=True))
            softmax = powers / powers.sum(axis=1, keepdims=True)
            truth, answers = labels.asnumpy(), logits.argmax(axis=1)
            each = np.arange(len(truth))
            yield Answers(truth, answers, softmax[each, answers], softmax[each, truth])

    return Answers(*map(np.concatenate, zip(*each_batch())))


def _accuracies(answers: Answers, classes: int, processes: Processes) -> tuple[float, float]:
    """Return the accuracy on the images of all processes, and the mean of the classes' ones."""
    right, total = np.zeros(classes), np.zeros(classes)
    np.add.at(total, answers.labels, 1)
    np.add.at(right, answers.labels, answers.answers == answers.labels)
    sums = np.array(processes.sum([*right, *total], "the figures of a test"))
    right, total = sums[:classes], sums[classes:]
    if not total.any():
        raise DataError("no image for testing can be read; see data_dir")
    present = total > 0
    return float(right.sum() / total.sum()), float((right[present] / total[present]).mean())


def _on_host(parts: Sequence[mx.nd.NDArray]) -> NDArray[Any]:
    """Return the parts of all devices as one NumPy array; waits for the devices."""
    return np.concatenate([part.asnumpy() for part in parts])
