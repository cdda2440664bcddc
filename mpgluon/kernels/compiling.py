"""Compiling the native library; checking and choosing one is in :mod:`mpgluon.kernels.library`.

It is compiled for this machine's processor, or for a level of processors; for the wheel also so
that it runs on systems older than this one.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Optional

from mpgluon.base.processes import run_in_session
from mpgluon.errors import MpgluonError

import mxnet as mx

__all__ = ["CompilationError", "compile_library", "compiler", "ingredients", "mxnet_library", "run"]

_SOURCES = Path(__file__).parent
_TIME_LIMIT_S = 300
_OPTIONS = (
    "-std=c++14",
    "-O3",
    "-ffp-contract=off",  # a fused multiplication and addition would round once less
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",  # functions of wide registers are inlined, so their ABI does not matter
    # The flags that MXNet's wheel was built with; see bridge.h.
    "-D_GLIBCXX_USE_CXX11_ABI=0",
    "-DMSHADOW_USE_CUDA=0",
    "-DMSHADOW_USE_CBLAS=0",
    "-DMSHADOW_USE_MKL=0",
    "-DMSHADOW_STAND_ALONE=0",
    "-DMXNET_USE_MKLDNN=1",
    # Its headers would use x86's instructions on every processor.
    "-DMSHADOW_USE_F16C=0",
    "-DMSHADOW_USE_SSE=0",
)


class CompilationError(MpgluonError):
    """The native library could not be made; MXNet's own operators take its place.

    Attributes
    ----------
    words : str
        The output of the compiler, or of the check.
    """

    def __init__(self, sentence: str, words: str = "") -> None:
        super().__init__(sentence)
        self.words = words


def compiler() -> list[str]:
    """Return the command of the C++ compiler, from ``CXX`` or the PATH; empty if there is none."""
    text = os.environ.get("CXX", "")
    try:
        by_user = shlex.split(text)
    except ValueError:  # a quotation mark is not closed: the text is named when it cannot be run
        by_user = [text]
    return by_user or [path for path in map(shutil.which, ("g++", "c++", "clang++")) if path][:1]


def mxnet_library() -> Path:
    """Return the path of MXNet's library, which the native one is linked with."""
    return Path(mx.libinfo.find_lib_path()[0])


def compile_library(
    path: Path, level: Optional[str] = None, *, for_older_systems: bool = False
) -> str:
    """Compile the native library; return the compiler's messages, which should be none.

    Parameters
    ----------
    path : Path
        The file to write.
    level : str, optional
        Such as ``"x86-64-v3"``; without it, for the processor of this machine.
    for_older_systems : bool
        Whether to need no newer system libraries than MXNet does, and keep no path of this machine.

    Raises
    ------
    CompilationError
        If there is no compiler, it fails, or no library can be linked with this build of MXNet.
    """
    if sys.platform != "linux":
        raise CompilationError(
            f"native operators exist on Linux only: MXNet's build for {platform.system()} uses "
            "another C++ library"
        )
    command = compiler()
    if not command:
        raise CompilationError(
            "no C++ compiler: none of g++, c++ and clang++ is on the PATH, and CXX is not set"
        )
    library = mxnet_library()
    include = library.parent / "include"
    system_headers = [f"-isystem{include}", f"-isystem{include / 'mkldnn'}"]
    sources = [str(_SOURCES / "operators.cc")]
    options = [*_OPTIONS, _for_processor(level)]
    if for_older_systems:
        sources.append(str(_SOURCES / "older_systems.cc"))
        options += ["-s", f"-ffile-prefix-map={_SOURCES}=.", f"-ffile-prefix-map={include}=."]
    # The process has loaded MXNet's library before, so its name is enough: no path is kept.
    return run([*command, *options, *system_headers, *sources, str(library), "-o", str(path)])


def ingredients(level: Optional[str]) -> list[object]:
    """Return everything that a compiled library depends on, except MXNet and the processor."""
    command = compiler()
    version = b""
    if command and shutil.which(command[0]):
        version = subprocess.run(
            [*command, "--version"], capture_output=True, check=False, timeout=_TIME_LIMIT_S
        ).stdout
    sources = [source.read_bytes() for source in sorted(_SOURCES.glob("*.[ch]*"))]
    return [sources, _OPTIONS, _for_processor(level), command, version]


def run(command: list[str]) -> str:
    """Run a command that compiles or checks a library; return its output on stderr.

    Raises
    ------
    CompilationError
        If it fails, with the most informative line of its output.
    """
    root = str(_SOURCES.parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    name = Path(command[0]).name
    try:
        environment = {**os.environ, "PYTHONPATH": path, "MPGLUON_NATIVE": "0"}
        done = run_in_session(command, _TIME_LIMIT_S, stderr=subprocess.PIPE, env=environment)
    except subprocess.TimeoutExpired as error:
        raise CompilationError(f"{name} took over {_TIME_LIMIT_S} s") from error
    except OSError as error:
        raise CompilationError(f"{command[0]} cannot be run: {error.strerror}") from error
    words = done.stderr.strip() or done.stdout.strip()
    if done.returncode < 0:
        raise CompilationError(f"{name} was ended by {_signal(-done.returncode)}", words)
    if done.returncode > 0:
        lines = words.splitlines() or [f"{name} ended with {done.returncode} and wrote nothing"]
        telling = next((line for line in lines if "error:" in line), lines[-1])
        raise CompilationError(telling.strip(), words)
    return done.stderr


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _for_processor(level: Optional[str]) -> str:
    if level is not None:
        return f"-march={level}"
    # For aarch64, GCC and clang both know "native" after this option only.
    return "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"
