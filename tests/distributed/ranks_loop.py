"""The program of each rank of `test_loop_of_the_page`: docs/distributed.md's, on random batches."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from mpgluon import DynamicLossScale, amp

import numpy as np
from distributed_helpers import block_of_page
from mxnet import autograd, gluon, nd
from small_training import (
    CLASSES,
    FEATURES,
    FIRST_SCALE,
    LEARNING_RATE,
    MOMENTUM,
    make_net,
    masters_of,
)

EVEN = "[:steps]"  # what lets each process take as many steps as the others
TOTAL = "processes.total(len(labels))"


def random_batches(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return 4 to 11 batches of 1 to 8 images."""
    random = np.random.RandomState(seed)
    sizes = random.randint(1, 9, size=random.randint(4, 12))
    return [
        (
            random.randn(size, FEATURES).astype(np.float32),
            random.randint(CLASSES, size=size).astype(np.int32),
        )
        for size in sizes
    ]


def main(seed: str, without: str, folder: str) -> None:
    """Run the page's loop, without one of its parts, and save this rank's weights."""
    from mpi4py import MPI  # starts it: not where a test imports this module

    loop = block_of_page("python")
    for part, instead in ((EVEN, ""), (TOTAL, "len(labels) * processes.world_size")):
        assert part in loop
        loop = loop.replace(part, instead) if part == without else loop
    names = {
        "amp": SimpleNamespace(
            init_trainer=lambda trainer: amp.init_trainer(trainer, DynamicLossScale(FIRST_SCALE)),
            scale_loss=amp.scale_loss,
        ),
        "autograd": autograd,
        "gluon": gluon,
        "make_net": lambda: make_net("float16"),
        "options": {"learning_rate": LEARNING_RATE, "momentum": MOMENTUM, "multi_precision": True},
        "loss_fn": gluon.loss.SoftmaxCrossEntropyLoss(),
        "batches": [
            (nd.array(images, dtype="float16"), nd.array(labels, dtype="int32"))
            for images, labels in random_batches(int(seed))
        ],
    }
    exec(loop, names)
    weights = {f"weight/{n}": p.data().asnumpy() for n, p in names["net"].collect_params().items()}
    rank = MPI.COMM_WORLD.rank
    np.savez(f"{folder}/{rank}.npz", **weights, **masters_of(names["trainer"], names["net"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
