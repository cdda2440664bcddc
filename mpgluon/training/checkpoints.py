"""The checkpoint files of one run."""

from __future__ import annotations

from pathlib import Path

from mpgluon.errors import CheckpointError
from mpgluon.training.config import TrainingConfig

__all__ = ["RunCheckpoints"]


class RunCheckpoints:
    """The checkpoints of one run, in a folder of their own, the newest few kept.

    Parameters
    ----------
    config : TrainingConfig
    resume : bool
        Whether the folder may hold checkpoints already.
    writes : bool
        Whether this process keeps the folder; others only learn the names.

    Raises
    ------
    CheckpointError
        If the folder cannot be made, or holds a run that is not to be resumed.
    """

    def __init__(self, config: TrainingConfig, *, resume: bool, writes: bool = True) -> None:
        self.folder = config.output_path / "checkpoints"
        self._keep = config.keep_checkpoints
        if not writes:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"the folder {self.folder} cannot be made: {error.strerror}; choose another "
                "--output-dir"
            ) from error
        if self.newest_first() and not resume:
            raise CheckpointError(
                f"{config.output_dir} holds a run already; continue it with --resume, or choose "
                "another --output-dir"
            )

        for part in self.folder.glob(".step-*.part"):  # of a run that was killed while writing
            part.unlink()

    def newest_first(self) -> list[Path]:
        """Return the files that there are."""
        return sorted(self.folder.glob("step-*.npz"), reverse=True)

    def path(self, step: int) -> Path:
        """Return the name for the checkpoint after so many steps."""
        return self.folder / f"step-{step:08d}.npz"

    def remove_old(self) -> None:
        """Keep the newest few."""
        for path in self.newest_first()[self._keep :]:
            path.unlink()
