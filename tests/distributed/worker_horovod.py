"""The program of each process of `test_horovod`: the ten steps, with Horovod's Trainer."""

from __future__ import annotations

import sys

import horovod.mxnet as hvd
import numpy as np
from small_training import BAD_STEP, GLOBAL_BATCH, train


def make_trainer(net, options):
    """Return Horovod's Trainer, which averages, for a network with rank 0's weights."""
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    return hvd.DistributedTrainer(net.collect_params(), "sgd", options)


def main(folder: str) -> None:
    """Train in every format, with and without an overflow, and save what came out."""
    hvd.init()
    size = hvd.size()
    results = {}
    for dtype in ("float32", "float16", "bfloat16"):
        for kind, poisoned in (("plain", None), ("poisoned", size - 1)):
            outcome = train(
                dtype,
                make_trainer=make_trainer,
                rank=hvd.rank(),
                world_size=size,
                step_batch=GLOBAL_BATCH // size,
                poisoned_rank=poisoned,
            )
            results.update({f"{dtype}-{kind}/{name}": value for name, value in outcome.items()})
    assert np.flatnonzero(results["float16-poisoned/skipped"]).tolist() == [BAD_STEP]
    np.savez(f"{folder}/worker-{hvd.rank()}.npz", **results)


if __name__ == "__main__":
    main(sys.argv[1])
