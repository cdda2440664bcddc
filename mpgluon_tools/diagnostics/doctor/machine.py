"""Facts about a machine, gathered without judging them.

MXNet is imported in another process only, since it may lack a library or end its process.
Environment variables are read here because they are among the facts.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from mpgluon.base.processes import run_in_session
from mpgluon.base.processor import have_hyperthreads, processor, usable_cores

__all__ = [
    "Gpu",
    "MachineFacts",
    "MxnetFacts",
    "gather",
    "numbers_in",
    "parse_nvidia_smi",
    "usable_cores",
]

VARIABLES = (
    "MXNET_SAFE_ACCUMULATION",
    "MXNET_CUDNN_AUTOTUNE_DEFAULT",
    "MXNET_CPU_WORKER_NTHREADS",
    "OMP_NUM_THREADS",
    "KMP_AFFINITY",
    "DNNL_MAX_CPU_ISA",
    "CUDA_VISIBLE_DEVICES",
)
_BUILD = re.compile(r"mxnet(-(cu\d+\w*|mkl|native))?")
_DISTRIBUTIONS = re.compile(r"mxnet(-.+)?|nvidia-.+|numpy|setuptools")
_PATIENCE = 180  # seconds; importing MXNet from a cold disk can take half a minute

# Each prints one line of JSON. They see the modules that this process sees.
_PROBE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
try:
    import mpgluon
except ImportError as error:
    raise error.__cause__ or error from None  # MXNet's own message; the judgement has the advice
import mxnet as mx
features = mx.runtime.Features()
facts = {
    "version": mx.__version__,
    "features": [name for name in features if features.is_enabled(name)],
    "gpus": 0,
    "gpu_error": "",
    "cudnn": None,
}
try:
    facts["gpus"] = mx.context.num_gpus()
    if facts["gpus"]:
        (mx.nd.ones((2,), ctx=mx.gpu()) + 1).asnumpy()
except mx.base.MXNetError as error:
    facts["gpu_error"] = str(error).strip().splitlines()[-1]
if features.is_enabled("CUDNN"):
    import ctypes
    facts["cudnn"] = ctypes.CDLL("libcudnn.so.8").cudnnGetVersion()
print(json.dumps(facts))
"""
_NATIVE_PROBE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from mpgluon import kernels
from mpgluon.kernels.bfloat16 import bfloat16_products
build = kernels.build()
facts = {"native_state": build.state, "native_sentence": build.sentence}
print(json.dumps({**facts, "bfloat16": bfloat16_products()}))
"""


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver describes it; ``capability`` (8, 6) is sm_86, ``None`` unknown."""

    name: str
    capability: Optional[tuple[int, int]]
    driver: str


@dataclass(frozen=True)
class MxnetFacts:
    """Facts about MXNet, as it reports them after its import."""

    version: str = "1.9.1"
    features: frozenset[str] = frozenset()  # of its build, named as in mx.runtime.Features
    gpus: int = 0  # that it sees
    gpu_error: str = ""  # of counting them, or of adding two numbers on the first one
    cudnn: Optional[int] = None  # the version that it has loaded: 8906 is 8.9.6
    # "native", "slow", "none" (see mpgluon.kernels.bfloat16); None: not tested, as on a GPU
    bfloat16: Optional[str] = None
    native_state: str = ""  # of mpgluon.kernels.status(); empty if not tested
    native_sentence: str = ""


@dataclass(frozen=True)
class MachineFacts:
    """Facts about a machine that matter to mixed precision."""

    python: tuple[int, int]
    # Installed versions of MXNet's builds, NVIDIA's libraries, NumPy, setuptools.
    distributions: Mapping[str, str] = field(default_factory=dict)
    mxnet: Optional[MxnetFacts] = None  # None: it cannot be imported,
    import_error: str = ""  # for this reason
    gpus: tuple[Gpu, ...] = ()  # that the driver sees, whether or not MXNet does
    driver_error: str = ""  # of nvidia-smi, if there is one and it failed
    architecture: str = "x86_64"
    processor: str = ""
    cpu_flags: frozenset[str] = frozenset()  # Linux's names of instructions, as "avx512_bf16"
    cores: int = 1  # that this process may use
    hyperthreads: bool = False  # whether some of them share a core
    shared_memory_bytes: Optional[int] = None  # the size of /dev/shm, if there is one
    environment: Mapping[str, str] = field(default_factory=dict)  # VARIABLES that are set

    @property
    def builds(self) -> list[str]:
        """Names of the installed distributions that are MXNet."""
        return [name for name in self.distributions if _BUILD.fullmatch(name)]

    @property
    def is_for_cuda(self) -> bool:
        """Whether MXNet was built for CUDA: as it says itself, else by its name."""
        if self.mxnet is not None:
            return "CUDA" in self.mxnet.features
        return any("-cu" in name for name in self.builds)


def gather() -> MachineFacts:
    """Gather the facts about this machine; takes as long as importing MXNet.

    Native operators are compiled if that was not tried before, as at their first use; a line on
    stderr says so.
    """
    mxnet, import_error = _ask_mxnet()
    gpus, driver_error = _ask_driver()
    name, flags = processor()
    shm = Path("/dev/shm")
    return MachineFacts(
        python=sys.version_info[:2],
        distributions=_installed(),
        mxnet=mxnet,
        import_error=import_error,
        gpus=gpus,
        driver_error=driver_error,
        architecture=platform.machine(),
        processor=name,
        cpu_flags=flags,
        cores=usable_cores(),
        hyperthreads=have_hyperthreads(),
        shared_memory_bytes=shutil.disk_usage(shm).total if shm.is_dir() else None,
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def _installed() -> dict[str, str]:
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        # Broken installations leave folders without a name behind.
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if _DISTRIBUTIONS.fullmatch(name):
            versions.setdefault(name, distribution.version)
    return versions


def _ask_mxnet() -> tuple[Optional[MxnetFacts], str]:
    """Return the facts from processes that import MXNet, or why it could not be imported."""
    try:
        done = _run(_PROBE, _PATIENCE, stderr=subprocess.PIPE)
    except subprocess.TimeoutExpired:
        return None, f"importing MXNet took longer than {_PATIENCE} s"
    if done.returncode < 0:
        return None, f"signal {-done.returncode} ended the process that imported MXNet"
    if done.returncode > 0:
        lines = done.stderr.strip().splitlines()
        return None, lines[-1] if lines else f"importing MXNet exited with {done.returncode}"
    answer = json.loads(done.stdout.splitlines()[-1])
    if "CUDA" not in answer["features"]:
        # Compiling has a time limit of its own, and says on stderr, which is ours, that it begins.
        done = _run(_NATIVE_PROBE, None)
        if done.returncode == 0:
            answer.update(json.loads(done.stdout.splitlines()[-1]))
        else:
            reason = f"the process that looked for them ended with status {done.returncode}"
            answer.update(native_state="failed", native_sentence=f"No native operators: {reason}.")
    return MxnetFacts(**{**answer, "features": frozenset(answer["features"])}), ""


def _run(code: str, limit: Optional[float], **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", code, json.dumps(sys.path)]
    return run_in_session(command, limit, **options)


def _ask_driver() -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs that NVIDIA's driver sees, or its message if it failed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), ""
    command = [program, "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return (), "nvidia-smi did not answer within 60 s"
    if done.returncode:
        return (), " ".join((done.stdout + done.stderr).split())
    return parse_nvidia_smi(done.stdout), ""


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...]:
    """Return the GPUs of ``nvidia-smi``'s lines like ``NVIDIA A100, 8.0, 535.104.05``."""
    gpus = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3:
            numbers = re.fullmatch(r"(\d+)\.(\d+)", cells[1])
            capability = (int(numbers[1]), int(numbers[2])) if numbers else None
            gpus.append(Gpu(cells[0], capability, cells[2]))
    return tuple(gpus)


def numbers_in(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, to compare it by."""
    return tuple(int(number) for number in re.findall(r"\d+", version))
