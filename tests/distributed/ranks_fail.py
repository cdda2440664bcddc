"""The program of each rank of `test_faults`: ten steps, and a fault in one of them."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from mpgluon.distributed import MpiKVStore, MpiProcesses

import mpi4py.MPI
import mxnet as mx
from faults import happen
from mxnet import autograd, gluon
from mxnet.gluon import nn

STEPS, BAD_STEP = 10, 3


def main(kind: str, culprit: int, timeout: float, moment: Path) -> None:
    """Train; ``kind`` is a fault, or what else the culprit does.

    ``"freeze"`` freezes a layer there alone, ``"standstill"`` hangs after the roll call,
    ``"leave"`` ends the loop, and the block with it.
    """
    with MpiProcesses(timeout) as processes:
        mpi4py.MPI.COMM_WORLD.Barrier()  # imports may take longer on one than the time limit
        culpable = processes.rank == culprit
        net = nn.Dense(2, in_units=4)
        net.initialize()
        store = MpiKVStore(processes)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {}, kvstore=store)
        store.attach(trainer)
        for step in range(STEPS):
            if culpable and step == BAD_STEP:
                if kind == "freeze":
                    net.bias.grad_req = "null"
                elif kind == "leave":
                    happen("nothing", moment)
                    return
                elif kind == "standstill":
                    processes.sum_in_place = lambda *_: happen("hang", moment)
                else:
                    happen(kind, moment)
            with autograd.record():
                loss = net(mx.nd.ones((2, 4))).sum()
            loss.backward()
            trainer.step(2)
        processes.gather(None, "the end")
        print(f"rank {processes.rank} is done")  # noqa: T201 - the test looks for it


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
