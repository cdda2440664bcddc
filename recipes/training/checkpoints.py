"""The checkpoint files of one run."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Literal, Optional, TypeVar, Union

from mpgluon.errors import CheckpointError

from recipes.training.config import TrainingConfig

__all__ = ["Resume", "RunCheckpoints", "checkpoints_of"]

Resume = Union[bool, Literal["auto"]]

_logger = logging.getLogger(__name__)

Loaded = TypeVar("Loaded")


def checkpoints_of(run: Path) -> list[Path]:
    """Return the checkpoints in the folder of a run, the oldest first."""
    return sorted((run / "checkpoints").glob("step-*.npz"))


class RunCheckpoints:
    """The newest few checkpoints of one run, in a folder that holds nothing else.

    With ``resume`` the folder must have checkpoints, with ``"auto"`` it may have them. With
    ``writes=False``, as on all ranks but the first, nothing is checked or written.

    Raises
    ------
    CheckpointError
        If the folder cannot be made, holds a run that is not to be resumed, or none to resume.
    """

    def __init__(self, config: TrainingConfig, *, resume: Resume, writes: bool = True) -> None:
        self._folder = config.output_path / "checkpoints"
        self._keep = config.keep_checkpoints
        self._writes = writes
        if not writes:
            return
        if resume is True and not self._newest_first():
            raise CheckpointError(
                f"{config.output_dir} holds no checkpoint to resume; check --output-dir, or write "
                "--resume=auto to start a new run in it"
            )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"the folder {self._folder} cannot be made: {error.strerror}; choose another "
                "--output-dir"
            ) from error
        if self._newest_first() and not resume:
            raise CheckpointError(
                f"{config.output_dir} holds a run already; continue it with --resume, or choose "
                "another --output-dir"
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Refuse other processes that would train in the run's folder, until the block ends.

        The system releases the lock of a process that ends, even of one that is killed while the
        workers that it has forked still run: these do not inherit a lock of POSIX.

        Raises
        ------
        CheckpointError
            If another process trains in the folder.
        """
        if not self._writes:
            yield
            return
        folder = self._folder.parent
        with open(folder / ".lock", "w") as lock:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                raise CheckpointError(
                    f"another process trains in {folder}; wait for its end, or choose another "
                    "--output-dir"
                ) from error
            except OSError:  # a file system without locks
                _logger.warning("%s cannot be locked: start no other run in it", folder)
            for part in self._folder.glob(".step-*.part"):  # of a run that was killed while writing
                part.unlink()
            try:
                yield
            finally:
                (folder / ".lock").unlink(missing_ok=True)

    def path(self, step: int) -> Path:
        """Return the path of the checkpoint after a step."""
        return self._folder / f"step-{step:08d}.npz"

    def load_newest(self, load: Callable[[Path], Loaded]) -> Optional[Loaded]:
        """Return the result of ``load`` for the newest good checkpoint; None without checkpoints.

        Raises
        ------
        CheckpointError
            If ``load`` raises it for every checkpoint.
        """
        failures = []
        for path in self._newest_first():
            try:
                return load(path)
            except CheckpointError as error:
                _logger.warning("%s; trying the one before", error)
                failures.append(str(error))
        if failures:
            raise CheckpointError(f"no checkpoint can be continued: {'; '.join(failures)}")
        return None

    def remove_old(self) -> None:
        """Remove all but the newest few."""
        for path in self._newest_first()[self._keep :]:
            path.unlink()

    def _newest_first(self) -> list[Path]:
        return checkpoints_of(self._folder.parent)[::-1]
