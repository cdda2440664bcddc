"""``copy.deepcopy`` and ``pickle`` of cast networks: how people keep a best model, and send one."""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys

import mpgluon
from mpgluon import NORMALIZATION_LAYERS, Policy, amp, kernels
from mpgluon.cast import fp32
from mpgluon.checkpoint.scale_histories import scale_histories

import mxnet as mx
import numpy as np
import pytest
from helpers import assert_same_bits, cast_net, in_sequence, initialized
from mxnet import autograd, gluon
from mxnet.gluon import nn

DELAYED = "compute=float8_e4m3,gradient=float8_e5m2,between=bfloat16,scaling=tensor,amax_history=4"


def _with_delayed_scales(net):
    if not kernels.load():
        pytest.skip(kernels.status().sentence)
    return amp.autocast(net, Policy.parse(DELAYED))


CASTS = {
    "float16 weights": mpgluon.cast_block,
    "bfloat16 weights": lambda net: mpgluon.cast_block(net, "bfloat16"),
    "float16": amp.autocast,
    "bfloat16": lambda net: amp.autocast(net, "bfloat16"),
    "delayed scales": _with_delayed_scales,
    "rules": lambda net: mpgluon.cast_block(
        net,
        keep_fp32=(*NORMALIZATION_LAYERS, net[4], f"{net[0].name}:Convolution"),
        compute_16=("softmax",),
    ),
}
COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda net: pickle.loads(pickle.dumps(net))}
ONE, TWO = [mx.cpu(0)], [mx.cpu(0), mx.cpu(1)]
each_cast = pytest.mark.parametrize("cast", CASTS)
each_copy = pytest.mark.parametrize("copied", COPIES)
each_way = pytest.mark.parametrize("hybridize", [False, True], ids=["imperative", "hybridized"])


def make(ctx=ONE):
    np.random.seed(0)
    mx.random.seed(0)
    net = in_sequence(
        *(nn.Conv2D(4, 3, in_channels=2), nn.BatchNorm(in_channels=4), nn.Activation("relu")),
        *(nn.Flatten(), nn.Dense(8, in_units=64), nn.Dense(5, in_units=8)),
    )
    net.initialize(mx.init.Xavier(), ctx=ctx)
    return net


def images(seed, ctx=ONE):
    batch = np.random.default_rng(seed).standard_normal((4, 2, 6, 6))
    return [mx.nd.array(batch, ctx=one) for one in ctx]


def trainer_of(net):
    options = {"learning_rate": 0.01, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "adam", options, update_on_kvstore=False)
    amp.init_trainer(trainer, 2.0**8)
    return trainer


def train(net, trainer, seeds, ctx=ONE):
    for seed in seeds:
        with autograd.record():
            loss = [(net(batch) ** 2).sum() for batch in images(seed, ctx)]
            with amp.scale_loss(loss, trainer) as scaled:
                autograd.backward(scaled)
        trainer.step(4)


def outputs(net, ctx=ONE):
    return [net(batch).asnumpy() for batch in images(99, ctx)]


def values(net):
    """Return the parameters on each device, their FP32 values, and the histories of scales."""
    found = [a.asnumpy() for p in net.collect_params().values() for a in p.list_data()]
    known = [fp32.known(p) for p in net.collect_params().values()]
    histories = [one for one in scale_histories(net).values() if one.any()]
    return [*found, *(one.asnumpy() for one in known if one is not None), *histories]


@pytest.mark.sampled(4)
@each_way
@pytest.mark.parametrize("trained", [0, 3], ids=["untrained", "trained"])
@pytest.mark.parametrize("devices", [ONE, TWO], ids=["one device", "two devices"])
@each_copy
@each_cast
def test_a_copy_has_the_same_bits_and_trains_and_is_restored_by_itself(
    cast, copied, devices, trained, hybridize
):
    net = make(devices)
    CASTS[cast](net)
    net.hybridize(hybridize)
    if trained:
        train(net, trainer_of(net), range(trained), devices)
    other = COPIES[copied](net)
    before = values(net)
    assert_same_bits(values(other), before)
    assert_same_bits(outputs(other, devices), outputs(net, devices))
    train(other, trainer_of(other), range(10, 13), devices)
    assert_same_bits(values(net), before)
    after = values(other)
    assert not np.array_equal(after[0], before[0])
    train(net, trainer_of(net), range(10, 13), devices)
    assert_same_bits(values(net), after)
    mpgluon.restore(other)
    assert_same_bits(values(net), after)
    mpgluon.restore(net)
    assert_same_bits(values(other), values(net))
    assert_same_bits(outputs(other, devices), outputs(net, devices))


@each_way
@each_copy
def test_a_copy_of_a_best_model_is_unchanged_by_further_training(copied, hybridize):
    net = cast_net(make())
    net.hybridize(hybridize)
    trainer = trainer_of(net)
    train(net, trainer, range(3))
    expected, best = outputs(net), COPIES[copied](net)
    train(net, trainer, range(3, 6))
    assert not np.array_equal(outputs(net)[0], expected[0])
    assert_same_bits(outputs(best), expected)


@each_copy
def test_a_copys_checkpoint_holds_the_fp32_values_of_the_masters(copied, tmp_path):
    net = cast_net(make())
    trainer = trainer_of(net)
    train(net, trainer, range(3))
    mpgluon.save_checkpoint(tmp_path / "net.ckpt", net, trainer)
    other = COPIES[copied](net)
    mpgluon.save_checkpoint(tmp_path / "copy.ckpt", other, trainer_of(other))
    loaded = [make(), make()]
    for one, name in zip(loaded, ("net", "copy")):
        mpgluon.load_checkpoint(tmp_path / f"{name}.ckpt", one, trainer_of(one))
    assert_same_bits(*(values(one) for one in loaded))
    assert not np.array_equal(loaded[0][5].weight.data().asnumpy(), net[5].weight.data().asnumpy())


class Shared(gluon.HybridBlock):
    """Two dense layers with one weight, which is frozen, a trained bias, a constant, and rows."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.rows = nn.Embedding(10, 6, sparse_grad=True)
            self.first = nn.Dense(6, in_units=6, flatten=False)
            self.second = nn.Dense(6, in_units=6, flatten=False, params=self.first.params)
            self.factor = self.params.get_constant("factor", mx.nd.array([2.0]))

    def hybrid_forward(self, F, x, factor):
        return F.broadcast_mul(self.second(self.first(self.rows(x))), factor)


def shared():
    net = Shared()
    net.first.weight.grad_req = "null"
    net.first.bias.grad_req = "add"
    return net, mx.nd.array([[1, 2]])


class WithPlainBlock(gluon.Block):
    """A Block that calls operators of ``mx.nd``, with a child in a list as well."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(4, in_units=3)
        self.blocks = [self.dense]

    def forward(self, x):
        return mx.nd.relu(self.blocks[0](x))


def imported(tmp_path):
    source = in_sequence(nn.Conv2D(4, 3, in_channels=2), nn.BatchNorm(in_channels=4), nn.Dense(5))
    source.initialize()
    source.hybridize()
    source(images(0)[0])
    source.export(str(tmp_path / "source"))
    prefix = str(tmp_path / "source")
    net = gluon.SymbolBlock.imports(f"{prefix}-symbol.json", ["data"], f"{prefix}-0000.params")
    return net, images(0)[0]


@pytest.mark.filterwarnings("ignore:.*Cannot decide type:UserWarning")  # imports of MXNet's own
@each_way
@each_copy
@pytest.mark.parametrize("way", [mpgluon.cast_block, amp.autocast])
@pytest.mark.parametrize("kind", ["shared", "plain block", "imported", "recurrent"])
def test_other_blocks_are_copied_with_their_gradients(kind, way, copied, hybridize, tmp_path):
    if kind == "imported":
        net, x = imported(tmp_path)
    else:
        net, x = {
            "shared": shared,
            "plain block": lambda: (WithPlainBlock(), mx.nd.ones((2, 3))),
            "recurrent": lambda: (gluon.rnn.LSTM(6, 2, input_size=3), mx.nd.ones((4, 2, 3))),
        }[kind]()
        net.initialize()
    way(net)
    net.hybridize(hybridize)
    net(x)
    other = COPIES[copied](COPIES[copied](net))
    assert list(other.collect_params()) == list(net.collect_params())
    assert_same_bits([other(x).asnumpy()], [net(x).asnumpy()])
    gradients = []
    for one in (net, other):
        with autograd.record():
            loss = (one(x) ** 2).sum()
        autograd.backward(loss)
        trained = [p for p in one.collect_params().values() if p.grad_req != "null"]
        gradients.append([p.grad().asnumpy() for p in trained])
    assert len(gradients[0]) > 0
    assert_same_bits(*gradients)
    if kind == "shared":
        assert other.first.weight is other.second.weight
    mpgluon.restore(other)
    traces = [vars(part) for part in (other, *other.collect_params().values())]
    assert not any({"__reduce_ex__", "__setstate__"} & set(one) for one in traces)


def test_a_copy_made_before_the_shapes_are_known_is_initialized_by_its_first_batch():
    net = cast_net(initialized(in_sequence(nn.Dense(4), nn.Dense(2))))
    other = copy.deepcopy(net)
    other(mx.nd.ones((2, 3)))
    assert other[0].weight.shape == (4, 3)
    assert net[0].weight.shape == (4, 0)


def test_a_lambda_from_an_operators_name_is_deep_copied():
    net = cast_net(initialized(in_sequence(nn.Dense(4, in_units=3), nn.HybridLambda("tanh"))))
    other = copy.deepcopy(net)
    x = mx.nd.ones((2, 3))
    assert_same_bits([other(x).asnumpy()], [net(x).asnumpy()])


class Mask(gluon.HybridBlock):
    """A layer that learns from ``cast`` which number is lowest."""

    def cast(self, dtype):
        super().cast(dtype)
        self.lowest = -65504.0

    def hybrid_forward(self, F, x):
        return F.broadcast_maximum(x, F.ones_like(x) * getattr(self, "lowest", -1e18))


@each_copy
def test_restoring_a_copy_removes_the_attributes_that_its_blocks_set_in_cast(copied):
    net = cast_net(Mask())
    other = COPIES[copied](net)
    assert other.lowest == -65504
    mpgluon.restore(other)
    assert not hasattr(other, "lowest")
    assert net.lowest == -65504


def test_a_network_around_a_cast_one_and_a_part_of_it_are_copied_too():
    net = cast_net(make())
    around = in_sequence(net, nn.Dense(3, in_units=5))
    around[1].initialize()
    expected = around(images(0)[0]).asnumpy()
    assert_same_bits([copy.deepcopy(around)(images(0)[0]).asnumpy()], [expected])
    part = copy.deepcopy(net[0])
    assert part is not net[0]
    assert_same_bits([part(images(0)[0]).asnumpy()], [net[0](images(0)[0]).asnumpy()])


@pytest.mark.slow
def test_another_process_computes_the_same_bits(tmp_path):
    expected = []
    for cast, hybridize in itertools.product(CASTS, (False, True)):
        net = make()
        CASTS[cast](net)
        net.hybridize(hybridize)
        train(net, trainer_of(net), range(2))
        (tmp_path / f"{len(expected)}.pickle").write_bytes(pickle.dumps(net))
        expected.extend(outputs(net))
    np.save(tmp_path / "images.npy", images(99)[0].asnumpy())
    lines = (
        "import pickle, sys, mxnet, numpy",
        "images = mxnet.nd.array(numpy.load(sys.argv[1] + '/images.npy'))",
        "files = [open(f'{sys.argv[1]}/{i}.pickle', 'rb') for i in range(int(sys.argv[2]))]",
        "found = [pickle.load(file)(images).asnumpy() for file in files]",
        "numpy.save(sys.argv[1] + '/outputs.npy', found)",
    )
    command = [sys.executable, "-c", "\n".join(lines), str(tmp_path), str(len(expected))]
    subprocess.run(command, check=True)
    assert_same_bits(list(np.load(tmp_path / "outputs.npy")), expected)
