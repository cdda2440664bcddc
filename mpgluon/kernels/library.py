"""Which native library is used: a prebuilt one, one compiled here, or none, and why.

A library is used only after a process of its own has loaded it and compared its results with
MXNet's. Successes and failures are recorded in the user's cache folder, under names made from
everything that the answer depends on, the library's content included: so a library that was damaged
later is not loaded, and what failed is neither tried nor reported again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional

from mpgluon.kernels import processor
from mpgluon.kernels.compiling import (
    CompilationError,
    compile_library,
    compiler,
    ingredients,
    mxnet_library,
    run,
)
from mpgluon.kernels.records import cache_folder, read_record, write_record

import mxnet as mx

__all__ = ["Status", "build", "check_library", "fingerprint", "status"]

_logger = logging.getLogger(__name__)
_PREBUILT = Path(__file__).parent / "prebuilt"
_CHECK = Path(__file__).parent / "check.py"
_ABANDONED_AFTER_S = 660  # compiling and checking may take 300 s each
_WITHOUT = "16 bits on a CPU run with MXNet's own operators, float16 about three times more slowly"


@dataclass(frozen=True)
class Status:
    """Which native library there is.

    Attributes
    ----------
    state : str
        ``"compiled"``, ``"prebuilt"``, ``"failed"``, ``"no compiler"``, ``"switched off"`` or
        ``"not built yet"``.
    level : str, optional
        Target of the compiled library: ``"x86-64-v3"``, or ``"native (x86-64-v4)"`` for this
        machine's processor, which has that level and perhaps more.
    path : Path, optional
        The library.
    sentence : str
        All this, and advice, in words.
    is_news : bool
        Whether something failed that had not failed on this machine before.
    words : str
        The output of the compiler, or of the check, when something failed just now.
    """

    state: str
    level: Optional[str]
    path: Optional[Path]
    sentence: str
    is_news: bool = False
    words: str = ""


def status() -> Status:
    """Report which native library :func:`build` would return, if that is known; takes milliseconds.

    Nothing is compiled and nothing is raised: the sentence says why there is no library.
    """
    return _look(build=False, again=False)


def build(*, again: bool = False) -> Status:
    """Find, or compile and check, the native library, and report the outcome.

    Raises nothing where there is none: the sentence says why. ``MPGLUON_NATIVE`` in the environment
    switches native operators off (``0``) or names the level that they are compiled for.

    Parameters
    ----------
    again : bool
        Whether to try again what failed before.
    """
    return _look(build=True, again=again)


def _look(*, build: bool, again: bool) -> Status:
    level = os.environ.get("MPGLUON_NATIVE", "")
    if level == "0":
        return Status("switched off", None, None, "Native operators: off, by MPGLUON_NATIVE=0.")
    refusal = _refusal(level)
    if refusal:
        return Status("failed", None, None, f"No native operators: {refusal}; {_WITHOUT}.", True)
    if build:
        _remove_leftovers()
    return _Search(level or None, build, again).result()


def _remove_leftovers() -> None:
    """Remove the folders of processes that were killed while they compiled."""
    with suppress(OSError):  # of a folder that another process has removed, or that is not ours
        for folder in cache_folder().glob("tmp*"):
            if time.time() - folder.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(folder)


def _refusal(level: str) -> str:
    """Return why a level is refused, or nothing."""
    if level and level not in processor.LEVELS:
        allowed = ", ".join(processor.LEVELS)
        return (
            f"MPGLUON_NATIVE is {level!r}; allowed are 0 (off), {allowed}, or nothing for the "
            "best that there is"
        )
    if level and level not in processor.levels():
        return (
            f"MPGLUON_NATIVE asks for {level}, which this processor cannot run; its level is "
            f"{processor.level()}"
        )
    return ""


class _Search:
    """One search: for the best prebuilt library that is right, else for a compiled one."""

    def __init__(self, level: Optional[str], build: bool, again: bool) -> None:
        self.level, self.build, self.again = level, build, again
        self.failures: list[str] = []
        self.words: list[str] = []
        self.is_news = False

    def result(self) -> Status:
        for level in [self.level] if self.level else reversed(processor.levels()):
            path = _PREBUILT / f"native-{level}.so"
            if not path.exists():
                continue
            passed = self._passes(path, f"checking the prebuilt library for {level}")
            if passed:
                return self._status("prebuilt", level, path, f"prebuilt for {level}")
            if passed is None:
                return self._not_yet()
        path = cache_folder() / f"native-{fingerprint(*ingredients(self.level))}.so"
        passed = path.exists() and self._passes(path, "checking the library in the cache")
        if not passed:
            if self._recalled(path.stem) is False:
                return self._without()
            if not self.build:
                return self._not_yet()
            if not self._compile(path):
                return self._without()
        level = self.level or f"native ({processor.level()})"
        target = self.level or f"this processor ({processor.level()})"
        return self._status("compiled", level, path, f"compiled for {target}")

    # ---- Answers.

    def _status(self, state: str, level: str, path: Path, how: str) -> Status:
        notes = "".join(f"; {failure}" for failure in self.failures)
        sentence = f"Native operators: {how}, {path}{notes}."
        return Status(state, level, path, sentence, self.is_news, "\n".join(self.words))

    def _without(self) -> Status:
        state, advice = "failed", "`python -m mpgluon.kernels` tries again and shows every word"
        if not compiler():
            state, advice = "no compiler", "install g++ for speed"
        sentence = f"No native operators: {'; '.join(self.failures)}; {_WITHOUT}; {advice}."
        return Status(state, None, None, sentence, self.is_news, "\n".join(self.words))

    def _not_yet(self) -> Status:
        sentence = "Native operators: not tried on this machine yet; a cast on a CPU does so."
        return Status("not built yet", None, None, sentence)

    # ---- Trying.

    def _passes(self, path: Path, what: str) -> Optional[bool]:
        """Return whether a library is right; None if that is unknown and must not be tried."""
        try:
            key = _check_key(path)
        except OSError as error:
            self.failures.append(f"{what} failed (it cannot be read: {error.strerror})")
            return False
        answer = self._recalled(key)
        if answer is None and self.build:
            return self._try(key, what, lambda: check_library(path))
        return answer

    def _recalled(self, key: str) -> Optional[bool]:
        """Return whether something succeeded before; None if that is unknown or to be repeated."""
        failure = read_record(key, "failure")
        if failure is None or (failure and self.again):
            return None
        if failure:
            self.failures.append(failure)
        return not failure

    def _compile(self, path: Path) -> bool:
        """Compile and check a library, and move it to its place, whatever other processes do."""
        began = time.perf_counter()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            folder = tempfile.TemporaryDirectory(dir=path.parent)
        except OSError as error:
            self.failures.append(
                f"the cache folder {path.parent} cannot be written ({error.strerror}); "
                "XDG_CACHE_HOME may name another"
            )
            self.is_news = True
            return False
        # A warning, since Python shows nothing less where a program has set up no logging: a first
        # cast without a word for a minute looks like a program that hangs.
        _logger.warning(
            "compiling the native operators for this processor, once: half a minute, more on a "
            "busy machine; they are kept in %s",
            path.parent,
        )
        with folder:
            new = Path(folder.name) / path.name
            if not self._try(path.stem, "compiling", lambda: compile_library(new, self.level)):
                return False
            if not self._try(path.stem, "checking what was compiled", lambda: check_library(new)):
                return False
            write_record(_check_key(new), failure="")
            new.replace(path)
        _logger.info("compiled %s in %.0f s", path, time.perf_counter() - began)
        return True

    def _try(self, key: str, what: str, action: Callable[[], object]) -> bool:
        """Return whether an action succeeds, and record that."""
        failure = ""
        try:
            action()
        except CompilationError as error:
            failure = f"{what} failed ({error})"
            self.failures.append(failure)
            self.words.append(error.words)
            self.is_news = True
        write_record(key, failure=failure)
        return not failure


def check_library(path: Path) -> None:
    """Compare a library with MXNet in a process of its own.

    Raises
    ------
    CompilationError
        If it cannot be loaded, gives other bits, or ends the process.
    """
    run([sys.executable, "-m", "mpgluon.kernels.check", str(path)])


def _check_key(path: Path) -> str:
    return f"checked-{fingerprint(path.name, path.read_bytes(), _CHECK.read_bytes())}"


def fingerprint(*parts: object) -> str:
    """Return a name made from ``parts``, this MXNet and this processor."""
    library = mxnet_library()
    file = library.stat()
    everything = (
        *parts,
        (mx.__version__, str(library), file.st_size, file.st_mtime_ns),
        sorted(processor.features()) or platform.processor(),
    )
    return hashlib.sha256(repr(everything).encode()).hexdigest()[:16]
