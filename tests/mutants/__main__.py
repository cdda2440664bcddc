"""Plant faults in the library, its tools and the recipes, one at a time; see whether a test fails.

``PYTHONPATH=.:tests python -m mutants``. The status is 1 if a fault is not noticed that the list,
``faults.txt``, says is found. No file is changed: each fault has a process of its own, whose import
receives the changed source. Processes that a test starts import the library as it is.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import IO, NamedTuple

import mpgluon  # noqa: F401 - each fault's process has MXNet already, which takes long to import

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).with_name("faults.txt")
_QUICK = "not slow and not gpu and not network and not third_party and not left_out"
_OPTIONS = [
    *("-x", "-q", "-m", _QUICK),
    *("-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}"),
    "--hypothesis-profile=ci",  # the same examples in each run
]
_LIMIT_S = 900  # the slowest tests of a fault take two minutes, on one busy core
_NEVER_IMPORTED = 99


class Fault(NamedTuple):
    """A text of a file that is replaced by another one, and the tests that must notice."""

    name: str
    file: Path
    tests: list[str]
    is_noticed: bool
    old: str
    new: str

    @property
    def module(self) -> str:
        return ".".join(self.file.with_suffix("").parts).removesuffix(".__init__")

    def test_files(self) -> list[str]:
        """Return the files of its tests, in the order of the list: pytest would sort folders."""
        found = {}
        for path in (ROOT / test for test in self.tests):
            found |= dict.fromkeys(sorted(path.rglob("test_*.py")) if path.is_dir() else [path])
        return [str(path) for path in found]

    def source(self) -> str:
        """Return the changed source; a ValueError if the text is not in the file exactly once."""
        source = (ROOT / self.file).read_text("utf-8")
        if source.count(self.old) != 1:
            raise ValueError(f"{self.file} has the text {source.count(self.old)} times")
        return source.replace(self.old, self.new)


def read_faults(path: Path) -> list[Fault]:
    """Return the faults of a list; empty lines separate them, and ``#`` begins a comment."""
    lines = [line for line in path.read_text("utf-8").splitlines() if line[:1] != "#"]
    blocks = re.split(r"\n{2,}", "\n".join(lines).strip())
    return [_fault_of(block.splitlines()) for block in blocks]


def _fault_of(lines: list[str]) -> Fault:
    name, file, tests, *texts = lines
    is_noticed = texts[0] != "not noticed"
    old, new = ("\n".join(t[1:] for t in texts if t[0] == sign) for sign in "-+")
    file, tests = file.removeprefix("in "), tests.removeprefix("by ").split()
    return Fault(name, Path(file), tests, is_noticed, old, new)


class _Planted(MetaPathFinder, SourceLoader):
    """Finds and loads the module that has the fault."""

    def __init__(self, fault: Fault, source: str) -> None:
        self.module, self.path, self.source = fault.module, ROOT / fault.file, source
        self.was_imported = False

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != self.module:
            return None
        return spec_from_file_location(name, self.path, loader=self)

    def get_filename(self, _name: str) -> str:
        return str(self.path)

    def get_data(self, path: str) -> bytes:
        if path != str(self.path):
            raise OSError(f"{path} is not read: it is without the planted fault")
        self.was_imported = True
        return self.source.encode()


def _test(fault: Fault, source: str, output: IO[str]) -> int:
    """Run a fault's tests in this process, and return the status of pytest."""
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    planted = _Planted(fault, source)
    sys.meta_path.insert(0, planted)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpgluon"]:
        del sys.modules[name]
    status = pytest.main([*_OPTIONS, *fault.test_files()])
    return status if planted.was_imported else _NEVER_IMPORTED


def _start(fault: Fault, source: str) -> tuple[int, IO[str]]:
    """Start a process that tests a fault; return its number and the file of its output."""
    output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the outcome
    process = os.fork()
    if process:
        return process, output
    status = _NEVER_IMPORTED
    try:
        faulthandler.dump_traceback_later(_LIMIT_S, exit=True, file=output)
        status = _test(fault, source, output)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _outcome(wait_status: int, output: IO[str]) -> tuple[str, str]:
    """Return "found", "not noticed" or "broken", and by which test, or why."""
    status = os.waitstatus_to_exitcode(wait_status)
    output.seek(0)
    words = output.read()
    if status == 0:
        return "not noticed", words.strip().splitlines()[-1]
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", words, re.MULTILINE)
    if status == 1 and failed:
        return "found", failed[1]
    hung = re.search(r"^Timeout \((?:.|\n)*? in (test_\w+)$", words, re.MULTILINE)
    if hung:
        return "broken", f"not at its end after {_LIMIT_S} s, in {hung[1]}"
    return "broken", f"status {status}: {words[-2000:]}"


def outcomes(faults: list[Fault], jobs: int) -> Iterator[tuple[Fault, str, str]]:
    """Yield each fault with what became of it, as soon as its process has ended."""
    waiting, running = list(reversed(faults)), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            fault = waiting.pop()
            try:
                source = fault.source()
            except ValueError as error:
                yield fault, "broken", str(error)
                continue
            process, output = _start(fault, source)
            running[process] = fault, output
        if not running:
            return
        process, status = os.wait()
        fault, output = running.pop(process)
        with output:
            yield fault, *_outcome(status, output)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="ID", nargs="+", help="the first words of their names")
    parser.add_argument("--jobs", type=int, default=1, help="faults at the same time")
    parser.add_argument("--list", type=Path, default=FAULTS, help="the list of faults")
    options = parser.parse_args(arguments)
    faults = read_faults(options.list)
    if options.only:
        faults = [fault for fault in faults if fault.name.split()[0] in options.only]
    os.chdir(ROOT)
    counts, remarks = Counter(), []
    for fault, outcome, words in outcomes(faults, options.jobs):
        print(f"{fault.name}: {outcome}, {words}", flush=True)
        counts[outcome] += 1
        if outcome != "found":
            remarks.append((fault.is_noticed, f"{outcome}: {fault.name}"))
        elif not fault.is_noticed:
            remarks.append((False, f'found now, remove "not noticed": {fault.name}'))
    print(f"{counts['found']} of {len(faults)} found")
    for is_wrong, remark in sorted(remarks, reverse=True):
        print(remark + (", and the list says that it is found" if is_wrong else ""))
    return int(any(is_wrong for is_wrong, _ in remarks))


if __name__ == "__main__":
    sys.exit(main())
