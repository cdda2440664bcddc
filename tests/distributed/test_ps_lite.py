"""MXNet's own servers: right when begun in time, and refused when not."""

from __future__ import annotations

import sys

from mpgluon import TrainerStateError, amp
from mpgluon.distributed import begin

import mxnet as mx
import numpy as np
import pytest
from distributed_helpers import HERE, run_job, succeeded
from helpers import assert_same_bits, initialized
from mxnet import gluon
from mxnet.gluon import nn
from references import numbers_of, train_part_after_part

WORKERS = 2


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_workers_that_begin_in_time_add_their_gradients(tmp_path, dtype):
    # One rounding of the sum of two float16 numbers is the same on the server as in float32.
    program = [str(HERE / "ps_lite_job.py"), str(WORKERS), str(HERE / "worker_ps_lite.py")]
    succeeded(run_job([sys.executable, *program, str(tmp_path), dtype], {"OMP_NUM_THREADS": "1"}))
    expected = train_part_after_part(dtype, WORKERS)
    for rank in range(WORKERS):
        with np.load(tmp_path / f"worker-{rank}.npz") as results:
            assert_same_bits(numbers_of(dict(results)), expected)


def make_trainer(kvstore: object, **options) -> gluon.Trainer:
    net = initialized(nn.Dense(1, in_units=1))
    return gluon.Trainer(net.collect_params(), "sgd", {}, kvstore=kvstore, **options)


@pytest.mark.parametrize("loss_scale", ["dynamic", "none"])
@pytest.mark.parametrize("options", [{}, {"update_on_kvstore": False}])
def test_a_trainer_that_would_begin_in_its_first_step_is_refused(options, loss_scale):
    trainer = make_trainer("dist_sync", **options)
    with pytest.raises(TrainerStateError, match=r"call mpgluon\.distributed\.begin\(trainer\)"):
        amp.init_trainer(trainer, loss_scale)


@pytest.mark.parametrize("name", ["horovod", "BytePS", "teststore"])
def test_a_trainer_that_would_ignore_the_name_of_a_kvstore_of_processes_is_refused(name):
    with pytest.raises(TrainerStateError, match=f"'{name}'.* train alone"):
        amp.init_trainer(make_trainer(name))
    amp.init_trainer(make_trainer(mx.kv.create("teststore")))


def test_a_trainer_whose_shapes_are_not_known_cannot_begin():
    net = initialized(nn.Dense(1, prefix="late_"))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {}, kvstore="local")
    with pytest.raises(TrainerStateError, match=r"1 parameters have no value yet .*late_weight"):
        begin(trainer)
    net(mx.nd.zeros((1, 3)))
    begin(trainer)
    amp.init_trainer(trainer)
