"""Ending a run between two steps instead of inside one."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Optional

__all__ = ["InterruptedRunError", "Interruption"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class InterruptedRunError(Exception):
    """A signal ended the run after a step; a checkpoint holds everything up to there.

    Attributes
    ----------
    signal : signal.Signals
    checkpoint : Path
    """

    def __init__(self, signal: signal.Signals, checkpoint: Path) -> None:
        super().__init__(f"stopped by {signal.name}; continue with --resume from {checkpoint}")
        self.signal, self.checkpoint = signal, checkpoint


class Interruption:
    """Notes Ctrl-C, SIGTERM and SIGUSR1 while it is entered.

    Another Ctrl-C or SIGTERM interrupts at once. SIGUSR1 is only ever a request: batch systems
    send it some time before the end, and ``mpirun`` passes it on without ending anything. It may
    come more than once.

    Attributes
    ----------
    signal : signal.Signals or None
        What was received.
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
