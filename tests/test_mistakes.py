"""Mistakes with the first snippets: each works, or is refused with what was received and a cure."""

from __future__ import annotations

import mpgluon
from mpgluon import amp, diagnostics

import mxnet as mx
import pytest
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
        net.add(
            nn.Dense(4, in_units=3 if shapes else 0, activation="relu"),
            nn.Dense(2, in_units=4 if shapes else 0),
        )
    if initialized:
        net.initialize(mx.init.Xavier())
    return net


def images_and_labels():
    return mx.nd.random.normal(shape=(8, 3)), mx.nd.arange(8) % 2


def a_batch():
    return diagnostics.Batch(*images_and_labels(), LOSS)


def trainer_of(net):
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"multi_precision": True})
    amp.init_trainer(trainer)
    return trainer


def step(net, trainer):
    images, labels = images_and_labels()
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
        return x * 1e6


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


# --- What the network receives ----------------------------------------------------------------


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
