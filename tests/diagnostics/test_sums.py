"""The sums of several Tensor Cores change a network less than 16 bits do, and are reported."""

from __future__ import annotations

import math

import mpgluon
from mpgluon import amp
from mpgluon.cast.forward import forward_of
from mpgluon.formats.tensor_core import TensorCoreSums
from mpgluon_tools.diagnostics.compare import compare_with_fp32
from mpgluon_tools.diagnostics.sums import Change, SumsReport

import numpy as np
import pytest
from diagnostics_helpers import make_batch, make_net
from helpers import assert_same_bits, parameters_of
from mxnet import autograd

KINDS = ("volta", "ampere", "hopper")


@pytest.fixture(scope="module")
def summed(native_operators):  # noqa: ARG001
    """Return an FP32 network and a comparison of it."""
    net = make_net()
    before = parameters_of(net)
    comparison = compare_with_fp32(net, make_batch(), accumulation=KINDS)
    assert_same_bits(parameters_of(net), before)
    assert forward_of(net) is None
    return net, comparison


def test_each_tensor_core_changes_something_and_less_than_the_format_does(summed):
    net, comparison = summed
    report = comparison.sums
    assert list(report.changes) == list(KINDS)
    assert set(report.beside_fp32) == {net, *(layer.block for layer in comparison.layers)}
    for changes in report.changes.values():
        assert 0 < changes[net].gradient <= 1.5 * report.beside_fp32[net].gradient
        assert changes[net].output <= 1.5 * report.beside_fp32[net].output


def test_errors_against_fp32_do_not_depend_on_the_sums_compared(summed):
    net, comparison = summed
    alone = compare_with_fp32(net, make_batch())
    assert alone.sums.changes == {}
    assert "Tensor Core" not in str(alone)
    assert [vars(layer) for layer in alone.layers] == [vars(layer) for layer in comparison.layers]
    for layer in alone.layers:
        if layer.block is not net:
            expected = (layer.output, layer.output_gradient, layer.gradient)
            assert comparison.sums.beside_fp32[layer.block] == expected


def test_changes_are_those_between_two_casts(summed):
    net, comparison = summed
    results = []
    for products in (None, TensorCoreSums("volta")):
        amp.autocast(net, mpgluon.Policy("float32", "float16", "float32", products))
        with autograd.train_mode():
            results.append(net(*make_batch().arguments).asnumpy().astype(np.float64))
        amp.restore(net)
    change = np.linalg.norm(results[1] - results[0]) / np.linalg.norm(results[0])
    output = comparison.sums.changes["volta"][net].output
    assert output == pytest.approx(change, rel=1e-6, abs=1e-12)


def test_the_table_and_a_sentence_for_each_kind_say_what_to_conclude(summed):
    net, comparison = summed
    table = comparison.sums.table(2)
    formats = ("float16", *KINDS)
    assert table.headings[2:] == [f"{w}: {f}" for w in ("output", "gradient") for f in formats]
    assert table.rows[0][0] == net.name
    assert len(table.rows) == 3
    for kind, line in zip(KINDS, str(comparison).splitlines()[-3:]):
        ratio, block, _ = comparison.sums.largest(kind)
        assert line.startswith(f"{kind} ")
        for part in (f"{ratio:.2g}", block.name, "no array more than other roundings to float16"):
            assert part in line


@pytest.mark.usefixtures("native_operators")
@pytest.mark.parametrize(
    ("dtype", "kind", "message"),
    [
        ("float16", "turing", "accumulation must be one of float32, volta"),
        ("bfloat16", "volta", "'volta' sums products of float16 numbers"),
    ],
)
def test_sums_that_there_are_not_are_refused_before_anything_is_compared(dtype, kind, message):
    net = make_net()
    with pytest.raises(ValueError, match=message):
        compare_with_fp32(net, make_batch(), dtype=dtype, accumulation=["hopper", kind])
    assert forward_of(net) is None


def test_what_exceeds_independent_roundings_matters_and_is_named():
    net = make_net()
    layer = net[0]
    own, changed = Change(0.01, 0.02, 0.001), Change(0.004, 0.0, 0.0)
    for gradient, words in ((0.0014, "changes no array more"), (0.0016, "matters: it changes")):
        change = changed._replace(gradient=gradient)
        report = SumsReport(
            net, "float16", {net: own, layer: own}, {"volta": {net: changed, layer: change}}
        )
        assert report.largest("volta") == (pytest.approx(gradient / 0.001), layer, "gradient")
        *_, said = str(report).splitlines()
        assert said.startswith(f"volta {words}")
        assert said.endswith(
            f"{gradient / 0.001:.2g} times its error, the gradient of {layer.name}"
        )


def test_an_array_that_the_format_leaves_as_it_is_and_a_sum_changes_matters_most():
    net = make_net()
    own, changed = Change(0.0, 0.02, 0.001), Change(2.0**-30, 0.0, 0.0)
    report = SumsReport(net, "float16", {net: own}, {"volta": {net: changed}})
    assert report.largest("volta") == (math.inf, net, "output")
    assert "volta matters: it changes" in str(report)
