"""Dot products as an NVIDIA GPU's Tensor Cores compute them, of the operands of ``mmasim_side.py``.

``python tests/kernels/gpu_side.py FILE SIZE`` writes SIZE x SIZE dot products of each case, SIZE a
multiple of 16. It needs NumPy, CUDA's compiler, ``nvcc``, and a GPU of Ampere's or a later
generation.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import mmasim_side
import numpy as np

HERE = Path(__file__).resolve().parent
SIDE = 16  # of the matrices that an instruction multiplies
DTYPES = ("float16", "bfloat16")


def whole(codes):
    """Return a matrix with zeros after its last row and column, up to multiples of 16."""
    return np.pad(codes, [(0, -size % SIDE) for size in codes.shape])


def multiplied(program, dtype, one, other):
    """Return the bits of the FP32 products of two matrices of codes."""
    one, other = whole(one), whole(other)
    sizes = (*one.shape, other.shape[1])
    done = subprocess.run(
        [program, dtype, *map(str, sizes)],
        input=one.tobytes() + other.tobytes(),
        stdout=subprocess.PIPE,
        check=True,
    )
    return np.frombuffer(done.stdout, np.uint32).reshape(sizes[0], sizes[2])


def main(path, size):
    """Compile, compute, and write all cases to a file."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    found = subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True).stdout
    name, capability = found.splitlines()[0].split(", ")
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "gpu_sums")
        architecture = f"-arch=sm_{capability.replace('.', '')}"
        source = str(HERE / "gpu_sums.cu")
        subprocess.run(["nvcc", "-O2", architecture, source, "-o", program], check=True)
        results = {
            f"{dtype}/{character}": multiplied(
                program, dtype, *mmasim_side.operands(dtype, character, size)
            )
            for dtype in DTYPES
            for character in mmasim_side.CHARACTERS
        }
    np.savez_compressed(path, device=np.array(name), **results)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
