"""Diagnostics find the same in an imported graph as in the network that it was exported from."""

from __future__ import annotations

import re

import mpgluon
from mpgluon.diagnostics import (
    OverflowLocator,
    batch_exponents,
    compare_with_fp32,
    operator_formats,
    range_report,
    suggest_keep_fp32,
)
from mpgluon_tools.report import diagnose

import mxnet as mx
import pytest
from diagnostics_helpers import Batch, make_batch, make_net, scaled_trainer, train_step
from helpers import assert_same_bits, in_sequence, initialized, parameters_of
from mxnet import gluon
from mxnet.gluon import nn, rnn


@pytest.fixture
def imported(tmp_path):
    """Return a function that gives a network and its imported graph."""

    def pair(net=None, batch=None):
        net, batch = net or make_net(nn.Activation("relu"), nn.Dropout(0.5)), batch or make_batch()
        net.hybridize()
        net(batch.inputs)
        prefix = str(tmp_path / "net")
        net.export(prefix)
        data = mx.sym.var("data", dtype="float32")
        graph = gluon.SymbolBlock(mx.sym.load(f"{prefix}-symbol.json"), data)
        graph.collect_params().load(f"{prefix}-0000.params")
        return net, graph

    return pair


def test_an_imported_graph_has_the_error_and_the_operators_of_its_network(imported):
    net, graph = imported()
    batch = make_batch()
    assert compare_with_fp32(graph, batch).result == compare_with_fp32(net, batch).result > 0
    for one in (net, graph):
        mpgluon.cast_block(one)
    kept = net(batch.inputs).asnumpy()
    assert compare_with_fp32(graph, batch).result == compare_with_fp32(net, batch).result > 0
    counted = operator_formats(graph, batch)
    for operator in ("Convolution", "BatchNorm", "FullyConnected"):
        assert counted.calls(operator) == operator_formats(net, batch).calls(operator) != {}
    assert_same_bits(graph(batch.inputs).asnumpy(), kept)


def test_the_first_states_of_an_imported_recurrent_layer_have_the_size_of_the_batch(imported):
    words = Batch(mx.nd.random.normal(shape=(4, 5, 8)), mx.nd.zeros((4, 5)), make_batch().loss_fn)
    layers = rnn.GRU(6, input_size=8, layout="NTC"), nn.Dense(5, in_units=6, flatten=False)
    net, graph = imported(initialized(in_sequence(*layers)), words)
    for one in (net, graph):
        mpgluon.cast_block(one)
    assert compare_with_fp32(graph, words).result == compare_with_fp32(net, words).result > 0
    counted, expected = operator_formats(graph, words), operator_formats(net, words)
    assert counted.calls("RNN") == expected.calls("RNN") != {}


def test_an_imported_graph_that_is_kept_in_fp32_is_seen_as_a_whole(imported):
    _, graph = imported()
    net = in_sequence(graph, initialized(nn.Dense(5, in_units=5)))
    mpgluon.cast_block(net, keep_fp32=[graph])
    outputs = [row for row in range_report(net, make_batch()).table().rows if row[1] == "output"]
    assert [row[0] for row in outputs] == [graph.name, net[1].name]


def test_weights_beyond_float16_are_not_called_safe(imported):
    first = make_net()
    first[0].weight.set_data(mx.nd.full(first[0].weight.shape, 1e30))
    _, graph = imported(first)
    net = in_sequence(graph, initialized(nn.Dense(5, in_units=5)))
    found = suggest_keep_fp32(net, make_batch())
    assert graph in found.blocks
    assert found.error_after < 0.01 < found.error_before


def test_an_overflow_is_located_while_the_graph_trains_and_reports_are_made(imported):
    _, graph = imported()
    batch = make_batch()
    net = in_sequence(graph, initialized(nn.Dense(5, in_units=5)))
    mpgluon.cast_block(net)
    net.hybridize()
    trainer = scaled_trainer(net, 2.0**24)
    locator = OverflowLocator(net, trainer)
    train_step(net, trainer, batch)
    assert "not finite" in str(locator.report)
    outputs = [row for row in range_report(net, batch).table().rows if row[1] == "output"]
    assert [row[0] for row in outputs] == [graph.name, net[1].name]
    assert {p.name for p in graph.collect_params().values() if p.grad_req != "null"} < set(
        batch_exponents(net, batch).gradients
    )


def test_an_imported_graph_has_a_page(imported):
    _, graph = imported()
    text = str(diagnose(graph, make_batch(), title="imported"))
    assert re.search(r"^Convolution +2", text, re.MULTILINE)


def test_a_checkpoint_of_an_imported_graph_goes_on(imported, tmp_path):
    _, graph = imported()
    batch = make_batch()
    mpgluon.cast_block(graph)
    trainer = scaled_trainer(graph, 128)
    train_step(graph, trainer, batch)
    mpgluon.save_checkpoint(tmp_path / "run.npz", graph, trainer)
    train_step(graph, trainer, batch)
    expected = parameters_of(graph)
    mpgluon.load_checkpoint(tmp_path / "run.npz", graph, trainer)
    train_step(graph, trainer, batch)
    assert_same_bits(parameters_of(graph), expected)
