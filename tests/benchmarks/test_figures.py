"""Figures show what was measured."""

from __future__ import annotations

from mpgluon.tools.plots import FORMAT_LOOKS

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from PIL import Image

from benchmarks import figures
from benchmarks.figures import (
    draw_growth,
    draw_memory,
    draw_networks,
    draw_ratios,
    save_figure,
)
from benchmarks.race import CaseResult, Failure, Result


def result_of(name: str, *seconds: float, **facts) -> Result:
    return Result(name, list(seconds), 1100.0, 100.0, 0, facts)


TRAINING = CaseResult(
    "training",
    "a training step",
    {},
    "base",
    [
        result_of("base", 1.0, 1.0, 1.0),
        result_of("fast", 0.25, 0.5, 0.75),
        result_of("slow", 4.0, 8.0, 8.0),
    ],
    [Failure("bad", "died")],
)
GEMM = CaseResult("gemm", "a product", {}, "gone", [result_of("one", 0.002)], [Failure("gone", "")])


def sweep(kind: str, dtype: str, power: float) -> CaseResult:
    points = [
        Result(f"{kind} {n}", [float(n**power)], 100.0 + n, 100.0, 0, {"multiply_adds": n * 10**9})
        for n in (1, 2, 4)
    ]
    return CaseResult(
        "scale", "", {"sweep": kind, "fixed": "something", "dtype": dtype}, "", points
    )


SWEEPS = [
    sweep("depth", "float32", 1.0),
    sweep("batch size", "float32", 0.5),
    sweep("depth", "float16", 1.5),
]


def zoo_case(model: str, cast: float, autocast: float, size: int = 224) -> CaseResult:
    """Return the case of a network that takes 2 s in float32."""
    return CaseResult(
        "zoo",
        "",
        {"model": model, "batch_size": 8, "image_size": size},
        "Gluon float32",
        [
            result_of("Gluon float32", 2.0, 2.0, 2.0),
            result_of("mpgluon float16", 2 * cast, 2 * cast, 2.2 * cast),
            result_of("mpgluon autocast float16", *[2 * autocast] * 3),
        ],
    )


ZOO = [
    zoo_case("slow", 1.6, 1.0),
    zoo_case("fast", 0.9, 1.25, size=32),
    zoo_case("middle", 1.2, 1.1),
]


def memory_case(batch: int, **peaks: float) -> CaseResult:
    results = [Result(f"mpgluon {name}", [1.0], mib, 100.0, 0) for name, mib in peaks.items()]
    settings = {"model": "some", "batch_size": batch, "image_size": 32, "memory_limit_mib": 800.0}
    return CaseResult("memory", "", settings, "", results)


MEMORY = [
    memory_case(8, float32=500.0, float16=400.0),
    memory_case(16, float32=900.0, float16=700.0),
    memory_case(17, float16=801.0),
    memory_case(10, float32=600.0),
]


@pytest.fixture
def figure():
    return Figure(figsize=(10, 6), layout="constrained")


def color(dtype: str) -> str:
    return FORMAT_LOOKS[dtype]["color"]


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_bars_go_from_1_to_the_ratio_and_whiskers_to_its_quartiles(figure):
    panels = draw_ratios(figure, [TRAINING, GEMM])
    FigureCanvasAgg(figure).draw()
    axes = panels[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["base", "fast", "slow", "bad"]
    ends = [sorted((bar.get_x(), bar.get_x() + bar.get_width())) for bar in axes.patches]
    assert ends == [[1, 1], [0.5, 1], [1, 8]]
    whiskers = [container.lines[2][0].get_segments()[0] for container in axes.containers[2::3]]
    assert [[x for x, _ in segment] for segment in whiskers] == [[1, 1], [0.375, 0.625], [6, 8]]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # in reading order
    assert axes.get_xscale() == "log"
    assert axes.get_title("left") == "a training step"


def test_ratio_and_time_stand_beside_each_bar_and_what_failed_is_named(figure):
    first, second = draw_ratios(figure, [TRAINING, GEMM])
    expected = ["1.00", "1.00 s", "0.50", "0.500 s", "8.00", "8.00 s", "no result"]
    assert [text for text in texts(first) if text not in ("ratio", "time")] == expected
    assert {"ratio", "time"} <= set(texts(first))
    assert texts(second) == ["2.00 ms", "no result"]  # without its baseline there is no ratio
    assert not second.patches


def test_the_axis_holds_everything_and_says_what_it_is(figure):
    (axes,) = draw_ratios(figure, [TRAINING])
    low, high = axes.get_xlim()
    assert low < 0.375
    assert high > 8
    labels = [tick.get_text() for tick in axes.get_xticklabels()]
    assert labels == ["1/4", "1/2", "1", "2", "4", "8"]
    assert "relative to the first of each group (left is faster)" in axes.get_xlabel()


def test_each_sweep_has_a_column_with_its_points_its_fits_and_proportion(figure):
    panels = draw_growth(figure, SWEEPS)
    FigureCanvasAgg(figure).draw()
    assert len(panels) == 4  # time, then memory, of depth and of batch size
    depth, batch, memory, _ = panels
    assert depth.get_title() == "depth: something"
    assert batch.get_title() == "batch size: something"
    assert "seconds" in depth.get_ylabel()
    assert "MiB" in memory.get_ylabel()
    assert "multiply-adds" in memory.get_xlabel()
    assert {panel.get_xscale() for panel in panels} == {panel.get_yscale() for panel in panels}
    labels = [text.get_text() for text in depth.get_legend().get_texts()]
    assert labels == [
        "float32: to the power 1.00",
        "float16: to the power 1.50",
        "as the arithmetic",
    ]
    points, fit = depth.lines[0], depth.lines[1]
    np.testing.assert_allclose(points.get_data(), [[1, 2, 4], [1, 2, 4]])
    np.testing.assert_allclose(fit.get_data(), [[1, 4], [1, 4]])
    np.testing.assert_allclose(memory.lines[0].get_data(), [[1, 2, 4], [1, 2, 4]])
    amounts, costs = depth.lines[-1].get_data()
    assert costs[1] / costs[0] == pytest.approx(amounts[1] / amounts[0])


def test_formats_differ_in_marks_and_line_styles(figure):
    depth, *_ = draw_growth(figure, SWEEPS)
    looks = [(line.get_marker(), line.get_linestyle()) for line in depth.lines if line.get_label()]
    legend = [look for look in looks if look[0] != "None" and look[1] != "None"]
    assert len({marker for marker, _ in legend}) == len({style for _, style in legend}) == 2


def test_lines_and_bars_have_the_colours_of_their_formats(figure):
    depth, *_ = draw_growth(figure, SWEEPS)
    assert [line.get_color() for line in depth.lines[:-1:3]] == [color("float32"), color("float16")]
    names = {
        "Gluon float32": color("float32"),
        "mpgluon float16": color("float16"),
        "mpgluon autocast float16": color("mixed_float16"),
        "mpgluon bfloat16, emulated": color("bfloat16"),
        "ImageLoader, 2 workers": "0.5",
    }
    results = [result_of(name, 1.0 + place % 2) for place, name in enumerate(names)]
    case = CaseResult("training", "", {}, "Gluon float32", results)
    (axes,) = draw_ratios(Figure(), [case])
    assert [bar.get_edgecolor() for bar in axes.patches] == [to_rgba(one) for one in names.values()]
    assert [bar.get_hatch() for bar in axes.patches] == ["///"] * 5
    assert axes.patches[1].get_facecolor() == to_rgba("white")


def test_networks_are_sorted_and_have_a_dot_for_each_ratio_with_its_quartiles(figure):
    axes = draw_networks(figure, ZOO)
    FigureCanvasAgg(figure).draw()
    labels = [tick.get_text() for tick in axes.get_yticklabels()]
    assert labels == ["fast, batch 8, 32 px", "middle", "slow", "geometric mean"]
    assert axes.get_title("left").startswith("training step, batch 8, 224 px")
    cast, autocast = (container.lines for container in axes.containers)
    mean = (0.9 * 1.2 * 1.6) ** (1 / 3)
    np.testing.assert_allclose(cast[0].get_xdata(), [0.9, 1.2, 1.6, mean])
    np.testing.assert_allclose(autocast[0].get_xdata()[:3], [1.25, 1.1, 1.0])
    whiskers = [[x for x, _ in segment] for segment in cast[2][0].get_segments()]
    np.testing.assert_allclose(whiskers[1:], [[1.2, 1.26], [1.6, 1.68], [mean, mean]])
    places = np.stack([cast[0].get_ydata(), autocast[0].get_ydata()])
    np.testing.assert_allclose(places.mean(axis=0)[:3], [0, 1, 2])  # beside each other
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # in reading order
    for lines, dtype in ((cast, "float16"), (autocast, "mixed_float16")):
        look = (lines[0].get_color(), lines[0].get_marker())
        assert look == (color(dtype), FORMAT_LOOKS[dtype]["marker"])


def test_the_numbers_of_a_network_stand_beside_it_and_lines_at_1_and_at_the_target(figure):
    axes = draw_networks(figure, ZOO)
    rows = {"0.90", "1.25", "2.00 s"}, {"1.20", "1.10", "2.00 s"}, {"1.60", "1.00", "2.00 s"}
    for row, expected in enumerate(rows):
        assert {t.get_text() for t in axes.texts if t.get_position()[1] == row} == expected
    at = [line.get_xdata()[0] for line in axes.lines if set(line.get_ydata()) == {0, 1}]
    assert at == [1, 1.35]


def test_networks_without_a_ratio_are_named_without_dots(figure):
    failed = CaseResult(
        "zoo", "", ZOO[0].settings, "Gluon float32", [], [Failure("Gluon float32", "died")]
    )
    axes = draw_networks(figure, [failed, ZOO[1]])
    assert [line.get_xdata().tolist() for line in axes.containers[0].lines[:1]] == [[0.9, 0.9]]
    assert "no result" in texts(axes)


def test_peaks_are_lines_over_the_batch_size_with_the_limit_and_what_fits_within_it(figure):
    axes = draw_memory(figure, MEMORY)
    FigureCanvasAgg(figure).draw()
    first, second, limit = axes.lines
    np.testing.assert_array_equal(first.get_data(), [[8, 10, 16], [500, 600, 900]])
    np.testing.assert_array_equal(second.get_data(), [[8, 16, 17], [400, 700, 801]])
    assert list(limit.get_ydata()) == [800, 800]
    assert texts(axes) == ["limit: 800 MiB"]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["mpgluon float32", "mpgluon float16: 16 images within the limit"]
    for line, dtype in ((first, "float32"), (second, "float16")):
        look = FORMAT_LOOKS[dtype]
        assert (line.get_color(), line.get_marker()) == (look["color"], look["marker"])
    assert axes.get_xlim()[0] == axes.get_ylim()[0] == 0
    assert axes.get_title("left") == "training step of some, 32 px"


def test_without_a_limit_there_is_no_line_of_it(figure):
    free = [
        CaseResult("memory", "", {**case.settings, "memory_limit_mib": None}, "", case.results)
        for case in MEMORY
    ]
    axes = draw_memory(figure, free)
    assert len(axes.lines) == 2
    assert texts(axes) == []


def test_a_sweep_of_one_point_is_drawn_without_a_fit(figure):
    alone = sweep("depth", "float32", 1.0)
    time, _ = draw_growth(figure, [CaseResult("", "", alone.settings, "", alone.results[:1])])
    FigureCanvasAgg(figure).draw()
    assert time.get_legend().get_texts()[0].get_text() == "float32"


@pytest.mark.parametrize(
    ("cases", "width"), [([TRAINING, GEMM], 1200), (SWEEPS, 1440), (ZOO, 1200), (MEMORY, 1200)]
)
def test_files_are_pngs_with_something_on_them(cases, width, tmp_path):
    save_figure(tmp_path / "figure.png", cases, title="Some CPU")
    with Image.open(tmp_path / "figure.png") as image:
        assert image.format == "PNG"
        assert image.width == pytest.approx(width, rel=0.1)
        pixels = np.asarray(image.convert("L"))
    assert 0.005 < (pixels < 128).mean() < 0.5  # ink
    rim = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    assert rim.min() == 255  # nothing is cut off


def test_names_that_would_touch_are_joined():
    places, labels = figures._joined([14.5, 29.3, 30.9, 60.6], ["18", "34", "50", "101"])
    assert labels == ["18", "34, 50", "101"]
    assert places == [14.5, pytest.approx((29.3 * 30.9) ** 0.5), 60.6]
