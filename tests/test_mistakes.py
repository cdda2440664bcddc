"""Mistakes with the first snippets: each works, or is refused with the value and a cure."""

import copy
import logging
import pickle

import mpgluon
from mpgluon import amp, diagnostics

import mxnet as mx
import pytest
from helpers import assert_same_bits, parameters_of
from mxnet import autograd, gluon
from mxnet.gluon import nn

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()
ON_A_BATCH = [
    diagnostics.batch_exponents,
    diagnostics.compare_with_fp32,
    diagnostics.locate_overflow,
    diagnostics.range_report,
    diagnostics.suggest_keep_fp32,
]
on_a_batch = pytest.mark.parametrize("function", ON_A_BATCH, ids=lambda one: one.__name__)


def make_net(*, initialized=True, shapes=True):
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Dense(4, in_units=3 if shapes else 0, activation="relu"))
        net.add(nn.Dense(2, in_units=4 if shapes else 0))
    if initialized:
        net.initialize(mx.init.Xavier())
    return net


def images_and_labels():
    return mx.nd.random.normal(shape=(8, 3)), mx.nd.arange(8) % 2


def a_batch():
    return diagnostics.Batch(*images_and_labels(), LOSS)


def trainer_of(net):
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"multi_precision": True})
    amp.init_trainer(trainer, 1024)
    return trainer


def step(net, trainer, batch=None):
    images, labels = batch or images_and_labels()
    with autograd.record():
        loss = LOSS(net(images), labels)
        with amp.scale_loss(loss, trainer) as scaled_loss:
            scaled_loss.backward()
    trainer.step(len(labels))


# --- Diagnostics -----------------------------------------------------------------------------


@on_a_batch
def test_a_tuple_in_place_of_a_batch_is_refused_with_how_to_write_it(function):
    with pytest.raises(TypeError, match=r"Batch\(images, labels, loss_fn\), received tuple"):
        function(make_net(), images_and_labels())


@on_a_batch
def test_a_network_that_is_missing_is_named(function):
    with pytest.raises(TypeError, match=r"net must be a gluon\.Block, received NoneType"):
        function(None, a_batch())


def test_a_batch_of_numpy_arrays_or_with_its_parts_in_another_order_is_refused():
    images, labels = images_and_labels()
    with pytest.raises(TypeError, match=r"mx\.nd\.array\(images\), received ndarray"):
        diagnostics.Batch(images.asnumpy(), labels, LOSS)
    with pytest.raises(TypeError, match=r"Batch\(inputs, labels, loss_fn\), .* received .*NDArray"):
        diagnostics.Batch(images, LOSS, labels)


@on_a_batch
def test_a_network_without_values_is_refused_before_it_is_run(function):
    with pytest.raises(ValueError, match=r"no values yet: net_dense0_weight, .*net\.initialize"):
        function(make_net(initialized=False), a_batch())


@on_a_batch
def test_shapes_that_wait_for_the_first_call_are_taken_from_the_batch(function):
    net = make_net(shapes=False)
    function(net, a_batch())
    assert net[0].weight.shape == (4, 3)


def test_check_network_needs_no_values():
    net = make_net(initialized=False, shapes=False)
    mpgluon.cast_block(net)
    assert diagnostics.check_network(net, (8, 3)).at_level("ok")


class Times(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        return x * 6e4 * 1e6


def test_a_product_with_a_number_has_one_name_in_all_reports():
    net = nn.HybridSequential(prefix="net_")
    net.add(nn.Dense(4, in_units=3), Times(prefix="times_"), nn.Dense(2, in_units=4))
    net.initialize(mx.init.One())
    mpgluon.cast_block(net)
    (finding,) = diagnostics.check_network(net, (8, 3)).findings
    assert finding.what.startswith("broadcast_mul in times writes 1e+06 into float16")
    batch = diagnostics.Batch(mx.nd.ones((8, 3)), mx.nd.zeros((8,)), LOSS)
    assert diagnostics.locate_overflow(net, batch).what == "what broadcast_mul returned"
    mpgluon.restore(net)
    report = mpgluon.cast_block(net, keep_fp32=["times:broadcast_mul"])
    assert report.operators_fp32 == ("times:broadcast_mul",)


# --- Before initialize, and before the first call --------------------------------------------


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_prepare_without_initialize_is_refused_and_nothing_is_cast(dtype):
    net = make_net(initialized=False)
    with pytest.raises(ValueError, match=r"no values yet: .*net\.initialize"):
        mpgluon.prepare(net, dtype, "sgd")
    net.initialize()
    step(net, mpgluon.prepare(net, dtype, "sgd"))


def test_prepare_takes_shapes_that_wait_for_the_first_call():
    net = make_net(shapes=False)
    step(net, mpgluon.prepare(net, "fp16", "sgd"))


def test_a_checkpoint_before_the_first_call_is_refused_with_what_to_do(tmp_path):
    net = make_net(shapes=False)
    trainer = mpgluon.prepare(net, "fp16", "sgd")
    with pytest.raises(ValueError, match=r"no values yet: .* call it once on an input"):
        mpgluon.save_checkpoint(tmp_path / "a.npz", net, trainer)
    net(images_and_labels()[0])
    mpgluon.save_checkpoint(tmp_path / "a.npz", net, trainer)
    other = make_net(shapes=False)
    mpgluon.load_checkpoint(tmp_path / "a.npz", other, mpgluon.prepare(other, "fp16", "sgd"))


@pytest.mark.parametrize("function", [mpgluon.save_checkpoint, mpgluon.load_checkpoint])
def test_a_checkpoint_without_a_trainer_is_refused_with_what_to_call(function, tmp_path):
    net = make_net()
    with pytest.raises(TypeError, match=r"trainer must be .* NoneType; .* net\.save_parameters"):
        function(tmp_path / "a.npz", net, None)
    with pytest.raises(TypeError, match=r"net must be a gluon\.Block, received Trainer"):
        function(tmp_path / "a.npz", trainer_of(net), net)


# --- The input of the network -------------------------------------------------------------------


@pytest.mark.parametrize("cast", [mpgluon.cast_block, amp.autocast])
@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "int32", "uint8"])
def test_input_of_another_dtype_is_refused_with_the_call_that_converts_it(cast, hybridize, dtype):
    net = make_net()
    cast(net)
    net.hybridize(hybridize)
    images = mx.nd.ones((8, 3), dtype=dtype)
    with pytest.raises(mpgluon.PrecisionError, match=f"input 0 of net is {dtype}") as error:
        net(images)
    assert 'pass x.astype("float32")' in str(error.value)
    assert net(images.astype("float32")).shape == (8, 2)


# --- prepare, init_trainer, scale_loss and step ------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("sdg",), {}, "Cannot find optimizer sdg"),
        (("sgd", {"lr": 0.1}), {}, "unexpected keyword argument 'lr'"),
        (("sgd",), {"loss_scale": "static"}, "received 'static'"),
        (("sgd",), {"update_on_kvstore": True}, "create it with update_on_kvstore=False"),
        (("adam",), {"masters": False}, "multi_precision=True"),
        (("sgd",), {"params": [5]}, "must be a list or dict of Parameters"),
    ],
)
def test_a_network_whose_prepare_was_refused_can_be_prepared(arguments, options, message):
    net = make_net()
    before = parameters_of(net)
    with pytest.raises((ValueError, TypeError, mpgluon.MpgluonError), match=message):
        mpgluon.prepare(net, "fp16", *arguments, **options)
    assert_same_bits(parameters_of(net), before)
    step(net, mpgluon.prepare(net, "fp16", "sgd", {"learning_rate": 0.1}))


@pytest.mark.filterwarnings("ignore:Accumulating with float16 in optimizer")  # MXNet's
def test_a_cast_after_init_trainer_is_checked_by_the_next_step(caplog):
    caplog.set_level(logging.WARNING, "mpgluon")
    net = make_net()
    trainer = gluon.Trainer(net.collect_params(), "adam")
    amp.init_trainer(trainer, 1024)
    mpgluon.cast_block(net)
    with pytest.raises(mpgluon.PrecisionError, match="Adam updates 4 float16 weights"):
        step(net, trainer)
    net = make_net()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9})
    amp.init_trainer(trainer, 1024)
    mpgluon.cast_block(net)
    step(net, trainer)
    step(net, trainer)
    (message,) = caplog.messages
    assert message.startswith("SGD updates 4 float16 weights without FP32 masters")


def test_masters_of_a_cast_after_init_trainer_are_those_of_a_cast_before_it():
    weights = []
    batch = images_and_labels()
    for cast_first in (True, False):
        mx.random.seed(0)
        net = make_net()
        if cast_first:
            mpgluon.cast_block(net)
        trainer = trainer_of(net)
        if not cast_first:
            mpgluon.cast_block(net)
        for _ in range(2):
            step(net, trainer, batch)
        mpgluon.restore(net)
        weights.append(parameters_of(net))
    assert_same_bits(*weights)


def test_what_scale_loss_takes_and_returns_is_said_where_it_is_mistaken():
    net = make_net()
    trainer = trainer_of(net)
    images, labels = images_and_labels()
    with autograd.record():
        loss = LOSS(net(images), labels)
    with pytest.raises(TypeError, match=r"takes a gluon\.Trainer, received HybridSequential"):
        amp.scale_loss(loss, net)
    with pytest.raises(TypeError, match=r"a loss, an NDArray .* and a Trainer; received <mxnet"):
        amp.scale_loss(trainer, loss)
    with pytest.raises(TypeError, match=r"computed inside autograd\.record .* received 0\.\d+ as"):
        amp.scale_loss(float(loss.mean().asscalar()), trainer)
    with pytest.raises(AttributeError, match=r"no 'backward'; write `with amp\.scale_loss\(loss"):
        amp.scale_loss(loss, trainer).backward()
    with amp.scale_loss(loss, trainer) as scaled_loss:  # as that says
        scaled_loss.backward()
    trainer.step(len(labels))


def test_a_step_inside_record_is_refused_and_works_behind_it():
    net = make_net()
    trainer = trainer_of(net)
    images, labels = images_and_labels()
    with autograd.record():
        loss = LOSS(net(images), labels)
        with amp.scale_loss(loss, trainer) as scaled_loss:
            scaled_loss.backward()
        with pytest.raises(mpgluon.TrainerStateError, match=r"inside autograd\.record"):
            trainer.step(len(labels))
    trainer.step(len(labels))
    assert not amp.step_was_skipped(trainer)


# --- The arguments of a cast -------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["net_dense0", None, 5, nn.Dense])
def test_what_is_not_a_collection_of_what_to_keep_is_refused_with_how_to_write_it(keep):
    entry = "'net_dense0'" if isinstance(keep, str) else "block"
    for cast in (mpgluon.cast_block, amp.autocast):
        with pytest.raises(TypeError, match=rf"received .*; write keep_fp32=\[{entry}\]"):
            cast(make_net(), keep_fp32=keep)
    mpgluon.cast_block(make_net(), keep_fp32=["net_dense0"])


@pytest.mark.parametrize("function", [mpgluon.cast_block, amp.autocast, mpgluon.restore])
@pytest.mark.parametrize("net", [None, [], "resnet50_v2"])
def test_what_is_not_a_network_is_not_cast(function, net):
    with pytest.raises(TypeError, match=rf"net must be a gluon\.Block, .*{type(net).__name__}"):
        function(net)


@pytest.mark.parametrize("cast", [mpgluon.cast_block, amp.autocast])
def test_a_network_that_was_replaced_by_the_report_of_its_cast_is_asked_back(cast):
    net = cast(make_net())
    with pytest.raises(TypeError, match=r"not the network: .* without `net =`"):
        net(images_and_labels()[0])
    with pytest.raises(AttributeError, match=r"no 'hybridize': .* without `net =`"):
        net.hybridize()
    assert copy.deepcopy(net) == pickle.loads(pickle.dumps(net)) == net


def test_a_name_that_is_not_in_amp_is_looked_for_in_mpgluon():
    for name in ("cast_block", "prepare", "DynamicLossScale"):
        with pytest.raises(AttributeError, match=f"amp has no {name}; it is mpgluon.{name}"):
            getattr(amp, name)
