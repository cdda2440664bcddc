"""Alignment: sizes and multiply-adds against counts by hand, and a network left as it was."""

from __future__ import annotations

import mpgluon
from mpgluon import amp
from mpgluon_tools.diagnostics.alignment import alignment_report

import mxnet as mx
import pytest
from helpers import in_sequence
from mxnet.gluon import nn, rnn
from mxnet.gluon.model_zoo import vision


class Calls(nn.HybridBlock):
    """Calls one function of F and its inputs."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def hybrid_forward(self, F, x, *args):
        return self.function(F, x, *args)


def sizes(report):
    return [(p.batch, p.inputs, p.outputs, p.repeats) for p in report.products]


def small_network(**kwargs):
    return in_sequence(
        nn.Conv2D(16, 3, **kwargs), nn.BatchNorm(), nn.Activation("relu"), nn.Dense(101)
    )


def test_the_products_of_a_small_network_are_those_counted_by_hand():
    report = alignment_report(small_network(), (32, 3, 10, 10))
    # 3 x 3 kernels without padding leave 8 x 8 positions of 10 x 10.
    assert sizes(report) == [(32, 3, 16, 8 * 8 * 9), (32, 16 * 8 * 8, 101, 1)]
    convolution, dense = 32 * 3 * 16 * 8 * 8 * 9, 32 * 1024 * 101
    assert [p.multiply_adds for p in report.products] == [convolution, dense]
    assert report.multiply_adds == convolution + dense
    assert [p.misaligned for p in report.products] == [("inputs",), ("outputs",)]
    assert report.misaligned_share == 1
    assert report.padding_cost == convolution * 8 // 3 - convolution + 32 * 1024 * 3
    first, last = report.products
    assert last.layer.startswith("dense")
    assert first.advice == "3 image channels: leave them to cuDNN, or pad to 4 in NHWC"
    assert last.advice == "classes 101 -> 104"
    batch = alignment_report(small_network(), (30, 3, 10, 10)).products[1]
    assert batch.advice == "batch 30 -> 32; classes 101 -> 104"
    without_products = alignment_report(nn.Activation("relu"), (2, 3))
    assert (without_products.products, without_products.misaligned_share) == ((), 0)


def resnet50_multiply_adds(*, stride_in_3x3: bool) -> int:
    """Count the convolutions of the 2015 paper's table 1, and its dense layer, at 224 pixels."""
    total = 112 * 112 * 64 * 3 * 7 * 7
    channels, side = 64, 56
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            before = side
            if block == 0 and stage > 0:
                side //= 2
            first_side = before if stride_in_3x3 else side
            total += first_side**2 * channels * width
            total += side**2 * 9 * width * width
            total += side**2 * width * 4 * width
            if block == 0:
                total += side**2 * channels * 4 * width
            channels = 4 * width
    return total + 2048 * 1000


@pytest.mark.parametrize(("name", "stride_in_3x3"), [("resnet50_v1", False), ("resnet50_v2", True)])
def test_resnet50_has_the_multiply_adds_of_its_layer_list(name, stride_in_3x3):
    report = alignment_report(vision.get_model(name), (8, 3, 224, 224))
    assert report.multiply_adds == 8 * resnet50_multiply_adds(stride_in_3x3=stride_in_3x3)
    # "3.8e9" in the paper, without the dense layer and with the stride of v1.
    assert round(resnet50_multiply_adds(stride_in_3x3=False) / 1e9, 1) == 3.9
    assert [p.role for p in report.misaligned] == ["first convolution"]


def test_depthwise_convolutions_count_one_channel_per_group_and_are_not_padded():
    # Howard et al., "MobileNets", 2017, table 4: 569 million multiply-adds at 224 pixels.
    report = alignment_report(vision.mobilenet1_0(), (8, 3, 224, 224))
    assert round(report.multiply_adds / 8 / 1e6) == 569
    depthwise = [p for p in report.products if p.role == "depthwise"]
    assert len(depthwise) == 13
    first = depthwise[0]
    assert (first.batch, first.inputs, first.outputs, first.repeats) == (8, 1, 1, 112**2 * 9 * 32)
    assert first.advice == "one channel per group: no Tensor Core's work, leave it"
    stem = report.products[0]
    assert report.padding_cost == stem.multiply_adds * 5 // 3  # of its three channels, eight


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (nn.Conv2D(24, 3, groups=2, padding=1), (8, 20, 5, 7), (8, 10, 12, 5 * 7 * 9 * 2)),
        (nn.Conv2D(24, 3, layout="NHWC"), (8, 5, 7, 20), (8, 20, 24, 3 * 5 * 9)),
        (nn.Conv1D(24, 3, strides=2), (8, 20, 9), (8, 20, 24, 4 * 3)),
        (nn.Conv3D(24, (1, 2, 3)), (8, 20, 4, 4, 4), (8, 20, 24, 4 * 3 * 2 * 6)),
        # Each of 5 x 7 inputs meets each of 9 kernel elements, whatever the strides.
        (nn.Conv2DTranspose(24, 3, strides=2), (8, 20, 5, 7), (8, 20, 24, 5 * 7 * 9)),
        (
            nn.Conv2DTranspose(24, 3, groups=4, in_channels=20),
            (8, 20, 5, 7),
            (8, 5, 6, 5 * 7 * 9 * 4),
        ),
        (nn.Dense(24), (8, 4, 5), (8, 20, 24, 1)),
        (nn.Dense(24, flatten=False), (8, 4, 5), (32, 5, 24, 1)),
    ],
)
def test_each_layer_has_the_sizes_counted_by_hand(layer, shape, expected):
    assert sizes(alignment_report(layer, shape)) == [expected]


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (lambda F, a, b: F.dot(a, b), [(6, 5), (5, 7)], (6, 5, 7, 1)),
        (lambda F, a, b: F.dot(a, b, transpose_a=True), [(5, 6), (5, 7)], (6, 5, 7, 1)),
        (lambda F, a, b: F.dot(a, b, transpose_b=True), [(2, 3, 5), (7, 5)], (6, 5, 7, 1)),
        (lambda F, a, b: F.batch_dot(a, b), [(4, 6, 5), (4, 5, 7)], (6, 5, 7, 4)),
        (lambda F, a, b: F.batch_dot(a, b, transpose_a=True, transpose_b=True),
            [(4, 5, 6), (4, 7, 5)], (6, 5, 7, 4)),
        (lambda F, a, b: F.linalg.gemm2(a, b, transpose_b=True), [(2, 3, 6, 5), (2, 3, 7, 5)],
            (6, 5, 7, 6)),
        (lambda F, a, b, c: F.linalg.gemm(a, b, c, axis=1),
            [(2, 6, 3, 5), (2, 5, 3, 7), (2, 6, 3, 7)], (6, 5, 7, 6)),
    ],
)  # fmt: skip
def test_each_matrix_product_has_the_sizes_counted_by_hand(function, shapes, expected):
    net = Calls(function)
    assert sizes(alignment_report(net, shapes)) == [expected]
    result = net(*(mx.nd.ones(shape) for shape in shapes))  # the shapes do fit
    assert result.size == expected[0] * expected[2] * expected[3]


def test_a_recurrent_layer_has_a_product_for_each_of_its_matrices():
    projected = alignment_report(rnn.LSTM(16, projection_size=10), (5, 8, 12))
    assert sizes(projected) == [(8, 12, 64, 5), (8, 10, 64, 5), (8, 16, 10, 5)]
    layer = rnn.LSTM(20, num_layers=2, bidirectional=True)
    steps, batch, inputs, both, gates = 5, 8, 12, 2, 4 * 20
    expected = [(batch, size, gates, steps * both) for size in (inputs, 20, 2 * 20, 20)]
    report = alignment_report(layer, (steps, batch, inputs))
    assert sizes(report) == expected
    assert report.products[1].kind == "RNN layer 0, state"
    for one in (layer, rnn.GRU(20), rnn.RNN(20)):
        # A weight meets every sequence at every step.
        one.initialize()
        one(mx.nd.ones((steps, batch, inputs)))
        weights = [p for name, p in one.collect_params().items() if name.endswith("weight")]
        report = alignment_report(one, (steps, batch, inputs))
        assert report.multiply_adds == steps * batch * sum(p.data().size for p in weights)


@pytest.mark.parametrize(
    "cast",
    [
        mpgluon.cast_block,
        amp.autocast,
        lambda net: amp.autocast(net, "bfloat16"),
        lambda net: net.hybridize(),
    ],
)
@pytest.mark.parametrize("initialized", [True, False])
def test_a_cast_or_hybridized_network_has_the_same_report(cast, initialized):
    net = small_network()
    if initialized:
        net.initialize()
        net(mx.nd.ones((1, 3, 10, 10)))
    plain = alignment_report(net, (32, 3, 10, 10))
    cast(net)
    assert alignment_report(net, (32, 3, 10, 10)) == plain


def test_the_table_shows_what_is_misaligned_or_everything():
    net = in_sequence(nn.Dense(16), nn.Dense(101))
    report = alignment_report(net, (8, 32))
    assert (len(report.table().rows), len(report.table(everything=True).rows)) == (1, 2)
    share = 8 * 16 * 101 / (8 * 16 * (32 + 101))
    assert report.misaligned_share == pytest.approx(share)
    assert "1 of 2 products have a size that is" in str(report)
    assert f"they carry {share:.2%}" in str(report)
    assert "classes 101 -> 104" in str(report)
    aligned = alignment_report(nn.Dense(16), (8, 32))
    assert str(aligned).startswith("0 of 1 products")
    assert "padding" not in str(aligned)


def test_products_that_are_not_understood_are_named():
    def loop(F, x):
        return F.contrib.foreach(lambda row, state: (F.dot(row, row), state), x, [])[0]

    report = alignment_report(Calls(loop), (3, 4, 4))
    assert len(report.unseen) == 1
    assert report.unseen[0].endswith("(_foreach)")
    assert "not examined: " in str(report)
    correlation = Calls(lambda F, a, b: F.Correlation(a, b))
    assert alignment_report(correlation, [(1, 3, 8, 8)] * 2).unseen[0].endswith("(Correlation)")


@pytest.mark.parametrize("shape", [(), (8, 0), (8, 2.5), 8, "8", [(8, 3), ()]])
def test_another_value_than_a_shape_is_refused(shape):
    with pytest.raises(ValueError, match="input_shape is a tuple of positive integers"):
        alignment_report(nn.Dense(4), shape)


@pytest.mark.parametrize(
    ("net", "options", "error", "message"),
    [
        (nn.Dense(4, in_units=3), {}, ValueError, r"does not work on input of shape \(8, 5\)"),
        (nn.Dense(4), {"multiple": 0}, ValueError, "multiple must be a positive integer"),
        (nn.Sequential(), {}, TypeError, r"received Sequential; use nn\.HybridSequential"),
        (nn.Lambda("relu"), {}, TypeError, "received Lambda"),
    ],
)
def test_networks_and_multiples_that_do_not_fit_are_refused(net, options, error, message):
    with pytest.raises(error, match=message):
        alignment_report(net, (8, 5), **options)
