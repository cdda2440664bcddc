"""What a record says of the machine, the versions and the source, and a file name made from it.

Nothing that tells whose machine it is: no host, user or folder.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Optional

import mpgluon
from mpgluon.diagnostics.doctor import machine

__all__ = [
    "describe_machine",
    "describe_source",
    "file_stem",
    "instruction_set",
    "load_average",
    "usable_cores",
]

_PACKAGE = Path(mpgluon.__file__).parent
# What decides how fast 16-bit numbers are.
_INSTRUCTION_SETS = (  # a name, Linux's flag and the value of DNNL_MAX_CPU_ISA, ascending
    ("SSE4.1", "sse4_1", "SSE41"),
    ("AVX", "avx", "AVX"),
    ("AVX2", "avx2", "AVX2"),
    ("AVX-512", "avx512bw", "AVX512_CORE"),
    ("AVX-512-BF16", "avx512_bf16", "AVX512_CORE_BF16"),
    ("AMX", "amx_bf16", "AVX512_CORE_AMX"),
)
_FLAGS = ("avx2", "f16c", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")


def describe_machine() -> dict[str, Any]:
    """Return processor, the flags of it that matter here, usable cores and GPUs.

    And which instructions MXNet's oneDNN uses of it, and what carries out 16 bits there. Takes as
    long as importing MXNet, which is asked in a process of its own.
    """
    facts = machine.gather()
    found = facts.mxnet
    return {
        "processor": facts.processor or facts.architecture,
        "architecture": facts.architecture,
        "cpu_flags": [flag for flag in _FLAGS if flag in facts.cpu_flags],
        "instruction_set": instruction_set(
            facts.cpu_flags, facts.environment.get("DNNL_MAX_CPU_ISA", ""), facts.architecture
        ),
        "bfloat16": "native" if found and found.bfloat16 == "native" else "emulated",
        "native_operators": found.native_state if found else "",
        "cores": facts.cores,
        "gpus": [gpu.name for gpu in facts.gpus],
    }


def instruction_set(flags: Collection[str], limit: str, otherwise: str) -> str:
    """Return the widest instructions that oneDNN may use, such as ``"AVX-512-BF16"``.

    Parameters
    ----------
    flags : collection of str
        The processor's, by Linux's names.
    limit : str
        What ``DNNL_MAX_CPU_ISA`` says, if anything.
    otherwise : str
        For a processor that has none of them.
    """
    allowed = len(_INSTRUCTION_SETS)
    for number, (_, _, value) in enumerate(_INSTRUCTION_SETS):
        if limit.upper() == value:
            allowed = number + 1
    known = [name for name, flag, _ in _INSTRUCTION_SETS[:allowed] if flag in flags]
    return known[-1] if known else otherwise


def describe_source() -> dict[str, Any]:
    """Return ``commit`` of this package, ``None`` outside a repository, and ``has_changes``.

    Files of the package that differ from the commit count as changes, new ones too.
    """
    commit = _git("rev-parse", "HEAD") if _git("ls-files", "__init__.py") else None
    has_changes = commit is not None and _git("status", "--porcelain", "--", ".") is not None
    return {"commit": commit, "has_changes": has_changes}


def _git(*arguments: str) -> Optional[str]:
    """Return what git prints in the package's folder; ``None`` if it cannot, or nothing."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=_PACKAGE, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def load_average() -> float:
    """Return how many processes wanted to run in the last minute."""
    return os.getloadavg()[0]


def file_stem(described: Mapping[str, Any], device: str) -> str:
    """Return a name for a machine's record, such as ``cpu-amd-epyc-2-cores``.

    Parameters
    ----------
    described : mapping
        As :func:`describe_machine` returns it.
    device : str
        Such as ``"cpu"`` or ``"gpu:0"``: what was measured.
    """
    if device.startswith("gpu") and described["gpus"]:
        return f"gpu-{_slug(described['gpus'][0])}"
    return f"cpu-{_slug(described['processor'])}-{described['cores']}-cores"


def _slug(name: str) -> str:
    name = re.sub(r"\((r|tm)\)|@.*|\b(cpu|processor)\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")
