"""Import MXNet with the CUDA libraries of NVIDIA's wheels, loaded before MXNet needs them.

These wheels put the libraries into folders that the system's loader does not search, and MXNet,
unlike PyTorch, was not built to search them. The loader finds a library by name that the process
has loaded already, so each is loaded here from its file. Nothing is downloaded, no environment
variable is read or set, and nothing is done for MXNet's CPU build.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

__all__ = [
    "DRIVER",
    "INSTALL_FOR_CPU",
    "INSTALL_FOR_CUDA",
    "LIBRARIES",
    "import_mxnet",
    "load",
    "wheel_of",
]

INSTALL_FOR_CPU = "pip install mxnet==1.9.1"
INSTALL_FOR_CUDA = "pip install -e '.[cu117]' in mpgluon's checkout"

# The libraries of MXNet's build for CUDA 11.7 and their folders under "nvidia", each after those
# that it needs. libcublasLt is needed by cuBLAS and cuSOLVER.
LIBRARIES = {
    "libcudart.so.11.0": "cuda_runtime",
    "libnvrtc.so.11.2": "cuda_nvrtc",
    "libnvToolsExt.so.1": "nvtx",
    "libcublasLt.so.11": "cublas",
    "libcublas.so.11": "cublas",
    "libcufft.so.10": "cufft",
    "libcurand.so.10": "curand",
    "libcusparse.so.11": "cusparse",
    "libcusolver.so.11": "cusolver",
    "libcudnn.so.8": "cudnn",
    "libnccl.so.2": "nccl",
}
DRIVER = "libcuda.so.1"  # in no wheel: it belongs to the kernel module


def import_mxnet() -> None:
    """Import MXNet, with CUDA's libraries loaded first if its build needs them.

    Raises
    ------
    ImportError
        If a library is missing or damaged; with MXNet's own error as its cause.
    """
    try:
        load()
        import mxnet  # noqa: F401
    except OSError as error:
        raise ImportError(
            f"MXNet cannot be imported: {error}. {_advice(str(error))}", name="mxnet"
        ) from error


def load() -> list[Path]:
    """Load the libraries of NVIDIA's wheels for CUDA 11 into this process.

    They take precedence over the system's CUDA, because their versions were tested together. A
    library whose wheel is not installed is left to the system's loader. Without MXNet's build for
    CUDA 11.7, or with MXNet imported already, nothing is done.

    Returns
    -------
    list of Path
        The loaded files, in their order.

    Raises
    ------
    OSError
        If a file is damaged, or needs a library that cannot be found.
    """
    if "mxnet" in sys.modules or not _is_for_cuda_117():
        return []
    files = [
        file
        for library, folder in LIBRARIES.items()
        for file in _first_of(Path("nvidia", folder, "lib", library))
    ]
    for file in files:
        ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    return files


def wheel_of(library: str) -> str:
    """Return the name of the wheel that has one of ``LIBRARIES``."""
    return f"nvidia-{LIBRARIES[library].replace('_', '-')}-cu11"


def _is_for_cuda_117() -> bool:
    spec = importlib.util.find_spec("mxnet")
    if spec is None or spec.origin is None:
        return False
    installed = os.listdir(Path(spec.origin).parents[1])
    return any(name.startswith("mxnet_cu117-") for name in installed)


def _first_of(file: Path) -> list[Path]:
    """Return the file in the first folder of Python's path that has it, or nothing."""
    return [path for entry in sys.path if (path := Path(entry, file)).is_file()][:1]


def _advice(message: str) -> str:
    if DRIVER in message:
        return (
            f"This build of MXNet needs NVIDIA's driver, which has {DRIVER}: install it, and start "
            "a container with the GPUs (docker run --gpus all). Without an NVIDIA GPU take the "
            f"CPU build: pip uninstall the one for CUDA, then {INSTALL_FOR_CPU}"
        )
    for library in LIBRARIES:
        if library in message:
            return (
                f"{wheel_of(library)} has this library: {INSTALL_FOR_CUDA}, with --force-reinstall "
                "if that wheel is installed already"
            )
    return "`mpgluon doctor` says what this machine lacks"
