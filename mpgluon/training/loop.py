"""The training loop: epochs of steps, a test after each, a checkpoint after each.

Reads top to bottom: :func:`train` prepares, :class:`_Run` does one epoch, one test, one
checkpoint at a time. It prints nothing but tqdm's bars, and those only when asked.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from tqdm import tqdm

from mpgluon import amp
from mpgluon.checkpoint import load_checkpoint, read_extra, save_checkpoint
from mpgluon.devices import parse_devices
from mpgluon.errors import CheckpointError
from mpgluon.plots import save_training_curves
from mpgluon.precision.casting import apply_policy
from mpgluon.training.checkpoints import RunCheckpoints
from mpgluon.training.config import TrainingConfig
from mpgluon.training.dataset import Dataset, open_dataset
from mpgluon.training.history import Event, History, describe_machine, installed_versions, to_json
from mpgluon.training.interruption import InterruptedRunError, Interruption
from mpgluon.training.networks import (
    build_network,
    has_input_normalization,
    load_pretrained,
)
from mpgluon.training.optimizers import make_optimizer
from mpgluon.training.tensorboard import TensorBoard

__all__ = ["train"]

_logger = logging.getLogger(__name__)


def train(
    config: TrainingConfig, *, resume: bool = False, progress: bool = False
) -> dict[str, Any]:
    """Train a network as a config says, and return its results.

    Parameters
    ----------
    config : TrainingConfig
    resume : bool
        Continue from the newest good checkpoint in ``config.output_dir``, if there is one.
    progress : bool
        Show progress bars on the standard error stream.

    Returns
    -------
    dict
        What ``results.json`` in ``config.output_dir`` holds: config, versions, machine and
        final figures. ``history.jsonl`` and ``curves.png`` lie beside it, and with
        ``config.tensorboard`` a folder ``tensorboard``.

    Raises
    ------
    ValueError, DataError, PrecisionError
        If the config asks for what is not there.
    CheckpointError
        If the folder holds another run, or a file does not fit.
    InterruptedRunError
        After Ctrl-C or SIGTERM; the state is saved.
    """
    devices = parse_devices(config.devices)
    checkpoints = RunCheckpoints(config, resume=resume)
    dataset = open_dataset(config, progress=progress)
    run = _Run(config, dataset, devices, progress=progress)
    try:
        run.resume(checkpoints)
        with Interruption() as interruption:
            run.fit(checkpoints, interruption)
    finally:
        run.close()
    return run.finish()


@dataclass
class _Position:
    """Where a run is: so many steps done, the last ones in this epoch at this batch."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0


class _Run:
    """A network, its Trainer, its data and how far it has come."""

    def __init__(
        self,
        config: TrainingConfig,
        dataset: Dataset,
        devices: list[mx.Context],
        *,
        progress: bool,
    ) -> None:
        self.config, self.dataset, self.devices = config, dataset, devices
        self.progress = progress
        self.position = _Position()
        self.history: Optional[History] = None
        self.tensorboard: Optional[TensorBoard] = None
        if config.tensorboard:
            self.tensorboard = TensorBoard(config.output_path / "tensorboard")
        self.train_batches, self.test_batches = dataset.loaders(config, len(devices))
        total_steps = config.epochs * len(self.train_batches)
        mx.random.seed(config.seed)
        np.random.seed(config.seed)  # MXNet's initializers draw from NumPy too
        classes = len(dataset.folder.classes)
        self.net = build_network(
            config.model, classes=classes, image_size=config.image_size, devices=devices
        )
        self.normalizes_input = has_input_normalization(self.net)
        self.fresh_parameters: list[str] = []
        if config.pretrained is not None:
            path = Path(config.pretrained)
            self.fresh_parameters = load_pretrained(self.net, path, classes=classes)
            if self.fresh_parameters:
                _logger.info("new head, not from %s: %s", path, ", ".join(self.fresh_parameters))
        if config.policy.compute_dtype != "float32":
            apply_policy(self.net, config.policy)
        self.net.hybridize(static_alloc=True, static_shape=True)
        self.loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
        self.trainer = gluon.Trainer(
            self.net.collect_params(),
            make_optimizer(config, total_steps),
            kvstore="device",
            update_on_kvstore=False,  # momenta stay where a checkpoint finds them
        )
        amp.init_trainer(self.trainer, config.make_loss_scale(total_steps))

    def resume(self, checkpoints: RunCheckpoints) -> None:
        """Go on from the newest good checkpoint, or begin; then write the log's header."""
        failures = []
        for path in checkpoints.newest_first():
            try:
                self._load(path)
                break
            except CheckpointError as error:
                _logger.warning("%s; trying the one before", error)
                failures.append(str(error))
        else:
            if failures:
                raise CheckpointError(f"no checkpoint can be continued: {'; '.join(failures)}")
        self.history = History(self.config.output_path / "history.jsonl", self.position.step)
        if self.tensorboard is not None:
            self.tensorboard.begin(self.history.events)
            self.history.listeners.append(self.tensorboard.add)
        self.history.add(
            "start",
            step=self.position.step,
            config=self.config.as_dict(),
            dataset=self._describe_dataset(),
            versions=installed_versions(),
            machine=describe_machine(),
        )

    def _load(self, path: Path) -> None:
        differences = self.config.differences(read_extra(path)["config"])
        if differences:
            raise ValueError(
                f"{path} was written by a run with another config: {'; '.join(differences)}; "
                "resume with the same options, or choose another --output-dir"
            )
        extra = load_checkpoint(path, self.net, self.trainer)
        self.position = _Position(**extra["position"])
        _logger.info("continuing from %s, after step %d", path, self.position.step)

    def fit(self, checkpoints: RunCheckpoints, interruption: Interruption) -> None:
        """Do the epochs that are left."""
        for epoch in range(self.position.epoch, self.config.epochs):
            self._train_epoch(interruption)
            if interruption.signal is None:
                self._end_epoch(epoch)
            path = self._save(checkpoints)
            if interruption.signal is not None:
                raise InterruptedRunError(interruption.signal, path)

    def _train_epoch(self, interruption: Interruption) -> None:
        assert self.history is not None
        position, loader = self.position, self.train_batches
        loader.set_epoch(position.epoch, position.batch)
        bar = tqdm(
            total=len(loader),
            initial=position.batch,
            desc=f"epoch {position.epoch + 1}/{self.config.epochs}",
            unit="step",
            disable=not self.progress,
        )
        seen = correct = 0
        began = ended = time.perf_counter()
        before = position.seconds
        with bar:
            for images, labels in loader:
                step = self._step(images, labels)
                since, ended = ended, time.perf_counter()
                speed = step["images"] / (ended - since)
                self.history.add("step", **step, images_per_second=speed)
                seen, correct = seen + step["images"], correct + step["correct"]
                position.step += 1
                position.batch = loader.batches_done
                position.seconds = before + ended - began
                bar.update()
                bar.set_postfix(
                    loss=f"{step['loss']:.3f}",
                    accuracy=f"{correct / seen:.3f}",
                    images_per_s=f"{seen / (ended - began):.1f}",
                    scale=f"{amp.loss_scale(self.trainer):g}",
                    skipped=amp.skipped_steps(self.trainer),
                )
                if interruption.signal is not None:
                    return

    def _step(self, images: mx.nd.NDArray, labels: mx.nd.NDArray) -> Event:
        """Do one step; return what the history says of it, but for its speed."""
        # Dropout is the same whether a run came here at once or was resumed.
        step_seed = np.random.SeedSequence([self.config.seed, self.position.step])
        mx.random.seed(int(step_seed.generate_state(1)[0]))
        image_parts = gluon.utils.split_and_load(images, self.devices, even_split=False)
        label_parts = gluon.utils.split_and_load(labels, self.devices, even_split=False)
        if self.normalizes_input:
            for part in image_parts:
                part.attach_grad()
        scale = amp.loss_scale(self.trainer)
        with autograd.record():
            logits = [self.net(part) for part in image_parts]
            losses = [self.loss_fn(*pair) for pair in zip(logits, label_parts)]
            with amp.scale_loss(losses, self.trainer) as scaled_losses:
                autograd.backward(scaled_losses)
        self.trainer.step(len(labels))
        return {
            "step": self.position.step + 1,
            "epoch": self.position.epoch,
            "loss": float(np.mean(_on_host(losses))),
            "learning_rate": self.trainer.learning_rate,
            "loss_scale": scale,
            "skipped": amp.step_was_skipped(self.trainer),
            "gradient_norm": amp.gradient_norm(self.trainer),
            "correct": int((_on_host(logits).argmax(axis=1) == labels.asnumpy()).sum()),
            "images": len(labels),
        }

    def _end_epoch(self, epoch: int) -> None:
        assert self.history is not None
        steps = [event for event in self.history.of("step") if event["epoch"] == epoch]
        images = sum(event["images"] for event in steps)
        accuracy, per_class = self._test()
        self.position.epoch, self.position.batch = epoch + 1, 0
        self.history.add(
            "epoch",
            step=self.position.step,
            epoch=epoch,
            train_loss=float(np.mean([event["loss"] for event in steps])),
            train_accuracy=sum(event["correct"] for event in steps) / images,
            test_accuracy=accuracy,
            test_accuracy_per_class=per_class,
            training_seconds=self.position.seconds,
        )
        _logger.info("epoch %d: test accuracy %.3f", epoch + 1, accuracy)

    def _test(self) -> tuple[float, float]:
        """Return the accuracy on the test images, and the mean of the classes' accuracies."""
        classes = len(self.dataset.folder.classes)
        right, total = np.zeros(classes), np.zeros(classes)
        for images, labels in self.test_batches:
            devices = self.devices[: len(images)]  # the last batch may have fewer images than that
            parts = gluon.utils.split_and_load(images, devices, even_split=False)
            predicted = _on_host([self.net(part) for part in parts]).argmax(axis=1)
            truth = labels.asnumpy()
            np.add.at(total, truth, 1)
            np.add.at(right, truth, predicted == truth)
        present = total > 0
        return float(right.sum() / total.sum()), float((right[present] / total[present]).mean())

    def _save(self, checkpoints: RunCheckpoints) -> Path:
        path = checkpoints.path(self.position.step)
        save_checkpoint(
            path,
            self.net,
            self.trainer,
            config=self.config.as_dict(),
            position=asdict(self.position),
        )
        checkpoints.remove_old()
        return path

    def finish(self) -> dict[str, Any]:
        """Write results.json, curves.png and the parameters; return the results."""
        assert self.history is not None
        steps, epochs = self.history.of("step"), self.history.of("epoch")
        folder, config = self.config.output_path, self.config
        title = f"{config.model}, {config.dtype}{' amp' if config.amp else ''}, {config.dataset}"
        save_training_curves(folder / "curves.png", steps, epochs, title=title)
        self.net.save_parameters(str(folder / "final.params"))
        results = {
            "config": config.as_dict(),
            "policy": asdict(config.policy),
            "dataset": self._describe_dataset(),
            "versions": installed_versions(),
            "machine": describe_machine(),
            "test_accuracy": epochs[-1]["test_accuracy"],
            "test_accuracy_per_class": epochs[-1]["test_accuracy_per_class"],
            "best_test_accuracy": max(event["test_accuracy"] for event in epochs),
            "train_loss": epochs[-1]["train_loss"],
            "steps": len(steps),
            "skipped_steps": amp.skipped_steps(self.trainer),
            "final_loss_scale": amp.loss_scale(self.trainer),
            "training_seconds": self.position.seconds,
            "images_per_second": sum(e["images"] for e in steps) / self.position.seconds,
            "parameters": sum(int(np.prod(p.shape)) for p in self.net.collect_params().values()),
            "fresh_parameters": self.fresh_parameters,
            "unreadable_images": [
                str(path)
                for path in (*self.train_batches.unreadable, *self.test_batches.unreadable)
            ],
        }
        (folder / "results.json").write_text(to_json(results, indent=2) + "\n")
        self.history.add("end", step=self.position.step, test_accuracy=results["test_accuracy"])
        return results

    def close(self) -> None:
        """End the worker processes, and what is written for TensorBoard."""
        self.train_batches.close()
        self.test_batches.close()
        if self.tensorboard is not None:
            self.tensorboard.close()

    def _describe_dataset(self) -> dict[str, Any]:
        return {
            "name": self.dataset.name,
            "classes": list(self.dataset.folder.classes),
            "train_images": len(self.dataset.train_indices),
            "test_images": len(self.dataset.test_indices),
        }


def _on_host(parts: list[mx.nd.NDArray]) -> Any:
    """Return the parts from all devices as one NumPy array; waits for them."""
    return np.concatenate([part.asnumpy() for part in parts])
