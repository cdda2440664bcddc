"""Programs written for ``mxnet.contrib.amp`` run with ``from mpgluon import amp``."""

import importlib

import mpgluon
from mpgluon import amp
from mpgluon.graph.operators import Rule, rule_of
from mpgluon.trainer import networks

import mxnet as mx
import numpy as np
import pytest
from helpers import BOTH, assert_same_bits, in_sequence, parameters_of
from mxnet import autograd, gluon
from mxnet.contrib.amp import lists
from mxnet.gluon import nn

MXNETS_BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
PRODUCTS = ["Convolution", "FullyConnected"]
LISTS = ["lp16_ops", "fp32_ops", "lp16_fp32_ops", "conditional_fp32_ops", "widest_type_cast"]


@pytest.fixture(autouse=True)
def _init_ends_with_the_test(monkeypatch):
    monkeypatch.setattr(networks, "_requested", None)


class Gated(nn.HybridBlock):
    """A dense layer whose result goes through operators that lists can name."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.dense = nn.Dense(4, in_units=6)

    def hybrid_forward(self, F, x):
        x = self.dense(x)
        return F.softmax(x) * F.Activation(x, act_type="softrelu")


def make_net() -> nn.HybridSequential:
    mx.random.seed(3)
    net = in_sequence(nn.Conv2D(6, 3, in_channels=3), nn.BatchNorm(in_channels=6))
    net.add(nn.GlobalAvgPool2D(), nn.Flatten(), Gated())
    net.initialize(mx.init.Xavier())
    return net


def batch() -> tuple[mx.nd.NDArray, mx.nd.NDArray]:
    images = np.random.default_rng(0).standard_normal((8, 3, 6, 6))
    return mx.nd.array(images), mx.nd.arange(8) % 4


def trainer_of(net: gluon.Block) -> gluon.Trainer:
    options = {"learning_rate": 0.5, "momentum": 0.9}
    return gluon.Trainer(net.collect_params(), "sgd", options, update_on_kvstore=False)


def train(net: gluon.Block, trainer: gluon.Trainer, steps: int = 4) -> None:
    images, labels = batch()
    for _ in range(steps):
        with autograd.record():
            loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(images), labels)
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss)
        trainer.step(len(labels))


@BOTH
@pytest.mark.parametrize("dtype", ["float16", np.float16, "bfloat16", MXNETS_BFLOAT16])
def test_init_trains_the_bits_of_autocast(hybridize, dtype):
    def trained(net):
        amp.init_trainer(trainer := trainer_of(net))
        train(net, trainer)
        return parameters_of(net)

    amp.init(dtype)
    net, expected = make_net(), make_net()
    for one in (net, expected):
        one.hybridize(hybridize, static_alloc=True, static_shape=True)
    net(batch()[0])  # traced in FP32 before the Trainer comes
    found = trained(net)
    amp.autocast(expected, "float16" if dtype in ("float16", np.float16) else "bfloat16")
    assert_same_bits(found, trained(expected))


def test_each_network_is_cast_when_its_own_trainer_comes():
    amp.init()
    generator, discriminator, untrained = make_net(), make_net(), make_net()
    amp.init_trainer(trainer_of(generator))
    assert computes_in_16_bits(generator)
    assert not computes_in_16_bits(discriminator)
    amp.init_trainer(gluon.Trainer(discriminator[0].collect_params(), "sgd"))  # the rest is frozen
    assert computes_in_16_bits(discriminator)
    assert not computes_in_16_bits(untrained)


class Adversaries(gluon.Block):
    """Holds two networks and computes nothing itself."""

    def __init__(self, generator, discriminator):
        super().__init__()
        self.generator, self.discriminator = generator, discriminator


def test_a_block_that_only_holds_networks_is_not_cast_in_their_place():
    amp.init()
    both = Adversaries(make_net(), make_net())
    amp.init_trainer(trainer := trainer_of(both.generator))
    assert computes_in_16_bits(both.generator)
    assert not computes_in_16_bits(both.discriminator)
    assert both.generator(batch()[0]).dtype == np.float32
    train(both.generator, trainer, steps=1)


def test_networks_that_share_a_block_are_refused_and_left_in_fp32():
    amp.init()
    first = make_net()
    second = in_sequence(first[0], nn.GlobalAvgPool2D(), nn.Dense(4, in_units=6))
    second[2].initialize()
    parameters = first.collect_params()
    parameters.update(second.collect_params())
    images, _ = batch()
    before = [net(images).asnumpy() for net in (first, second)]
    with pytest.raises(mpgluon.PrecisionError, match="is already cast as a part of"):
        amp.init_trainer(gluon.Trainer(parameters, "sgd"))
    for net, expected in zip((first, second), before):
        np.testing.assert_array_equal(net(images).asnumpy(), expected)


def test_a_network_that_is_cast_already_is_left_as_it_is():
    amp.init("bfloat16")
    net = make_net()
    mpgluon.cast_block(net, keep_fp32=[net[0]])
    amp.init_trainer(gluon.Trainer(net.collect_params(), "sgd", {"multi_precision": True}))
    assert net[4].dense.weight.dtype == "float16"
    assert net[0].weight.dtype == np.float32


def test_init_without_a_network_left_says_so():
    amp.init()
    trainer = trainer_of(make_net())
    with pytest.raises(ValueError, match="no network with the Trainer's parameters is left"):
        amp.init_trainer(trainer)


def computes_in_16_bits(net: gluon.Block) -> bool:
    """Whether a value that FP16 lacks is rounded on its way through the first convolution."""
    images, _ = batch()
    plain = make_net()
    return not np.array_equal(net[0](images).asnumpy(), plain[0](images).asnumpy())


@pytest.mark.parametrize(
    ("wishes", "choices"),
    [
        ({"fp32_ops": ["FullyConnected", "softmax"]}, {"keep_fp32": ["FullyConnected"]}),
        ({"target_precision_ops": ["FullyConnected"]}, {"keep_fp32": ["Convolution"]}),
        ({"target_precision_ops": [*PRODUCTS, "softmax"]}, {"compute_16": ["softmax"]}),
        (
            {"conditional_fp32_ops": [("Activation", "act_type", ["softrelu"])]},
            {"keep_fp32": ["Activation"]},
        ),
    ],
)
def test_lists_of_operators_choose_their_formats(wishes, choices):
    amp.init(**wishes)
    net, expected = make_net(), make_net()
    amp.init_trainer(trainer_of(net))
    amp.autocast(expected, "float16", **choices)
    images, _ = batch()
    result = net(images).asnumpy()
    np.testing.assert_array_equal(result, expected(images).asnumpy())
    mpgluon.restore(expected)
    amp.autocast(expected, "float16")
    assert not np.array_equal(result, expected(images).asnumpy())


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"target_dtype": "int8"}, "target_dtype must be"),
        ({"fp32_ops": "softmax"}, "fp32_ops must be a list of str"),
        ({"fp32_ops": ["_contrib_softmaxx"]}, "contrib.softmaxx', which is not an operator"),
        ({"fp32_ops": ["softmax"], "target_precision_ops": ["softmax"]}, "for 16 bits and for FP"),
        ({"conditional_fp32_ops": ["Activation"]}, "name of the operator, name of the argument"),
    ],
)
def test_init_refuses_what_it_cannot_use(wishes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        amp.init(**wishes)
    assert networks._requested is None


@BOTH
@pytest.mark.parametrize("is_cast", [False, True])
def test_convert_hybrid_block_returns_a_copy_with_the_bits_of_a_cast(hybridize, is_cast):
    net, images = make_net(), batch()[0]
    if hybridize:
        net.hybridize()
    before = net(images).asnumpy()
    options = {"excluded_sym_names": [f"{net[0].name}_fwd"], "cast_optional_params": is_cast}
    converted = amp.convert_hybrid_block(net, **options)
    np.testing.assert_array_equal(net(images).asnumpy(), before)
    elsewhere = amp.convert_hybrid_block(net, ctx=mx.cpu(1), **options)
    assert elsewhere[0].weight.list_ctx() == [mx.cpu(1)]
    cast = mpgluon.cast_block if is_cast else amp.autocast
    cast(net, keep_fp32=[net[0], nn.BatchNorm])
    np.testing.assert_array_equal(converted(images).asnumpy(), net(images).asnumpy())
    train(converted, trainer := trainer_with_scale(converted), steps=1)
    assert not amp.step_was_skipped(trainer)


def test_convert_hybrid_block_copies_a_network_that_is_cast_as_it_is():
    amp.init()
    net, images = make_net(), batch()[0]
    amp.init_trainer(trainer := trainer_of(net))
    train(net, trainer, steps=2)
    converted = amp.convert_hybrid_block(net)
    np.testing.assert_array_equal(converted(images).asnumpy(), net(images).asnumpy())
    assert converted[0].weight is not net[0].weight


def trainer_with_scale(net: gluon.Block) -> gluon.Trainer:
    options = {"learning_rate": 0.1, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer, 128)
    return trainer


def test_a_converted_model_computes_in_a_module_as_the_cast_network_does():
    net, images = make_net(), batch()[0]
    symbol = net(mx.sym.var("data"))
    values = {p.name: p.data() for p in net.collect_params().values()}
    aux = {name: values.pop(name) for name in symbol.list_auxiliary_states()}
    converted, arguments, aux = amp.convert_model(symbol, values, aux)
    module = mx.mod.Module(converted, label_names=None)
    module.bind([("data", images.shape)], for_training=False)
    module.set_params(arguments, aux)
    module.forward(mx.io.DataBatch([images]))
    amp.autocast(net)
    # BatchNorm of a graph is another implementation: a last place of FP16, 2**-11, apart.
    expected = net(images).asnumpy()
    np.testing.assert_allclose(module.get_outputs()[0].asnumpy(), expected, rtol=2.0**-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"excluded_sym_names": ["conv0"]}, "exclude operators with fp32_ops"),
        ({"cast_optional_params": True}, "export_mxnet"),
        ({"sym": "net"}, "sym must be a Symbol, received str"),
    ],
)
def test_convert_symbol_refuses_what_it_cannot_do(options, message):
    arguments = {"sym": make_net()(mx.sym.var("data")), **options}
    with pytest.raises((TypeError, ValueError), match=message):
        amp.convert_symbol(**arguments)


def test_the_inputs_of_a_symbol_are_what_is_not_named_like_a_parameter():
    converted = amp.convert_symbol(make_net()(mx.sym.var("images")), "float16")
    assert "images" in converted.list_inputs()


def test_each_operator_is_in_one_list():
    ours = {name: getattr(amp, f"list_{name}")() for name in LISTS}
    names = [name for operators in ours.values() for name in operators]
    assert len(names) == len(set(names))
    assert set(lists.symbol_fp16.FP16_FUNCS) <= set(ours["lp16_ops"])
    theirs = {*lists.symbol_fp16.FP32_FUNCS, *lists.symbol_fp16.WIDEST_TYPE_CASTS}
    assert theirs - set(names) == set()
    assert {rule_of(name) for name in ours["widest_type_cast"]} == {Rule.FOLLOW}


def test_other_lists_name_losses_and_operands():
    assert "SoftmaxOutput" in amp.list_loss_output_functions("float16")
    assert amp.list_lp16_use_fp32_params()["BatchNorm"][:2] == ["beta", "gamma"]
    with pytest.raises(ValueError, match="target_dtype"):
        amp.list_lp16_ops("int8")


def test_public_names_are_those_of_contrib_amp():
    module = importlib.import_module("mpgluon.contrib_amp")
    for name in module.__all__:
        assert getattr(amp, name) is getattr(module, name)


def test_the_package_says_that_a_name_is_in_amp():
    with pytest.raises(AttributeError, match=r"no attribute 'autocast'; it is amp\.autocast"):
        mpgluon.autocast  # noqa: B018 - the access is the test
