"""Checkpoints of training on a GPU: it goes on bit for bit, there or on the CPU's arrays."""

from mpgluon import load_checkpoint, save_checkpoint

import mxnet as mx
import pytest
from test_checkpoint import ADAM, SAVED_AFTER, SGD, Training, assert_goes_on

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=lambda optimizer: optimizer[0])
@pytest.mark.parametrize("way", ["float32", "float16"])
@pytest.mark.parametrize("scaled", [True, False], ids=["loss scale", "no loss scale"])
def test_training_goes_on_from_a_checkpoint_bit_for_bit(tmp_path, gpu, way, optimizer, scaled):
    assert_goes_on(tmp_path, way, optimizer, [gpu], scaled=scaled)


@pytest.mark.parametrize("way", ["float32", "float16"])
def test_a_checkpoint_moves_between_the_gpu_and_the_cpu_with_all_its_bits(tmp_path, gpu, way):
    def bits(training):
        return {key.split(" on ")[0]: value for key, value in training.arrays().items()}

    on_gpu = Training(way, ADAM, [gpu])
    on_gpu.train(SAVED_AFTER)
    on_cpu, back = Training(way, ADAM, [mx.cpu()], seed=1), Training(way, ADAM, [gpu], seed=2)
    save_checkpoint(tmp_path / "gpu.npz", on_gpu.net, on_gpu.trainer)
    load_checkpoint(tmp_path / "gpu.npz", on_cpu.net, on_cpu.trainer)
    save_checkpoint(tmp_path / "cpu.npz", on_cpu.net, on_cpu.trainer)
    load_checkpoint(tmp_path / "cpu.npz", back.net, back.trainer)
    assert bits(on_gpu) == bits(on_cpu) == bits(back)
    assert {data.context for data in back.net[0].weight.list_data()} == {gpu}
