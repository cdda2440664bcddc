"""What tests of the library share: compilers of their own, and damage."""

import shutil
import stat
from pathlib import Path

COPY = shutil.which("cp")
# Copies a library to where a compiler would write one; "--version" is asked for a name.
COPYING = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && {copy} {library} "$2"; shift; done; exit 0'


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
