"""Which results of a program must have the same bits, and the differences found."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.programs import Program
from fuzz.workers import WorkerDiedError, Workers

__all__ = [
    "COUNTERPART",
    "PROPERTIES",
    "WAYS",
    "Case",
    "Failure",
    "case_of",
    "check",
    "differences",
]

WAYS = (
    "cast float16",
    "autocast float16",
    "autocast bfloat16",
    "bfloat16 weights",
    "emulated bfloat16",
    "emulated bfloat16 weights",
)
MODES = ("imperative", "hybridized", "static")
COUNTERPART = "imperative, as a HybridBlock of mx.nd"
"""A mode with another source, ``Program.counterpart``'s."""
_TRIES_IN_FP32 = 6
PROPERTIES = ("is near FP32", "resumes", "restores", "replays", "copies")
_NATIVE_BFLOAT16 = ("autocast bfloat16", "bfloat16 weights")
_HAS_BFLOAT16 = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
_IN_PLACE = 8  # from so many gradients of a value on, MXNet adds them in place


@dataclass(frozen=True)
class Case:
    """How a program is run: in which format, in which processes, with which further properties."""

    way: str
    settings: tuple[str, ...]
    properties: tuple[tuple[str, str], ...]  # name and mode


@dataclass(frozen=True)
class Failure:
    """A failure of a program.

    Attributes
    ----------
    kind : str
        Without names and numbers: a reduced program must fail in the same way.
    sentence : str
    is_mxnets_own : bool
        Whether the plain FP32 network fails, or differs in all these arrays, too.
    """

    kind: str
    sentence: str
    is_mxnets_own: bool = False


def case_of(seed: int) -> Case:
    """Return the case of a seed: one format, native and once more under other settings."""
    rng = np.random.default_rng([seed, 1])
    settings = ("native", "fall-back") if rng.random() < 0.6 else ("AVX2", "AVX2 fall-back")
    names = rng.choice(PROPERTIES, size=2, replace=False)
    modes = rng.choice(MODES, size=2)
    return Case(
        way=str(rng.choice(WAYS)),
        settings=settings,
        properties=tuple(zip(map(str, names), map(str, modes))),
    )


def check(workers: Workers, program: Program, case: Case) -> Failure | None:
    """Run a program as its case says, and return what is wrong."""
    sources, first, modes = program.sources, case.settings[0], _modes(program)
    properties = [one for one in case.properties if not (program.jumps and "near" in one[0])]
    found = workers.run(
        {
            name: (sources, case.way, modes, properties if name == first else ())
            for name in case.settings
        }
    )
    for name, result in found.items():
        died = isinstance(result, WorkerDiedError)
        if (died or result["errors"]) and _fails_in_fp32(workers, sources, modes, name):
            return Failure("", f"{name}: MXNet itself raises an error or ends", is_mxnets_own=True)
        if died:
            return Failure(f"{name}: died", f"{name}: {result}")
        for mode, arrays in result["modes"].items():
            if "error" in arrays:
                text = arrays["error"]
                if "PrecisionError" in text and "gave one operator float16 and FP32" in text:
                    return Failure("", f"{name}: refused", is_mxnets_own=True)
                if "control dep not found" in text and program.most_uses >= _IN_PLACE:
                    why = "MXNet fails at a value with many consumers"
                    return Failure("", f"{name}: {why}", is_mxnets_own=True)
                if "Check failed: !is_view" in text:  # so does plain FP32 without the other layers
                    why = "MXNet fails in BatchNorm of concatenated columns"
                    return Failure("", f"{name}: {why}", is_mxnets_own=True)
                return Failure(f"{name}, {mode}: {text[:40]}", f"{name}, {mode}: {text}")
    mxnets_own = None
    for one, other in _pairs(case, modes):
        runs = _results(found, one), _results(found, other)
        if "bfloat16" in case.way and one[0] != other[0]:
            runs = _without_flushing(*runs, signed=first != "AVX2" and _HAS_BFLOAT16)
        names = differences(*runs)
        if not names:
            continue
        if COUNTERPART in other and program.interface == "np" and _overflows(*runs):
            mxnets_own = Failure("", "MXNet's np.sum of infinities is NaN", is_mxnets_own=True)
            continue
        adds_in_place = one[0] == "native" or "static" in other
        if case.way in _NATIVE_BFLOAT16 and adds_in_place and program.most_uses >= _IN_PLACE:
            mxnets_own = Failure("", "MXNet adds bfloat16 gradients in place", is_mxnets_own=True)
            continue
        fp32 = _fp32(workers, sources, one, other, names)
        ours = [] if fp32 is None else [name for name in names if not _follows(name, fp32)]
        what = f"{' '.join(one)} and {' '.join(other)}"
        if ours:
            return Failure(what, f"{what} differ in {', '.join(ours[:5])}")
        mxnets_own = Failure("", f"{what} differ in FP32 too: {names[0]}", is_mxnets_own=True)
    for name, said in found[first]["properties"].items():
        if said.startswith("MXNetsOwnError"):
            mxnets_own = Failure("", f"{name}: plain FP32 raises an error", is_mxnets_own=True)
        elif said:
            mode = dict(case.properties)[name]
            return Failure(f"{name}: {said[:30]}", f"{first}, {mode}, {name}: {said}")
    return mxnets_own


def _modes(program: Program) -> tuple[str, ...]:
    """Return the modes whose bits are compared.

    A plain Block is imperative: if it is hybridized, its children are, with a graph each, and MXNet
    adds the gradients of a value with several consumers in another order.
    """
    modes = MODES[:1] if program.is_plain else MODES
    return modes if program == program.counterpart else (*modes, COUNTERPART)


def _pairs(case: Case, modes: tuple[str, ...]) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """Return the runs that must have the same bits, as pairs of settings and mode.

    oneDNN's own bfloat16 has other sums than the imperative operators, and its batch normalization
    adds in the order of its layouts.
    """
    one, other = case.settings
    pairs = []
    if case.way not in _NATIVE_BFLOAT16 or one != "native":
        pairs += [((name, "imperative"), (name, "hybridized")) for name in case.settings]
        pairs.append(((one, "imperative"), (other, "imperative")))
    pairs += [((name, "hybridized"), (name, "static")) for name in case.settings]
    pairs += [((name, "imperative"), (name, COUNTERPART)) for name in case.settings]
    return [pair for pair in pairs if all(mode in modes for _, mode in pair)]


def _results(found: dict[str, Any], run: tuple[str, str]) -> dict[str, np.ndarray]:
    return found[run[0]]["modes"][run[1]]


def _overflows(*runs: dict[str, np.ndarray]) -> bool:
    """Whether a result is not finite: the sum of an infinity is NaN in MXNet's NumPy interface."""
    outputs = [run[name] for run in runs for name in run if name.startswith("output")]
    return not all(np.isfinite(array).all() for array in outputs)


def _without_flushing(
    one: dict[str, Any], other: dict[str, Any], *, signed: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two runs without the differences that bfloat16's subnormals make.

    The fall-back rounds to bfloat16 by oneDNN's casts, which return zero below 2^-126, and drop a
    zero's sign where the processor has no bfloat16 instructions. A sum of n products changes by at
    most n times 2^-126 times the largest other operand, which is below 2^-110 in these networks.
    """

    def nearer(array: np.ndarray, to: np.ndarray) -> np.ndarray:
        if array.shape != to.shape or array.dtype.kind != "f":
            return array
        with np.errstate(invalid="ignore"):  # of two infinities
            close = np.abs(array - to) <= 2.0**-110
        close &= (array != to) if signed else True
        return np.where(close, to, array).astype(array.dtype)

    return one, {name: nearer(a, one[name]) if name in one else a for name, a in other.items()}


def differences(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> list[str]:
    """Return the names of arrays with other bits, in the order in which they were computed."""

    def bits(array: np.ndarray) -> tuple:
        return array.dtype, array.shape, array.tobytes()

    return [name for name in one if name in other and bits(one[name]) != bits(other[name])]


def _fails_in_fp32(
    workers: Workers, sources: dict[str, str], modes: tuple[str, ...], name: str
) -> bool:
    """Whether MXNet itself cannot train the network in one of the modes."""
    found = workers.run({name: (sources, "float32", modes, ())})[name]
    return isinstance(found, WorkerDiedError) or found["errors"]


def _fp32(workers, sources, one, other, names) -> set[str] | None:
    """Return the differences between two runs of the plain FP32 network: MXNet's own.

    Numbers that are added in another order often have the same sum, so until all ``names`` are
    found the network is run with other numbers, and without MXNet's merging of equal operators,
    since a cast network keeps them apart. ``None`` if MXNet cannot run that network, such as one
    with a value of eight consumers.
    """
    differing: set[str] = set()
    for number, suffix in product(range(_TRIES_IN_FP32), ("", ", unmerged")):
        texts = sources
        if number:
            texts = {
                kind: re.sub(r"(?m)^SEED, OPTIMIZER = \d+", f"SEED, OPTIMIZER = {number}", source)
                for kind, source in sources.items()
            }
        runs = [(name + suffix, mode) for name, mode in (one, other)]
        wanted: dict[str, list[str]] = {}
        for name, mode in runs:
            wanted.setdefault(name, []).append(mode)
        found = workers.run({name: (texts, "float32", modes, ()) for name, modes in wanted.items()})
        if any(isinstance(one, WorkerDiedError) or one["errors"] for one in found.values()):
            return None
        differing.update(differences(*(_results(found, run) for run in runs)))
        if all(_follows(name, differing) for name in names):
            break
    return differing


def _follows(name: str, differing: set[str]) -> bool:
    """Whether a difference follows from others: of a value from its gradient's, of predictions."""
    if name in differing or (differing and name.startswith("prediction")):
        return True
    return name.startswith("value of ") and name.replace("value", "gradient", 1) in differing
