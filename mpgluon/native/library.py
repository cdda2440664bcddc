"""Compiling the native library: for this processor, this MXNet and this source, once.

The result lies in the user's cache folder under a name made from all that it depends on. It counts
only after a process of its own has loaded it and compared its results with MXNet's.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mxnet as mx

from mpgluon.errors import MpgluonError

__all__ = ["CompilationError", "build", "cache_folder", "describe_processor"]

_logger = logging.getLogger(__name__)
_SOURCES = Path(__file__).parent
_TIME_LIMIT_S = 300
_OPTIONS = (
    "-std=c++14",
    "-O3",
    "-march=native",
    "-ffp-contract=off",  # a fused multiplication and addition would round once less
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-w",  # MXNet's headers
    # What MXNet's wheel was built with; see bridge.h.
    "-D_GLIBCXX_USE_CXX11_ABI=0",
    "-DMSHADOW_USE_CUDA=0",
    "-DMSHADOW_USE_CBLAS=0",
    "-DMSHADOW_USE_MKL=0",
    "-DMSHADOW_STAND_ALONE=0",
    "-DMXNET_USE_MKLDNN=1",
)


class CompilationError(MpgluonError):
    """The native library could not be made; MXNet's own operators do its work."""


def build() -> Path:
    """Return the path of the native library; compile and check it if it is not there yet.

    Raises
    ------
    CompilationError
        If there is no compiler, or it fails, or what it makes does not do what MXNet does.
    OSError
        If the cache folder cannot be written.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise CompilationError("there is no C++ compiler (g++); install one for speed")
    library = Path(mx.libinfo.find_lib_path()[0])
    path = cache_folder() / f"native-{_fingerprint(compiler, library)}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        _run([compiler, *_OPTIONS, *_paths(library), "-o", str(made)], "compiling")
        _run([sys.executable, "-m", "mpgluon.native.check", str(made)], "checking")
        made.replace(path)  # at once, whoever else is building it
    _logger.info("compiled %s in %.0f s", path, time.perf_counter() - began)
    return path


def cache_folder() -> Path:
    """Return where compiled libraries are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpgluon"


def _paths(library: Path) -> list[str]:
    include = library.parent / "include"
    return [
        f"-I{include}",
        f"-I{include / 'mkldnn'}",
        str(_SOURCES / "operators.cc"),
        str(library),
        f"-Wl,-rpath,{library.parent}",
    ]


def _run(command: list[str], what: str) -> None:
    root = str(_SOURCES.parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIME_LIMIT_S,
            env={**os.environ, "PYTHONPATH": path, "MPGLUON_NATIVE": "0"},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CompilationError(f"{what} the native library took over {_TIME_LIMIT_S} s") from error
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-5:]
        raise CompilationError(
            f"{what} the native library failed with {done.returncode}: {' '.join(last)}"
        )


def _fingerprint(compiler: str, library: Path) -> str:
    """Return a name for everything that the compiled library depends on."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.glob("*.[ch]*")):
        digest.update(source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    size = library.stat().st_size
    for part in (_OPTIONS, mx.__version__, str(library), size, version, describe_processor()):
        digest.update(repr(part).encode())
    return digest.hexdigest()[:16]


def describe_processor() -> str:
    """Return what the processor can do, as far as the system says."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("flags"):
                return line
    return platform.processor()
