"""Figures show the data that they received."""

import math
from itertools import combinations

from mpgluon import diagnostics
from mpgluon_tools import plots
from mpgluon_tools.diagnostics.alignment import AlignmentReport
from mpgluon_tools.diagnostics.compare import Comparison
from mpgluon_tools.diagnostics.exponents import BatchExponents, ExponentHistogram
from mpgluon_tools.diagnostics.ranges import RangeReport
from mpgluon_tools.diagnostics.sums import Change, SumsReport

import mxnet as mx
import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from mxnet import gluon
from mxnet.gluon import nn
from PIL import Image

STEPS = [
    {"step": 1, "loss": 4.0, "loss_scale": 65536.0, "skipped": True, "gradient_norm": math.inf},
    {"step": 2, "loss": 3.0, "loss_scale": 32768.0, "skipped": True, "gradient_norm": math.nan},
    {"step": 3, "loss": 2.5, "loss_scale": 16384.0, "skipped": False, "gradient_norm": 8.0},
    {"step": 4, "loss": 1.25, "loss_scale": 16384.0, "skipped": False, "gradient_norm": 2.0},
]
# Steps of 10 images that take 1, 3, 2 and 2 seconds.
SPEEDS = ((0, 10.0), (0, 10 / 3), (1, 5.0), (1, 5.0))
STEPS = [
    {**step, "epoch": epoch, "images": 10, "images_per_second": speed}
    for step, (epoch, speed) in zip(STEPS, SPEEDS)
]
EPOCHS = [
    {"step": 2, "train_loss": 3.5, "train_accuracy": 0.125, "test_accuracy": 0.25},
    {"step": 4, "train_loss": 1.875, "train_accuracy": 0.5, "test_accuracy": 0.75},
]


@pytest.fixture
def axes():
    return Figure(figsize=(10, 4), layout="constrained").subplots()


def points(line) -> list[tuple[float, float]]:
    return list(zip(*np.array(line.get_data(), dtype=float).tolist()))


def legend(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def draw_for_real(axes) -> None:
    FigureCanvasAgg(axes.figure).draw()


# --- formats ---------------------------------------------------------------------------------

# Linear RGB as it is seen without a kind of cone: Machado, Oliveira, Fernandes, "A
# physiologically-based model for simulation of color vision deficiency", 2009, severity 1.
SEEN = {
    "with three kinds of cones": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
         [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
         [-0.011820, 0.042940, 0.968881]]),
}  # fmt: skip
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750],
     [0.0193339, 0.1191920, 0.9503041]])  # fmt: skip


def lab(color: str, seen: np.ndarray) -> np.ndarray:
    """Return a colour of sRGB in CIE Lab, relative to its white."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(seen @ linear, 0, 1) / TO_XYZ.sum(axis=1)
    x, y, z = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_lightness_and_chroma_of_known_colours_are_right():
    np.testing.assert_allclose(lab("white", np.eye(3)), [100, 0, 0], atol=1e-9)
    # sRGB's red, by Lindbloom's calculator.
    np.testing.assert_allclose(lab("red", np.eye(3)), [53.2408, 80.0925, 67.2032], atol=1e-3)


@pytest.mark.parametrize("key", ["color", "marker", "linestyle"])
def test_formats_differ_in_colour_mark_and_line_style(key):
    assert len({look[key] for look in plots.FORMAT_LOOKS.values()}) == len(plots.FORMAT_LOOKS) == 5


@pytest.mark.parametrize("seen", SEEN.values(), ids=SEEN)
def test_colours_of_formats_stay_apart_for_the_colour_blind(seen):
    places = {name: lab(look["color"], seen) for name, look in plots.FORMAT_LOOKS.items()}
    for one, other in combinations(places, 2):
        assert np.linalg.norm(places[one] - places[other]) >= 10, (one, other)


# --- training --------------------------------------------------------------------------------


def test_the_losses_of_steps_and_epochs_are_drawn_from_0(axes):
    assert plots.draw_loss(axes, STEPS, EPOCHS) is axes
    each_step, mean = axes.get_lines()
    assert points(each_step) == [(1, 4.0), (2, 3.0), (3, 2.5), (4, 1.25)]
    assert points(mean) == [(2, 3.5), (4, 1.875)]
    assert legend(axes) == ["each step", "mean of epoch"]
    assert axes.get_ylabel() == "training loss"
    assert axes.get_yscale() == "linear"
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] > 4


def test_the_legend_says_when_the_average_of_the_weights_was_tested(axes):
    plots.draw_accuracy(axes, [{**event, "tested": "average"} for event in EPOCHS])
    assert legend(axes) == ["training", "test of\nthe average"]


def test_the_loss_scale_is_drawn_with_a_mark_and_a_count_of_skipped_steps(axes):
    assert plots.draw_loss_scale(axes, STEPS) is axes
    scale, skipped = axes.get_lines()
    assert points(scale) == [(1, 65536), (2, 32768), (3, 16384), (4, 16384)]
    assert points(skipped) == [(1, 65536), (2, 32768)]
    assert skipped.get_marker() == "x"
    assert skipped.get_linestyle() == "None"
    assert legend(axes) == ["loss scale", "skipped: 2 of 4"]
    assert axes.get_ylabel() == "loss scale S"
    assert axes.yaxis.get_transform().base == 2


def test_a_run_without_skipped_steps_or_norms_that_are_not_finite_has_no_marks(axes):
    plots.draw_loss_scale(axes, STEPS[2:])
    _, skipped = axes.get_lines()
    assert points(skipped) == []
    assert skipped.get_label() == "skipped: 0 of 2"
    axes.clear()
    plots.draw_gradient_norm(axes, STEPS[2:])
    assert len(axes.get_lines()) == 1
    assert legend(axes) == ["each step"]


def test_gradient_norms_are_drawn_in_powers_of_two_and_those_that_are_not_finite_above(axes):
    unknown = {**STEPS[3], "step": 5, "gradient_norm": None}
    assert plots.draw_gradient_norm(axes, [*STEPS, unknown]) is axes
    norm, endless = axes.get_lines()
    np.testing.assert_equal(norm.get_data(), [[1, 2, 3, 4], [math.nan, math.nan, 8, 2]])
    assert list(endless.get_xdata()) == [1, 2]
    assert legend(axes) == ["each step", "not finite: 2"]
    assert axes.get_ylabel() == "gradient norm"
    assert axes.yaxis.get_transform().base == 2
    draw_for_real(axes)
    (height, _) = endless.get_ydata()
    to_axes = axes.transAxes.inverted()
    highest = to_axes.transform(axes.transData.transform((3, 8)))[1]
    assert highest < height < 1


def without(steps, *names):
    return [{name: value for name, value in step.items() if name not in names} for step in steps]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (STEPS, ["loss scale S", "gradient norm", "images per second"]),
        (without(STEPS, "images_per_second"), ["loss scale S", "gradient norm"]),
        (without(STEPS, "gradient_norm"), ["loss scale S", "images per second"]),
        ([{**s, "gradient_norm": None} for s in STEPS], ["loss scale S", "images per second"]),
        (STEPS[:2], ["loss scale S", "images per second"]),  # no norm to be drawn
        ([{**s, "loss_scale": 1.0} for s in STEPS[2:]], ["gradient norm", "images per second"]),
    ],
    ids=["all", "of no known speed", "older", "no norms", "all skipped", "no loss scale"],
)
def test_each_recorded_quantity_has_a_panel_and_no_panel_is_empty(steps, expected):
    figure = Figure(layout="constrained")
    panels = plots.draw_training(figure, steps, EPOCHS)
    assert figure.axes == panels
    labels = [axes.get_ylabel() for axes in panels]
    assert labels == ["training loss", "accuracy", *expected]
    assert [axes.get_xlabel() for axes in panels] == [""] * (len(panels) - 1) + ["step"]
    assert len({axes.get_xlim() for axes in panels}) == 1


def test_the_curves_are_saved_as_a_picture_that_depends_on_the_data(tmp_path):
    pictures = []
    for name, steps in (("a", STEPS), ("b", STEPS), ("c", STEPS[1:])):
        path = tmp_path / f"{name}.png"
        plots.save_training_curves(path, steps, EPOCHS, title="resnet50_v2, float16, shapes")
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            assert picture.size[0] == 1200
            pictures.append(np.array(picture.convert("RGB")))
    assert (pictures[0] == pictures[1]).all()
    assert (pictures[0] != pictures[2]).any()


def test_no_text_of_the_curves_overlaps_another():
    figure = Figure(figsize=(10, 10), layout="constrained")
    plots.draw_training(figure, STEPS, EPOCHS)
    assert_no_overlap(figure)


def assert_no_overlap(figure) -> None:
    FigureCanvasAgg(figure).draw()
    texts = []
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = zip(axis.get_ticklocs(), axis.get_ticklabels())
            texts += [axis.label, *(label for place, label in ticks if low <= place <= high)]
        texts += axes.texts
        if axes.get_legend() is not None:
            texts += axes.get_legend().get_texts()
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    assert len(boxes) > 5
    for number, (text, box) in enumerate(boxes):
        assert [other for other, b in boxes[number + 1 :] if box.overlaps(b)] == [], text


# --- exponents -------------------------------------------------------------------------------

# 100 values: 10 below 2**-24, 20 subnormal in float16, 65 normal, 5 too large; and 25 zeros.
EXPONENTS = np.array([-26, -25, -24, -15, -14, 15, 16])
COUNTS = np.array([4, 6, 15, 5, 60, 5, 5])
GRADIENTS = (np.arange(-30, 21), np.zeros(51, dtype=int), 25)
GRADIENTS[1][EXPONENTS + 30] = COUNTS
SHARES = "10 % lost, 20 % subnormal, 5 % too large, zeros: 20 %"


def steps_of(patch) -> dict[int, float]:
    """Return where a histogram is not zero: exponent and height."""
    values, edges, _ = patch.get_data()
    assert (np.diff(edges) == 1).all()
    return {int(edge): value for edge, value in zip(edges, values) if value}


def stairs_of(axes) -> list:
    return [patch for patch in axes.patches if type(patch).__name__ == "StepPatch"]


def test_a_histogram_of_exponents_is_drawn_in_percent_over_float16s_ranges(axes):
    assert plots.draw_exponents(axes, {"gradients": GRADIENTS}) is axes
    (stairs,) = stairs_of(axes)
    assert steps_of(stairs) == pytest.approx(dict(zip(EXPONENTS.tolist(), COUNTS.tolist())))
    assert legend(axes) == [f"gradients: {SHARES}"]
    low, high = axes.get_xlim()
    assert low <= -26
    assert high >= 17
    ranges = {
        text.get_text(): (span.get_x(), span.get_x() + span.get_width())
        for text, span in zip(axes.texts, [p for p in axes.patches if p not in stairs_of(axes)])
    }
    assert ranges == {
        "lost": (low, -24),
        "subnormal": (-24, -14),
        "normal in FP16": (-14, 16),
        "too large": (16, high),
    }
    hatches = [p.get_hatch() for p in axes.patches if p not in stairs_of(axes)]
    assert hatches[0] == hatches[3] != hatches[1] != hatches[2] != hatches[0]
    assert [line.get_xdata()[0] for line in axes.get_lines()] == [-24, -14, 16]
    assert axes.get_xlabel() == "magnitude of a value"
    assert axes.get_ylabel() == "share of non-zero values (%)"
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] > 60
    shown = {tick: text.get_text() for tick, text in zip(axes.get_xticks(), axes.get_xticklabels())}
    assert {-24, -14, 0, 16} < shown.keys()
    assert all(label == f"$2^{{{tick:.0f}}}$" for tick, label in shown.items())


def test_only_no_value_at_all_is_shown_as_0_percent(axes):
    many = 10**9
    plots.draw_exponents(axes, {"a": ([-25, -24, 0], [1, many // 2000, many], 1)})
    expected = "a: < 0.01 % lost, 0.05 % subnormal, 0 % too large, zeros: < 0.01 %"
    assert legend(axes) == [expected]


@pytest.mark.parametrize("loss_scale", [0.0, -2.0, 3.0, math.inf, math.nan])
def test_a_loss_scale_that_would_not_only_move_exponents_is_refused(axes, loss_scale):
    with pytest.raises(ValueError, match="loss_scale must be a power of two, received"):
        plots.draw_exponents(axes, {"a": GRADIENTS}, loss_scale=loss_scale)


def test_no_histogram_is_refused(axes):
    with pytest.raises(ValueError, match="there is no histogram to draw"):
        plots.draw_exponents(axes, {})


def test_a_heatmap_has_a_row_for_each_layer_the_first_at_the_top(axes):
    layers = ["conv0", "conv1", "dense0"]
    rows = [GRADIENTS, ([0, 1], [0, 0], 3), ([-40, -39], [7, 1], 0)]
    assert plots.draw_exponent_heatmap(axes, layers, rows) is axes
    (mesh,) = axes.collections
    table = mesh.get_array().filled(0).reshape(3, -1)
    low = round(axes.get_xlim()[0])
    assert low <= -40
    expected = np.zeros_like(table)
    expected[0, EXPONENTS - low] = COUNTS
    expected[2, [-40 - low, -39 - low]] = [7, 1]
    np.testing.assert_array_equal(table, expected)
    assert [label.get_text() for label in axes.get_yticklabels()] == layers
    top, bottom = axes.get_ylim()[::-1]
    assert (top, bottom) == (0, 3)  # the vertical axis points down
    assert {line.get_xdata()[0] for line in axes.get_lines()} == {-24, -14, 16}
    bar = axes.figure.axes[1]
    assert bar.get_ylabel() == "number of values"
    assert bar.get_yscale() == "log"
    assert_no_overlap(axes.figure)


@pytest.mark.parametrize(("layers", "rows"), [([], []), (["a"], []), (["a"], [GRADIENTS] * 2)])
def test_a_heatmap_needs_one_histogram_for_each_layer(axes, layers, rows):
    message = f"received {len(layers)} layers and {len(rows)} histograms"
    with pytest.raises(ValueError, match=message):
        plots.draw_exponent_heatmap(axes, layers, rows)


# --- results of diagnostics ------------------------------------------------------------------


@pytest.fixture(scope="module")
def results():
    """Return a result of each kind that can be drawn."""
    mx.random.seed(0)
    net = nn.HybridSequential()
    net.add(*(nn.Conv2D(4, 3, in_channels=3), nn.BatchNorm(in_channels=4)))
    net.add(*(nn.Activation("relu"), nn.Dense(10, in_units=144)))
    net.initialize(mx.init.Xavier())
    images, labels = mx.nd.random.normal(shape=(4, 3, 8, 8)), mx.nd.arange(4)
    batch = diagnostics.Batch(images, labels, gluon.loss.SoftmaxCrossEntropyLoss())
    found = [
        diagnostics.range_report(net, batch, loss_scale=2.0**22),
        diagnostics.compare_with_fp32(net, batch),
        diagnostics.alignment_report(net, images.shape),
        diagnostics.batch_exponents(net, batch),
        diagnostics.exponent_histogram([images]),
    ]
    return {type(one): one for one in found}


DRAWN = [RangeReport, Comparison, AlignmentReport, BatchExponents, ExponentHistogram]


@pytest.mark.parametrize("kind", DRAWN, ids=lambda kind: kind.__name__)
def test_a_result_draws_itself_and_is_a_table_in_a_notebook(results, axes, kind):
    result = results[kind]
    assert result.plot(axes) is axes
    draw_for_real(axes)
    assert axes.lines or axes.patches
    assert axes.get_xlabel()
    assert "<table>" in result._repr_html_()
    drawn = result.plot()
    assert drawn is not axes
    assert [text.get_text() for text in drawn.get_yticklabels()] == [
        text.get_text() for text in axes.get_yticklabels()
    ]
    pyplot.close(drawn.figure)


def test_the_rows_of_a_drawing_are_those_of_the_result(results, axes):
    comparison = results[Comparison]
    comparison.plot(axes)
    (introduced, of_result) = axes.lines[:2]
    layers = comparison.layers
    assert sorted(introduced.get_xdata()) == sorted(one.introduced for one in layers)
    assert list(of_result.get_xdata()) == [one.output for one in layers if one.output > 0]
    assert [text.get_text() for text in axes.get_yticklabels()] == [x.block.name for x in layers]


def test_sums_are_drawn_with_what_is_not_finite_at_the_edge(results, axes):
    block, other = (layer.block for layer in results[Comparison].layers[:2])
    own = {block: Change(0.5, 0.25, 0.125), other: Change(0.5, 0.0, 0.0)}
    changes = {"volta": {block: Change(0.25, 0.25, 0.25), other: Change(0.0, 1.0, 0.0)}}
    SumsReport(None, "float16", own, changes).plot(axes)
    assert points(axes.lines[0]) == [(2.0, 0.0)]
    assert legend(axes) == ["volta", "not finite"]


def test_four_histograms_have_four_colours_and_a_legend_that_fits_plain_axes(results):
    figure, axes = pyplot.subplots()
    plots.draw_exponents(axes, results[BatchExponents].overall())
    assert len({patch.get_edgecolor() for patch in axes.patches[:4]}) == 4
    FigureCanvasAgg(figure).draw()
    box = axes.get_legend().get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert 0 <= box.y0 < box.y1 <= figure.bbox.height
    pyplot.close(figure)


def test_a_loss_that_is_not_finite_is_a_gap_with_a_mark(axes):
    steps = [{"step": n, "loss": loss} for n, loss in enumerate([2.0, math.nan, 1.0, math.inf])]
    plots.draw_loss(axes, steps, [{"step": 3, "train_loss": 1.5}])
    assert "not finite: 2" in legend(axes)
    assert [x for x, _ in points(axes.lines[-1])] == [1, 3]


def test_the_missing_fields_of_an_event_are_named(axes):
    with pytest.raises(ValueError, match=r"each event needs 'loss' and 'step'; .* without 'loss'"):
        plots.draw_loss(axes, [{"step": 1}], [])
