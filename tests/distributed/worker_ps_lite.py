"""The program of each worker of `test_ps_lite`: the ten steps, begun in time."""

from __future__ import annotations

import sys

from mpgluon.distributed import begin

import mxnet as mx
import numpy as np
from small_training import train


def main(folder: str, dtype: str) -> None:
    """Train, and save what came out."""
    store = mx.kv.create("dist_sync")
    rank = {"rank": store.rank, "world_size": store.num_workers}
    # Weights come from rank 0. The FP32 masters of float16 weights do not: same seeds, then.
    seed = store.rank if dtype == "float32" else 0
    results = train(dtype, store=store, begin=begin, seed=seed, **rank)
    np.savez(f"{folder}/worker-{store.rank}.npz", **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
