"""A record's facts about the machine and the source, and a file name made from them.

No host, user or folder is among it.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Optional

import mpgluon
from mpgluon.base.processor import usable_cores
from mpgluon_tools.diagnostics.doctor.machine import gather

__all__ = ["describe_machine", "describe_source", "file_stem", "instruction_set", "usable_cores"]

_ROOT = Path(mpgluon.__file__).parents[1]
# The features that decide how fast 16-bit numbers are.
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
    """Return processor, GPUs, usable cores, and how the processor computes in 16 bits.

    Takes as long as importing MXNet, which another process does.
    """
    facts = gather()
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
        The value of ``DNNL_MAX_CPU_ISA``, or "".
    otherwise : str
        For a processor that has none of them.
    """
    values = [value for _, _, value in _INSTRUCTION_SETS]
    allowed = values.index(limit.upper()) + 1 if limit.upper() in values else len(values)
    known = [name for name, flag, _ in _INSTRUCTION_SETS[:allowed] if flag in flags]
    return known[-1] if known else otherwise


def describe_source(*folders: str) -> dict[str, Any]:
    """Return ``commit`` of the package, ``None`` outside a repository, and ``has_changes``.

    Parameters
    ----------
    *folders : str
        Root of the repository: files there, in ``mpgluon``, ``mpgluon_tools`` and
        ``study/benchmarks`` that differ from the commit count as changes, new ones too.
    """
    commit = _git("rev-parse", "HEAD") if _git("ls-files", "mpgluon/__init__.py") else None
    status = _git(
        "status", "--porcelain", "--", "mpgluon", "mpgluon_tools", "study/benchmarks", *folders
    )
    return {"commit": commit, "has_changes": commit is not None and status is not None}


def _git(*arguments: str) -> Optional[str]:
    """Return git's output in the package's folder; ``None`` if it fails or prints nothing."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def file_stem(described: Mapping[str, Any], device: str) -> str:
    """Return a name for a machine's record, such as ``cpu-amd-epyc-2-cores``.

    Parameters
    ----------
    described : mapping
        As :func:`describe_machine` returns it.
    device : str
        The device that was measured, such as ``"cpu"`` or ``"gpu:0"``.
    """
    if device.startswith("gpu") and described["gpus"]:
        return f"gpu-{_slug(described['gpus'][0])}"
    return f"cpu-{_slug(described['processor'])}-{described['cores']}-cores"


def _slug(name: str) -> str:
    name = re.sub(r"\((r|tm)\)|@.*|\b(cpu|processor)\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")
