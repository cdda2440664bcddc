"""Ending a run after a signal, between two steps."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Optional

__all__ = ["InterruptedRunError", "Interruption"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class InterruptedRunError(Exception):
    """A signal ended the run after a step, at which ``checkpoint`` was written."""

    def __init__(self, signal: signal.Signals, checkpoint: Path) -> None:
        super().__init__(f"stopped by {signal.name}; continue with --resume from {checkpoint}")
        self.signal, self.checkpoint = signal, checkpoint


class Interruption:
    """A context that records the first Ctrl-C, SIGTERM or SIGUSR1 as ``signal``.

    A second Ctrl-C or SIGTERM raises KeyboardInterrupt at once. SIGUSR1 may arrive more than once:
    batch systems send it before the end of a job, and ``mpirun`` forwards it.
    """

    def __init__(self) -> None:
        self.signal: Optional[signal.Signals] = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: Optional[FrameType]) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
        elif number != signal.SIGUSR1:
            raise KeyboardInterrupt
