"""Own operators in a network that ``prepare`` leaves in FP32: all bits, files and copies of it."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from collections import Counter

import mpgluon
from mpgluon import amp
from mpgluon.graph.any_layout import ANY_LAYOUT

import mxnet as mx
import numpy as np
import pytest
from helpers import (
    STATIC,
    assert_same_bits,
    gradients_of,
    in_sequence,
    parameters_of,
    run_python,
)
from interfaces import interface
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.gluon.model_zoo import vision

pytestmark = pytest.mark.usefixtures("native_operators")

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
SGD = {"learning_rate": 0.001, "momentum": 0.9}


class Clipped(nn.HybridBlock):
    """A depthwise convolution behind ReLU6 and a padding, as in EfficientNet-Lite0."""

    def __init__(self, channels):
        super().__init__()
        with self.name_scope():
            self.norm = nn.BatchNorm(in_channels=channels)
            self.next = nn.Conv2D(
                channels, 3, 2, groups=channels, in_channels=channels, use_bias=False
            )

    def hybrid_forward(self, F, x):
        x = F.clip(self.norm(x).as_nd_ndarray(), 0, 6)
        x = F.Pad(x, mode="constant", pad_width=(0, 0, 0, 0, 0, 1, 0, 1))
        return self.next(x.as_np_ndarray() if mx.util.is_np_array() else x)


def with_pads():
    return in_sequence(
        *(nn.Conv2D(16, 3, in_channels=3), Clipped(16), nn.Conv2D(24, 1, in_channels=16)),
        *(Clipped(24), nn.BatchNorm(in_channels=24), nn.Conv2D(40, 1, in_channels=24)),
        *(nn.HybridLambda(lambda F, x: F.clip(x, 0, 6)), nn.GlobalAvgPool2D(), nn.Dense(5)),
    )


def without():
    return in_sequence(
        *(nn.Conv2D(8, 3, in_channels=3), nn.BatchNorm(in_channels=8), nn.Activation("relu")),
        *(nn.MaxPool2D(), nn.Flatten(), nn.Dense(5)),
    )


# The network, and its own operators; the last ReLU6 of the first two is before a pooling.
NETWORKS = {
    "MobileNet v2": (lambda: vision.mobilenet_v2_0_25(classes=5), {"clip": 35}),
    "with Pad": (with_pads, {"clip": 2, "Pad": 2}),
    "without": (without, {}),
}
each_network = pytest.mark.parametrize("name", NETWORKS)


def make(name="with Pad", **options):
    """Return a hybridized network, whose dense layer has no values before the first call."""
    mx.random.seed(0)
    net = NETWORKS[name][0]()
    net.initialize(mx.init.Xavier())
    net.hybridize(**options)
    return net


def prepared(net):
    return mpgluon.prepare(net, "float32", "sgd", SGD)


def in_gluon(net):
    return gluon.Trainer(net.collect_params(), "sgd", SGD)


def leave_trainer(net):
    """Separate a network from its Trainer, which cannot be copied."""
    for parameter in net.collect_params().values():
        parameter._set_trainer(None)


def batches(count, size=32):
    random = np.random.RandomState(0)
    for _ in range(count):
        yield mx.nd.array(random.randn(4, 3, size, size)), mx.nd.array(random.randint(0, 5, 4))


def train(net, trainer, steps=4):
    """Return the losses, gradients and weights of some steps, and a prediction."""
    seen = []
    mx.random.seed(0)  # of these values
    for images, labels in batches(steps):
        with autograd.record():
            loss = LOSS(net(images), labels)
        loss.backward()
        seen += [loss.asnumpy(), *gradients_of(net).values()]
        trainer.step(len(labels))
    return [*seen, *parameters_of(net).values(), net(images).asnumpy()]


def own_operators(net, x=None):
    """Return how many of each own operator a network's graph computes."""
    x = next(batches(1))[0] if x is None else x
    operators = []
    net.register_op_hook(lambda *of_result: operators.append(of_result[1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "register_op_hook is experimental"
        net(x)
    net.register_op_hook(None)
    operators = [str(one, "utf-8") if isinstance(one, bytes) else one for one in operators]
    return Counter(one.removeprefix(ANY_LAYOUT) for one in operators if one.startswith(ANY_LAYOUT))


@each_network
@pytest.mark.parametrize("options", [{}, STATIC], ids=["dynamic", "static"])
def test_a_network_trains_with_own_operators_to_the_bits_of_gluon(name, options):
    net, plain = make(name, **options), make(name, **options)
    assert_same_bits(train(net, prepared(net)), train(plain, in_gluon(plain)))
    for one in (net, plain):
        one.hybridize()  # MXNet's hooks do not see the operators of a static graph
    assert (own_operators(net), own_operators(plain)) == (NETWORKS[name][1], {})


def test_a_network_of_the_numpy_interface_has_own_operators():
    with interface(in_numpy=True) as array:
        nets = [in_sequence(*(nn.Conv2D(16, 3), Clipped(16), nn.Dense(5))) for _ in range(2)]
        images = array(np.random.RandomState(0).standard_normal((4, 3, 9, 9)).astype("float32"))
        results = []
        for net, use in zip(nets, (prepared, in_gluon)):
            mx.random.seed(0)
            net.initialize(mx.init.Xavier())
            net.hybridize()
            net(images)
            trainer = use(net)
            for _ in range(3):
                with autograd.record():
                    loss = (net(images) ** 2).sum()
                loss.backward()
                trainer.step(len(images))
            results.append([loss.asnumpy(), *parameters_of(net).values()])
        assert_same_bits(*results)
        assert [own_operators(net, images).total() for net in nets] == [2, 0]


def test_children_that_are_hybridized_alone_have_own_operators():
    nets = []
    for use in (prepared, in_gluon):
        net = nn.Sequential()
        net.add(*make())  # which are hybridized
        nets.append((net, use(net)))
    assert_same_bits(*(train(net, trainer) for net, trainer in nets))
    assert own_operators(nets[0][0][1], mx.nd.ones((2, 16, 9, 9))) == {"clip": 1, "Pad": 1}


def test_own_operators_come_with_prepare_and_leave_with_a_cast_or_a_restore():
    net = make()
    batch = next(batches(1))[0]
    net(batch)

    def computed():
        return own_operators(net).total(), net(batch).asnumpy().tobytes()

    none, bits = computed()
    prepared(net)
    assert (none, computed()) == (0, (4, bits))
    prepared(net)
    assert computed() == (4, bits)
    net.hybridize(False)
    assert own_operators(net).total() == 0
    net.hybridize()
    assert computed() == (4, bits)
    mpgluon.restore(net)
    assert computed() == (0, bits)
    for dtype in ("float16", "bfloat16"):
        prepared(net)
        mpgluon.prepare(net, dtype, "sgd", SGD)
        mpgluon.restore(net)
        assert computed() == (0, bits)
    amp.autocast(net)
    with pytest.raises(mpgluon.PrecisionError, match="already cast"):
        prepared(net)
    amp.restore(net)
    assert computed() == (0, bits)
    prepared(net)
    assert computed() == (4, bits)


def test_a_network_whose_trainer_is_refused_stays_as_it_was():
    net = make()
    attributes = set(vars(net))
    with pytest.raises(TypeError):
        mpgluon.prepare(net, "float32", "sgd", SGD, colour="red")
    assert set(vars(net)) == attributes


READER = """
import pickle, sys
import mxnet as mx

x = mx.nd.load(sys.argv[1] + "/x")[0]
imported = mx.gluon.SymbolBlock.imports(
    sys.argv[1] + "/net-symbol.json", ["data"], sys.argv[1] + "/net-0007.params"
)
with open(sys.argv[1] + "/net.pickle", "rb") as file:
    copied = pickle.load(file)
loaded = mx.gluon.model_zoo.vision.mobilenet_v2_0_25(classes=5)
loaded.load_parameters(sys.argv[1] + "/parameters")
mx.nd.save(sys.argv[1] + "/found", [net(x) for net in (imported, copied, loaded)])
assert not [name for name in sys.modules if name.startswith("mpgluon")]
"""


@pytest.mark.multiprocess
def test_files_and_pickles_of_a_network_need_no_mpgluon(tmp_path):
    net = make("MobileNet v2")
    trainer = prepared(net)
    losses = train(net, trainer, steps=1)
    x = next(batches(1))[0]
    assert own_operators(net)
    mx.nd.save(str(tmp_path / "x"), [x])
    net.export(str(tmp_path / "net"), 7)
    net.save_parameters(str(tmp_path / "parameters"))
    net.hybridize()  # MXNet copies no graph that is compiled
    leave_trainer(net)
    (tmp_path / "net.pickle").write_bytes(pickle.dumps(net))
    done = run_python(READER, tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for found in mx.nd.load(str(tmp_path / "found")):
        np.testing.assert_array_equal(found.asnumpy(), losses[-1])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_is_a_plain_network_that_can_be_prepared(copied):
    net = make()
    x = next(batches(1))[0]
    net(x)
    net.hybridize()
    prepared(net)
    leave_trainer(net)
    other = copied(net)
    assert_same_bits([net(x).asnumpy()], [other(x).asnumpy()])
    assert (own_operators(net).total(), own_operators(other).total()) == (4, 0)
    prepared(other)
    assert own_operators(other).total() == 4


def test_another_device_computes_with_mxnets_operators():
    net, x = make(), next(batches(1))[0]
    prepared(net)
    expected = net(x).asnumpy()
    assert own_operators(net).total() == 4
    elsewhere = mx.Context("cpu_shared", 0)
    net.collect_params().reset_ctx(elsewhere)
    x = x.as_in_context(elsewhere)
    assert own_operators(net, x).total() == 0
    assert_same_bits([net(x).asnumpy()], [expected])
    net.collect_params().reset_ctx(mx.cpu())
    net.hybridize()
    assert own_operators(net).total() == 4


def test_a_backend_finds_the_operators_that_it_knows():
    net, x = make(), next(batches(1))[0]
    net(x)
    prepared(net)
    net.optimize_for(x, backend="MKLDNN")
    fused = net(x).asnumpy()
    assert own_operators(net).total() == 0
    net.hybridize(backend="MKLDNN")
    prepared(net)
    assert own_operators(net).total() == 0
    assert_same_bits([net(x).asnumpy()], [fused])


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_special_numbers_and_added_gradients_have_the_bits_of_gluon(special):
    results = []
    for use in (prepared, in_gluon):
        net, x = make(), next(batches(1))[0]
        mx.random.seed(0)
        net(x)
        use(net)
        net.collect_params().setattr("grad_req", "add")
        x[0, 0, 3:5, 4], x[1, 2] = special, -0.0
        x.attach_grad("add")
        for _ in range(3):
            with autograd.record():
                loss = net(x).sum()
            loss.backward()
        gradients = [p.grad() for p in net.collect_params().values() if p.grad_req != "null"]
        results.append([array.asnumpy() for array in (loss, x.grad, *gradients)])
    assert_same_bits(*results)


def test_an_empty_batch_is_as_in_gluon():
    said = []
    for use in (prepared, in_gluon):
        net = make()
        net(next(batches(1))[0])
        use(net)
        try:
            said.append(net(mx.nd.zeros((0, 3, 32, 32))).shape)
        except mx.base.MXNetError as error:
            said.append(str(error).splitlines()[-1])
    assert said[0] == said[1]


def test_without_native_operators_the_network_is_mxnets():
    done = run_python(
        """
import sys
sys.path.insert(0, sys.argv[1])
from cast import test_plain_graph as tests
net = tests.make()
net.hybridize()
tests.train(net, tests.prepared(net))
assert not tests.own_operators(net)
""",
        os.path.dirname(os.path.dirname(__file__)),
        env={**os.environ, "MPGLUON_NATIVE": "0"},
    )
    assert done.returncode == 0, done.stderr
