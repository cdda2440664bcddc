"""Functions for tests of the library: its headers alone, test compilers, and damage."""

import platform
import shutil
import stat
import subprocess
from pathlib import Path

from mpgluon.kernels import processor

import pytest

HEADERS = Path(processor.__file__).parent
OPTIONS = ("-std=c++14", "-O3", "-ffp-contract=off", "-Wall", "-Wextra", f"-I{HEADERS}")
AARCH64_COMPILER, AARCH64_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
EACH_KIND_OF_PROCESSOR = [
    *((compiler, level) for compiler in ("g++", "clang++") for level in processor.LEVELS),
    (AARCH64_COMPILER, "armv8-a"),
]

COPY = shutil.which("cp")
# Copies a library to where a compiler would write one; "--version" is asked for a name.
COPYING = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && {copy} {library} "$2"; shift; done; exit 0'


def program(source: Path, compiler: str, architecture: str, folder: Path) -> list[str]:
    """Compile a program for a kind of processor; return the command that runs it here, or skip."""
    command, static = [], []
    if compiler == AARCH64_COMPILER:
        _here(compiler, AARCH64_EMULATOR)
        command, static = [AARCH64_EMULATOR], ["-static"]
    else:
        _here(compiler)
        if platform.machine() != "x86_64" or architecture not in processor.levels():
            pytest.skip(f"this processor cannot run {architecture}: it is {processor.level()}")
    made = folder / source.stem
    building = [compiler, f"-march={architecture}", *static, *OPTIONS, source, "-o", made]
    done = subprocess.run(building, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return [*command, str(made)]


def _here(*names: str) -> None:
    for name in names:
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")


def put_compiler(folder: Path, monkeypatch, script: str) -> Path:
    """Put a script in the compiler's place; return the file in which it counts its calls."""
    calls = folder / "calls"
    calls.touch()
    compiler = folder / "compiler"
    counting = f'[ "$1" = --version ] && exit 0\necho called >>{calls}\n'
    compiler.write_text(f"#!/bin/sh\n{counting}{script}\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(compiler))
    return calls


def copying(library: Path) -> str:
    return COPYING.format(copy=COPY, library=library)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def make_for_another_architecture(path: Path) -> None:
    content = bytearray(path.read_bytes())
    assert content[18] == 62, "e_machine of x86-64"
    content[18] = 183  # aarch64
    path.write_bytes(content)
