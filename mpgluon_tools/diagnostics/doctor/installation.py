"""Checks of the installation: Python, MXNet's build, NumPy, CUDA's libraries.

Functions of the facts alone; they do not look at the machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mpgluon.base.cuda_libraries import (
    DRIVER,
    INSTALL_FOR_CPU,
    INSTALL_FOR_CUDA,
    LIBRARIES,
    wheel_of,
)
from mpgluon.base.findings import Finding, error, note, ok, warning
from mpgluon_tools.diagnostics.doctor.machine import MachineFacts, numbers_in

__all__ = ["CUDA_WHEELS", "installation"]

# Each library that MXNet's build for CUDA 11.7 loads, and the wheel that has it.
CUDA_WHEELS = {library: wheel_of(library) for library in LIBRARIES}


def installation(facts: MachineFacts) -> Iterator[Finding]:
    """Yield findings about the software."""
    for check in (_python, _builds, _import_of_mxnet, _numpy, _cuda_libraries):
        yield from check(facts)


def _python(facts: MachineFacts) -> Iterator[Finding]:
    name = "Python {}.{}".format(*facts.python)
    if facts.python >= (3, 12) and "setuptools" not in facts.distributions:
        yield error(
            "Python",
            f"{name} without setuptools",
            "MXNet 1.9.1 imports distutils, which Python 3.12 removed and setuptools still has",
            "pip install 'setuptools<81'",
        )
    elif not (3, 9) <= facts.python < (3, 13):
        yield warning(
            "Python",
            name,
            "mpgluon and MXNet 1.9.1 are tested on Python 3.9 to 3.12 only",
            "make an environment with one of these; the tests run on 3.11",
        )
    else:
        yield ok("Python", name)


def _builds(facts: MachineFacts) -> Iterator[Finding]:
    builds = facts.builds
    versions = ", ".join(f"{name} {facts.distributions[name]}" for name in builds)
    if len(builds) > 1:
        yield error(
            "MXNet",
            f"{len(builds)} builds are installed: {versions}",
            "all builds install into one folder, which now mixes their files",
            f"pip uninstall -y {' '.join(builds)}, then one of them: "
            f"{INSTALL_FOR_CPU}, or {INSTALL_FOR_CUDA}",
        )
    elif not builds and facts.mxnet is None:
        yield error(
            "MXNet",
            "not installed",
            "mpgluon is built on it",
            f"{INSTALL_FOR_CPU}; or for an NVIDIA GPU of sm_50 to sm_89 {INSTALL_FOR_CUDA}",
        )
    elif not builds and facts.mxnet is not None:
        yield note(
            "MXNet",
            f"{facts.mxnet.version}, not installed from a wheel",
            "findings about wheels may not hold for your own build",
            "if something fails, compare with the wheel, mxnet==1.9.1",
        )
    elif facts.distributions[builds[0]] != "1.9.1":
        yield warning(
            "MXNet",
            versions,
            "mpgluon repairs and relies on details of 1.9.1, the last release",
            f"pip install {builds[0]}==1.9.1",
        )
    else:
        yield ok("MXNet", versions)


def _import_of_mxnet(facts: MachineFacts) -> Iterator[Finding]:
    if facts.mxnet is not None or (not facts.builds and "mxnet" in facts.import_error):
        return
    if numbers_in(facts.distributions.get("numpy", "")) >= (2,):  # which _numpy finds
        return
    missing = re.search(r"(lib[\w.+-]+\.so[.\d]*): cannot open shared", facts.import_error)
    library = missing[1] if missing else ""
    why, fix = (
        "mpgluon does not work without it",
        "python -c 'import mpgluon' shows the whole message; if MXNet's own files are damaged, "
        "pip install --force-reinstall --no-deps the build that is listed above",
    )
    damaged = [name for name in CUDA_WHEELS if f"/{name}: " in facts.import_error]
    if library == DRIVER:
        why = "MXNet's CUDA builds load NVIDIA's driver, which is missing (or not in the container)"
        fix = (
            "install the driver; in a container, start it with the GPUs (docker run --gpus all); "
            f"or without a GPU: pip uninstall the CUDA build, then {INSTALL_FOR_CPU}"
        )
    elif library in CUDA_WHEELS or damaged:
        wheel = CUDA_WHEELS[library or damaged[0]]
        why = f"MXNet's CUDA build needs CUDA 11 and cuDNN 8; {wheel} has this library"
        fix = f"{INSTALL_FOR_CUDA} brings all of them"
        if wheel in facts.distributions:
            version = facts.distributions[wheel]
            why += f", {version} is installed, but its file is not there or not whole"
            fix = f"pip install --force-reinstall --no-deps {wheel}=={version}"
    elif library:
        why = "a library of the operating system that MXNet loads is missing"
        fix = f"install the system's package that has {library}"
    yield error("MXNet", f"cannot be imported: {facts.import_error}", why, fix)


def _numpy(facts: MachineFacts) -> Iterator[Finding]:
    version = facts.distributions.get("numpy")
    if version is None:
        return
    if numbers_in(version) >= (2,):
        yield error(
            "NumPy",
            version,
            "MXNet 1.9.1 cannot be imported with NumPy 2, which packages such as onnx bring",
            'pip install "numpy<2"',
        )
    elif numbers_in(version) >= (1, 24):
        yield note(
            "NumPy",
            version,
            "MXNet 1.9.1 imports np.bool, which NumPy 1.24 dropped; mpgluon puts it back",
            "import mpgluon before mxnet, in freshly started child processes too; or "
            "pip install numpy==1.23.5",
        )
    else:
        yield ok("NumPy", version)


def _cuda_libraries(facts: MachineFacts) -> Iterator[Finding]:
    if not facts.is_for_cuda:
        return
    loaded = facts.mxnet.cudnn if facts.mxnet is not None else None
    if loaded is not None:
        version = f"{loaded // 1000}.{loaded // 100 % 10}.{loaded % 100}"
    else:
        version = facts.distributions.get("nvidia-cudnn-cu11", "")
    if version and not (8, 9, 6) <= numbers_in(version) < (9,):
        yield error(
            "cuDNN",
            f"{version} is {'loaded' if loaded is not None else 'installed'}",
            "MXNet 1.9.1 loads libcudnn.so.8, and is not tested with versions before 8.9.6",
            "pip install nvidia-cudnn-cu11==8.9.6.50; no other may come before it in "
            "LD_LIBRARY_PATH",
        )
    elif version:
        yield ok("cuDNN", version)
    later = sorted(
        name for name in facts.distributions if re.fullmatch(r"nvidia-.+-cu1[2-9]", name)
    )
    ours = set(CUDA_WHEELS.values()) & set(facts.distributions)
    if later and ours:
        yield warning(
            "CUDA",
            f"wheels for CUDA 11 and for a later one are installed: {', '.join(later)}",
            "some install the same files, and the last one installed has overwritten the other",
            "install the package that needs them (often PyTorch) in an environment of its own",
        )
