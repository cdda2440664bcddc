"""Dot products as MMA-Sim computes them: run by the Python that has ``mmasim``, imported by tests.

``python tests/kernels/mmasim_side.py FILE SIZE`` writes SIZE x SIZE dot products of each case; what
their operands are is decided here, too. ``.venv-peers``, which ``make test WITH=peers`` makes, has
``mmasim``.
"""

import os
import sys
from pathlib import Path

import numpy as np

INSTRUCTIONS = {
    ("volta", "float16"): ("Volta", "m8n8k4.f32.f16.f16.f32"),
    ("ampere", "float16"): ("Ampere", "m16n8k16.f32.f16.f16.f32"),
    ("ampere", "bfloat16"): ("Ampere", "m16n8k16.f32.bf16.bf16.f32"),
    ("hopper", "float16"): ("Hopper", "m16n8k16.f32.f16.f16.f32"),
    ("hopper", "bfloat16"): ("Hopper", "m16n8k16.f32.bf16.bf16.f32"),
}
CHARACTERS = (
    *("random", "positive", "sparse", "wide", "cancellation", "subnormal", "largest"),
    *("tiny sums", "infinite", "any bits"),
)
CASES = [(*kind, character) for kind in INSTRUCTIONS for character in CHARACTERS]


def bits_of(values, dtype):
    """Return the 16-bit codes of FP32 numbers, rounded; bfloat16 by cutting off."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def values_of(codes, dtype):
    """Return the FP32 numbers of 16-bit codes."""
    if dtype == "float16":
        return codes.view(np.float16).astype(np.float32)
    return (codes.astype(np.uint32) << 16).view(np.float32)


def operands(dtype, character, size):
    """Return the codes of a matrix (size, terms) and of another one (terms, size)."""
    draw = np.random.RandomState(CHARACTERS.index(character))
    terms = 67 if character in ("random", "any bits") else 40  # more than one instruction's

    def matrix():
        made = draw.randn(size, terms)
        if character == "positive":
            return abs(made)
        if character == "sparse":
            return made * (draw.rand(size, terms) < 0.2)
        if character == "wide":
            return made * 2.0 ** draw.randint(-12, 12, (size, terms))
        if character == "subnormal":
            return made * (2.0**-18 if dtype == "float16" else 2.0**-130)
        if character == "largest":  # whose sum needs 33 bits, where its last bits are not cut off
            return np.where(draw.rand(size, terms) < 0.9, 1.998, 1.99)
        if character == "tiny sums":  # in bfloat16, at FP32's lower end
            return made * (2.0**-8 if dtype == "float16" else 2.0 ** draw.randint(-75, -55))
        if character == "infinite":
            made[draw.rand(size, terms) < 0.004] = np.inf
            made[draw.rand(size, terms) < 0.002] = np.nan
            made[draw.rand(size, terms) < 0.3] = 0
            huge = 60000 if dtype == "float16" else 3e38
            return np.where(draw.rand(size, terms) < 0.02, huge, made)
        return made

    one, other = matrix(), matrix()
    if character == "cancellation":  # the sum of a pair is far below its terms
        half = terms // 2
        one[:, half:], other[:, half:] = one[:, :half], -other[:, :half]
        other[:, half:] *= 1 + (draw.rand(size, half) < 0.2) * 2.0**-7
        order = draw.permutation(terms)
        one, other = one[:, order], other[:, order]
    codes = [bits_of(values, dtype) for values in (one, other)]
    if character == "any bits":
        codes = [draw.randint(0, 2**16, (size, terms)).astype(np.uint16) for _ in codes]
    return codes[0], np.ascontiguousarray(codes[1].T)


def simulated(architecture, dtype, one, other):
    """Return the bits of the FP32 products that MMA-Sim computes, a part at a time."""
    import torch
    from mmasim.nv_ptx import MMA

    operation = MMA(*INSTRUCTIONS[architecture, dtype])
    kind = {"float16": torch.float16, "bfloat16": torch.bfloat16}[dtype]
    a, b = (torch.from_numpy(codes.view(np.int16)).view(kind) for codes in (one, other))
    parts = []
    for rows in a.split(32):
        start = torch.zeros(len(rows), b.shape[1], dtype=torch.float32)
        parts.append(operation(rows, b, start).view(torch.int32).numpy().view(np.uint32))
    return np.concatenate(parts)


def main(path, size):
    """Write all cases to a file."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja
    results = {
        "/".join((architecture, dtype, character)): simulated(
            architecture, dtype, *operands(dtype, character, size)
        )
        for architecture, dtype, character in CASES
    }
    np.savez_compressed(path, **results)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
