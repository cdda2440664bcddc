"""One line on a terminal about the work in progress; nothing where the output is not a terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Callable

__all__ = ["progress_line"]


@contextmanager
def progress_line(steps: int = 0) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows, on stderr, the name of the step that begins.

    Parameters
    ----------
    steps : int
        The number of steps, which is shown with a bar; by default it is not known.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    done = 0

    def show(what: str) -> None:
        nonlocal done
        done += 1
        bar = f"[{'#' * done}{'.' * (steps - done)}] " if steps else ""
        line = f"{bar}{what} ..."[: shutil.get_terminal_size().columns - 1]
        sys.stderr.write(f"\r\033[K{line}")
        sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write("\r\033[K")
        sys.stderr.flush()
