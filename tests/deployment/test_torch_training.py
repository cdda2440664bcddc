"""A training run goes on in PyTorch: the optimizer's state and the loss scale come along."""

import subprocess

from mpgluon import amp
from mpgluon.deployment import export_torch
from mpgluon.errors import PrecisionError
from mpgluon.formats.loss_scale import DynamicLossScale

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn
from test_torch_export import NEEDS_TORCH, TORCH, state_of

OPTIMIZERS = {
    "sgd": {"momentum": 0.9, "wd": 0.01},
    "nag": {"momentum": 0.8},  # MXNet's momentum has the decay of the weight after the step
    "adam": {"wd": 0.01, "epsilon": 1e-12},
    "plain": {},
}
CONTINUE = """
import sys
import numpy as np
import torch
from model import load
from training import training

data, expected = np.load("batches.npz"), np.load("expected.npz")
net = load()
optimizer, scaler = training(net, device="cpu")
assert scaler.get_scale() == 512.0, scaler.get_scale()
assert scaler.state_dict()["_growth_tracker"] == 3
for step in range(3, 6):
    x, y = (torch.from_numpy(data[f"{name}{step}"]) for name in "xy")
    optimizer.zero_grad()
    loss = ((net(x) - y) ** 2 / 2).mean(1).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
for name, one in net.state_dict().items():
    error = np.abs(one.numpy() - expected[name]).max() / np.abs(expected[name]).max()
    print(name, error)
    assert error < 1e-5, name
"""


def trained(kind, batches, steps, **options):
    """A network and its Trainer after some steps."""
    mx.random.seed(0)
    np.random.seed(0)
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(6, activation="tanh", in_units=4), nn.Dense(2, in_units=6))
    net.initialize(mx.init.Xavier())
    net[0].bias.lr_mult, net[1].weight.wd_mult = 0.5, 0.0
    options = {"learning_rate": 0.05, **options}
    trainer = gluon.Trainer(net.collect_params(), "sgd" if kind == "plain" else kind, options)
    amp.init_trainer(trainer, DynamicLossScale(512, growth_interval=100))
    loss_fn = gluon.loss.L2Loss()
    for x, y in batches[:steps]:
        with autograd.record():
            loss = loss_fn(net(mx.nd.array(x)), mx.nd.array(y))
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        trainer.step(len(x))
    return net, trainer


@NEEDS_TORCH
@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_that_goes_on_in_pytorch_takes_the_steps_that_mxnet_would(kind, tmp_path):
    random = np.random.default_rng(0)
    batches = [(random.standard_normal((8, 4)).astype("float32"),
                random.standard_normal((8, 2)).astype("float32")) for _ in range(6)]  # fmt: skip
    net, trainer = trained(kind, batches, 3, **OPTIMIZERS[kind])
    export_torch(net, tmp_path, [(8, 4)], trainer=trainer)
    net, _ = trained(kind, batches, 6, **OPTIMIZERS[kind])
    end = export_torch(net, tmp_path / "end", [(8, 4)])
    np.savez(tmp_path / "expected.npz", **state_of(end / "model.safetensors"))
    named = {f"{name}{step}": one for step, pair in enumerate(batches)
             for name, one in zip("xy", pair)}  # fmt: skip
    np.savez(tmp_path / "batches.npz", **named)
    done = subprocess.run(
        [str(TORCH), "-c", CONTINUE], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_momentum_is_pytorchs_and_factors_are_kept(tmp_path):
    batches = [(np.ones((8, 4), "float32"), np.ones((8, 2), "float32"))] * 2
    net, trainer = trained("sgd", batches, 2, momentum=0.9)
    folder = export_torch(net, tmp_path, [(8, 4)], trainer=trainer)
    state = state_of(folder / "training.safetensors")
    (momentum,) = (one.asnumpy() for one in trainer._updaters[0].states.values()
                   if one.shape == (6,))  # fmt: skip
    np.testing.assert_array_equal(
        state["dense0.bias/momentum_buffer"], -momentum / np.float32(0.025)
    )
    text = (folder / "training.py").read_text()
    assert "FACTORS = {'dense0.bias': (0.5, 1.0), 'dense1.weight': (1.0, 0.0)}" in text
    assert "enabled=True" in text
    compile(text, "training.py", "exec")


def test_an_optimizer_without_an_equal_is_refused_and_nothing_is_written(tmp_path):
    batches = [(np.ones((8, 4), "float32"), np.ones((8, 2), "float32"))]
    for kind, options, why in (
        ("rmsprop", {}, "RMSProp is not translated"),
        ("sgd", {"clip_gradient": 1.0}, "do not clip each"),
        ("sgd", {"rescale_grad": 0.5}, "do not scale gradients"),
        ("sgd", {"learning_rate": 0.0}, "the learning rate is 0"),
    ):
        net, trainer = trained(kind, batches, 1, **options)
        with pytest.raises(PrecisionError, match=why):
            export_torch(net, tmp_path / "net", [(8, 4)], trainer=trainer)
    assert not (tmp_path / "net").exists()


def test_what_the_trainer_does_not_train_and_how_often_is_kept(tmp_path):
    batches = [(np.ones((8, 4), "float32"), np.ones((8, 2), "float32"))] * 2
    net, _ = trained("plain", batches, 0)
    net[1].weight.lr_mult = 0.0
    trainer = gluon.Trainer(net[1].collect_params(), "sgd", {"momentum": 0.9})
    for step in range(2):
        with autograd.record():
            loss = net(mx.nd.ones((8, 4))).sum()
        loss.backward()
        if step:
            net[1].bias.list_data()[0]._fresh_grad = False
        trainer.step(8, ignore_stale_grad=True)
    folder = export_torch(net, tmp_path, [(8, 4)], trainer=trainer)
    assert "OTHERS = ['dense0.bias', 'dense0.weight']" in (folder / "training.py").read_text()
    assert set(state_of(folder / "training.safetensors")) == {"dense1.bias/momentum_buffer"}
    adam = gluon.Trainer(net[1].collect_params(), "adam")
    adam._optimizer._index_update_count.update({0: 1})
    with autograd.record():
        loss = net(mx.nd.ones((8, 4))).sum()
    loss.backward()
    adam.step(8)
    state = state_of(export_torch(net, tmp_path, [(8, 4)], trainer=adam) / "training.safetensors")
    assert sorted(int(state[f"dense1.{name}/step"]) for name in ("weight", "bias")) == [1, 2]


@pytest.mark.parametrize(
    ("scale", "expected"),
    [(1, "'backoff_factor': 1.0"), (128, "'scale': 128.0"), (None, "load_state_dict({})"),
     (DynamicLossScale(2, min_scale=1), "'backoff_factor': 0.5")],
)  # fmt: skip
def test_loss_scales_go_on_as_they_were(scale, expected, tmp_path):
    net, _ = trained("plain", [], 0)
    trainer = gluon.Trainer(net.collect_params(), "nag")
    if scale is not None:
        amp.init_trainer(trainer, scale)
    text = (export_torch(net, tmp_path, [(8, 4)], trainer=trainer) / "training.py").read_text()
    assert expected in text
    assert f"enabled={scale is not None}" in text
    assert "nesterov" not in text
