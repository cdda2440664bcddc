"""The training loop: epochs of steps, each followed by a test and a checkpoint.

:func:`train` prepares a :class:`_Run`, which does one epoch, one test and one checkpoint at a
time. All processes run the same loop; rank 0 alone reads and writes checkpoints and results. Only
progress bars are printed, with ``progress=True``.
"""

from __future__ import annotations

import logging
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

from mpgluon import amp
from mpgluon.base.blocks import shape_of
from mpgluon.base.files import atomic_write
from mpgluon.checkpoint import load_checkpoint, read_extra, save_checkpoint
from mpgluon.distributed import (
    MpiKVStore,
    OneProcess,
    Processes,
    average_batch_norm,
    check_agreement,
    devices_of_process,
    share_state,
)
from mpgluon.errors import DataError
from mpgluon.formats.loss_scale import LossScale
from mpgluon.tools.plots import save_training_curves
from mpgluon.updates.average import WeightAverage
from mpgluon_tools.tables import counted

import mxnet as mx
import numpy as np
from mxnet import gluon
from tqdm import tqdm

from recipes.data.synthetic import SyntheticLoader
from recipes.training.checkpoints import Resume, RunCheckpoints
from recipes.training.config import TrainingConfig
from recipes.training.dataset import Dataset, open_dataset
from recipes.training.history import (
    Event,
    History,
    describe_machine,
    installed_versions,
    to_json,
)
from recipes.training.interruption import InterruptedRunError, Interruption
from recipes.training.networks import prepare_network, refuse_unknown_network
from recipes.training.optimizers import make_optimizer
from recipes.training.predictions import Prediction, confusions, save_predictions
from recipes.training.steps import Answers, Stepper, evaluate, numerics_recorder_of, recorder_of
from recipes.training.tensorboard import TensorBoard

__all__ = ["train"]

_logger = logging.getLogger(__name__)

_TIMED_STEPS = 3, 10  # of those that a process does; the first ones compile


def train(
    config: TrainingConfig,
    *,
    resume: Resume = False,
    progress: bool = False,
    processes: Optional[Processes] = None,
    dataset: Optional[Dataset] = None,
    loss_scale: Optional[LossScale] = None,
) -> dict[str, Any]:
    """Train the network of a config and return its results.

    Parameters
    ----------
    config : TrainingConfig
    resume : bool or "auto"
        Continue from the newest good checkpoint in ``config.output_dir``; or, ``"auto"``, begin.
    progress : bool
        Show progress bars on the standard error stream.
    processes : Processes, optional
        The processes that train together, entered; all of them call this. Default: this one alone.
    dataset : Dataset, optional
        The images of the config, if they are opened already.
    loss_scale : LossScale, optional
        One that no option of the config makes.

    Returns
    -------
    dict
        The content of ``results.json`` in ``config.output_dir``: config, versions, machine and
        final figures. ``history.jsonl``, ``curves.png`` and the files of
        `recipes.training.predictions.save_predictions` are written to the same folder, and with
        ``config.tensorboard`` a folder ``tensorboard``.

    Raises
    ------
    ValueError, DataError, PrecisionError
        If a network, optimizer, device, data set or file of the config is missing.
    CheckpointError
        If the folder holds another run, also one that another process trains, or none to resume,
        or a file does not fit.
    DistributedError
        If a process is late or fails.
    InterruptedRunError
        After Ctrl-C, SIGTERM or SIGUSR1, on all processes if one received it, with a checkpoint.
    """
    processes = OneProcess() if processes is None else processes
    if processes.world_size > 1 and config.kvstore != "mpi":
        raise ValueError(
            f"{processes.world_size} processes train together only with kvstore 'mpi', received "
            f"{config.kvstore!r}"
        )
    progress = progress and processes.is_first
    devices = devices_of_process(config.devices, processes)
    refuse_unknown_network(config.model)  # before images are read or rendered
    checkpoints = RunCheckpoints(config, resume=resume, writes=processes.is_first)
    with checkpoints.alone():
        with processes.one_per_machine_first("the images"):
            dataset = dataset or open_dataset(config, progress=progress)
        run = _Run(config, dataset, devices, processes, progress=progress, loss_scale=loss_scale)
        try:
            run.resume(checkpoints)
            with Interruption() as interruption:
                run.fit(checkpoints, interruption)
        finally:
            run.close()
        return run.finish()


@dataclass
class _Position:
    """The position in a run: steps done, the current epoch, its batches done, training time."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    seconds: float = 0.0


class _Run:
    """A network, its Trainer, its data and its position."""

    def __init__(
        self,
        config: TrainingConfig,
        dataset: Dataset,
        devices: list[mx.Context],
        processes: Processes,
        *,
        progress: bool,
        loss_scale: Optional[LossScale] = None,
    ) -> None:
        self.config, self.dataset = config, dataset
        self.devices, self.processes = devices, processes
        self.progress = progress
        self.position = _Position()
        self.steps_before = 0
        self.history = History(None)
        self.answers: Optional[Answers] = None
        self.tensorboard: Optional[TensorBoard] = None
        if config.tensorboard and processes.is_first:
            self.tensorboard = TensorBoard(config.output_path / "tensorboard")
        self.train_batches, self.test_batches = dataset.loaders(
            config, len(devices), rank=processes.rank, world_size=processes.world_size
        )
        batches = len(devices) * processes.world_size * config.accumulate  # of each step
        self.global_batch_size = config.batch_size * batches
        total_steps = config.epochs * len(self.train_batches)
        mx.random.seed(config.seed)
        np.random.seed(config.seed)  # MXNet's initializers draw from NumPy too
        self.classes = len(dataset.folder.classes)
        self.prepared = prepare_network(config, classes=self.classes, devices=devices)
        self.net = self.prepared.net
        by_name = self.net._collect_params_with_prefix()
        for name in self.prepared.fresh_parameters:
            by_name[name].lr_mult = config.head_rate
        store = MpiKVStore(processes) if config.kvstore == "mpi" else None
        self.trainer = gluon.Trainer(
            self.net.collect_params(),
            make_optimizer(config, total_steps, self.global_batch_size),
            kvstore=store or "device",
            update_on_kvstore=False,  # momenta stay where a checkpoint finds them
        )
        amp.init_trainer(
            self.trainer,
            loss_scale or config.make_loss_scale(total_steps),
            update_rounding=config.update_rounding or "nearest",
            rounding_seed=config.seed,
        )
        if store is not None:
            store.attach(self.trainer)
        self.average: Optional[WeightAverage] = None
        if config.ema is not None:
            self.average = WeightAverage(self.trainer, config.ema)
        numerics = numerics_recorder_of(config, self.net, self.trainer, processes)
        if numerics is not None and self.tensorboard is not None:
            numerics.on_record.append(self.tensorboard.add_numerics)
        self.step = Stepper(
            self.net,
            self.trainer,
            devices,
            processes,
            differentiate_inputs=self.prepared.normalizes_input,
            accumulate=config.accumulate,
            label_smoothing=config.label_smoothing,
            classes=self.classes,
            average=self.average,
            recorder=recorder_of(config, self.net, self.trainer, processes, self.classes),
            numerics=numerics,
        )

    def resume(self, checkpoints: RunCheckpoints) -> None:
        """Continue rank 0's newest good checkpoint, or begin; then write the header of the log."""
        history = None
        if self.processes.is_first:
            self.position = checkpoints.load_newest(self._load) or self.position
            history = self.config.output_path / "history.jsonl"
        shared = share_state(self.processes, self.net, self.trainer, position=asdict(self.position))
        self.position = _Position(**shared["position"])
        self.steps_before = self.position.step
        self.history = History(history, self.position.step)
        self.history.events = self.processes.broadcast(self.history.events, "the history")
        if self.tensorboard is not None:
            self.tensorboard.begin(self.history.events)
            self.history.listeners.append(self.tensorboard.add)
        self.history.add("start", step=self.position.step, **self._header())

    def _load(self, path: Path) -> _Position:
        before = read_extra(path)
        differences = self.config.differences(before["config"])
        if before.get("global_batch_size") != self.global_batch_size:
            differences.append(
                "the batch over all devices and processes was "
                f"{before.get('global_batch_size')}, is {self.global_batch_size} "
                f"({self.config.accumulate} times {self.config.batch_size} on each of "
                f"{len(self.devices)} devices in each of {self.processes.world_size} processes)"
            )
        if "dataset" in before:  # files of 0.2.0 have none
            differences += self.dataset.differences(before["dataset"])
        if differences:
            raise ValueError(
                f"{path} was written by a run with another config: {'; '.join(differences)}; "
                "resume with the same options, or choose another --output-dir"
            )
        position = _Position(**load_checkpoint(path, self.net, self.trainer)["position"])
        _logger.info("continuing from %s, after step %d", path, position.step)
        return position

    def _header(self) -> dict[str, Any]:
        return {
            "config": self.config.as_dict(),
            "processes": self.processes.world_size,
            "global_batch_size": self.global_batch_size,
            "dataset": self.dataset.as_dict(),
            "versions": installed_versions(),
            "machine": describe_machine(),
        }

    def fit(self, checkpoints: RunCheckpoints, interruption: Interruption) -> None:
        """Do the remaining epochs."""
        for epoch in range(self.position.epoch, self.config.epochs):
            began = time.perf_counter()
            stop = self._train_epoch(interruption)
            average_batch_norm(self.processes, self.net, self.average)
            if stop is None:
                self._end_epoch(epoch)
                self._tell_what_is_left(epoch, time.perf_counter() - began)
                stop = self._agree_on(interruption)
            path = self._save(checkpoints)
            if stop is not None:
                raise InterruptedRunError(stop, path)
        if self.answers is None:  # the checkpoint is from after the last test
            self._test()

    def _test(self) -> dict[str, Any]:
        using = self.devices, self.processes, self.average
        figures, self.answers = evaluate(self.net, self.test_batches, self.classes, *using)
        return figures

    def _agree_on(self, interruption: Interruption) -> Optional[signal.Signals]:
        """Return the signal that one of the processes has received, or ``None`` if none has."""
        mine = 0 if interruption.signal is None else int(interruption.signal)
        number = max(self.processes.gather(mine, "whether to stop"))
        return signal.Signals(number) if number else None

    def _train_epoch(self, interruption: Interruption) -> Optional[signal.Signals]:
        """Do the remaining steps of this epoch; return the signal that ended it early."""
        position, loader = self.position, self.train_batches
        loader.set_epoch(position.epoch, position.batch)
        seen = correct = 0
        before, began = position.seconds, time.perf_counter()
        ended = began
        with tqdm(
            total=len(loader),
            initial=position.batch,
            desc=f"epoch {position.epoch + 1}/{self.config.epochs}",
            unit="step",
            disable=None if self.progress else True,  # None: unless stderr is a terminal
        ) as bar:
            for images, labels in loader:
                step = self.step(images, labels, seed=self._seed_of_step())
                since, ended = ended, time.perf_counter()
                position.step += 1
                step["images_per_second"] = step["images"] / (ended - since)
                step["image_wait"] = loader.seconds_waited / (ended - since)
                self.history.add("step", step=position.step, epoch=position.epoch, **step)
                seen, correct = seen + step["images"], correct + step["correct"]
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
                if position.step - self.steps_before == _TIMED_STEPS[1]:
                    self._estimate()
                stop = self._agree_on(interruption)
                if stop is not None:
                    return stop
        return None

    def _seed_of_step(self) -> int:
        """Return the seed of dropout: the same in a resumed run, different on each process."""
        numbers = [self.config.seed, self.position.step, self.processes.rank]
        return int(np.random.SeedSequence(numbers).generate_state(1)[0])

    def _end_epoch(self, epoch: int) -> None:
        steps = [event for event in self.history.of("step") if event["epoch"] == epoch]
        images = sum(event["images"] for event in steps)
        if not images:
            first = self.train_batches.unreadable[0]
            raise DataError(f"no image for training can be read, {first} first; see data_dir")
        test = self._test()
        self.position.epoch, self.position.batch = epoch + 1, 0
        self.history.add(
            "epoch",
            step=self.position.step,
            epoch=epoch,
            train_loss=float(np.mean([event["loss"] for event in steps])),
            train_accuracy=sum(event["correct"] for event in steps) / images,
            **test,
            training_seconds=self.position.seconds,
        )
        words = (
            "epoch %d: test accuracy %.3f, mean of the classes %.3f; training loss %.3f, "
            "%.1f images per second, %.0f %% of the time waited for images, loss scale %g%s"
        )
        accuracies = test["test_accuracy"], test["test_accuracy_per_class"]
        loss = np.mean([event["loss"] for event in steps])
        times = [event["images"] / event["images_per_second"] for event in steps]
        waited = sum(event.get("image_wait", 0.0) * t for event, t in zip(steps, times))
        speed, share, scale = images / sum(times), waited / sum(times), amp.loss_scale(self.trainer)
        _logger.info(words, epoch + 1, *accuracies, loss, speed, 100 * share, scale, _skips(steps))

    def _estimate(self) -> None:
        """Log how long the run will take if its steps take as long as the latest ones.

        Per pixel, a test takes a third of the computation of a step.
        """
        config, position = self.config, self.position
        first, last = _TIMED_STEPS
        timed = self.history.of("step")[first - last - 1 :]
        seconds = sum(e["images"] / e["images_per_second"] for e in timed) / len(timed)
        steps = config.epochs * len(self.train_batches) - position.step
        tested = (config.epochs - position.epoch) * len(self.dataset.test_indices)
        per_pixel = (config.size_in_use / config.image_size) ** 2 / 3
        _tell_time_left(seconds * (steps + per_pixel * tested / self.global_batch_size))

    def _tell_what_is_left(self, epoch: int, seconds: float) -> None:
        """Log how long the remaining epochs will take if each takes as many seconds as this one."""
        left = self.config.epochs - epoch - 1
        if left:
            _tell_time_left(left * seconds)

    def _save(self, checkpoints: RunCheckpoints) -> Path:
        path = checkpoints.path(self.position.step)
        check_agreement(self.processes, self.net)
        if self.processes.is_first:
            self.history.sync()
            save_checkpoint(
                path,
                self.net,
                self.trainer,
                config=self.config.as_dict(),
                global_batch_size=self.global_batch_size,
                position=asdict(self.position),
                dataset=self.dataset.identity(),
            )
            checkpoints.remove_old()
        return path

    def finish(self) -> dict[str, Any]:
        """Return the results; rank 0 writes parameters, results.json and then the pictures."""
        predictions = self._predictions()
        results = self._results()
        if predictions:
            results["confusions"] = confusions(self.dataset, predictions)
        if self.processes.is_first:
            folder, config = self.config.output_path, self.config
            with nullcontext() if self.average is None else self.average.swapped_in():
                self._save_parameters(folder / "final.params")
            with atomic_write(folder / "results.json") as file:
                file.write(to_json(results, indent=2).encode() + b"\n")
            how = f"{config.dtype} amp" if config.amp else config.dtype
            save_training_curves(
                folder / "curves.png",
                self.history.of("step"),
                self.history.of("epoch"),
                title=f"{config.model}, {how}, {config.dataset}",
            )
            if predictions:
                save_predictions(folder, config, self.dataset, predictions)
        self.history.add("end", step=self.position.step, test_accuracy=results["test_accuracy"])
        return results

    def _predictions(self) -> list[Prediction]:
        """Return the answers to the test images of all processes; none to noise."""
        if isinstance(self.test_batches, SyntheticLoader) or self.answers is None:
            return []
        paths, left_out = self.dataset.folder.paths, {*self.test_batches.left_out}
        mine = self.dataset.test_indices[self.processes.rank :: self.processes.world_size]
        read = [index for index in mine if paths[index] not in left_out]
        columns = (column.tolist() for column in self.answers[1:])
        rows = self.processes.gather(list(zip(read, *columns)), "the answers of a test")
        return [Prediction(*row) for row in sorted(row for part in rows for row in part)]

    def _save_parameters(self, path: Path) -> None:
        try:
            with atomic_write(path) as file:
                self.net.save_parameters(file.name)
        except mx.MXNetError as error:
            reason = str(error).strip().splitlines()[-1]
            raise DataError(
                f"cannot write {path}: {reason}; free some space, then resume"
            ) from error

    def _results(self) -> dict[str, Any]:
        steps, epochs = self.history.of("step"), self.history.of("epoch")
        unreadable = [*self.train_batches.unreadable, *self.test_batches.unreadable]
        everywhere = self.processes.gather(list(map(str, unreadable)), "unreadable images")
        return {
            **self._header(),
            "policy": asdict(self.config.policy),
            "arithmetic": self.prepared.arithmetic,
            **{name: value for name, value in epochs[-1].items() if name.startswith("test")},
            "best_test_accuracy": max(event["test_accuracy"] for event in epochs),
            "train_loss": epochs[-1]["train_loss"],
            "steps": self.position.step,
            "skipped_steps": amp.skipped_steps(self.trainer),
            "final_loss_scale": amp.loss_scale(self.trainer),
            "training_seconds": self.position.seconds,
            "images_per_second": sum(e["images"] for e in steps) / self.position.seconds,
            "parameters": sum(
                int(np.prod(shape_of(p))) for p in self.net.collect_params().values()
            ),
            "fresh_parameters": self.prepared.fresh_parameters,
            "unreadable_images": [path for paths in everywhere for path in paths],
        }

    def close(self) -> None:
        """End the worker processes, and close TensorBoard's file."""
        self.train_batches.close()
        self.test_batches.close()
        if self.tensorboard is not None:
            self.tensorboard.close()


def _tell_time_left(seconds: float) -> None:
    minutes = seconds / 60
    _logger.info("about %s left", f"{minutes:.0f} min" if minutes >= 2 else f"{seconds:.0f} s")


def _skips(steps: Sequence[Event]) -> str:
    """Return how many steps were skipped, and in which layers their overflows began."""
    places = Counter(e["overflow_began_in"] or "unknown" for e in steps if e["skipped"])
    if not places:
        return ""
    words = ", ".join(f"{number} in {place}" for place, number in places.most_common(3))
    more = ", …" if len(places) > 3 else ""
    return f"; {counted(sum(places.values()), 'step')} skipped: {words}{more}"
