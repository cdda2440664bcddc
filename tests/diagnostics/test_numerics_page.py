"""The page of a recording: its data, and in a browser each of its controls, for every reader."""

from __future__ import annotations

import json
import math
import re
import time

import mpgluon
from mpgluon import amp
from mpgluon.errors import DataError
from mpgluon.kernels.statistics import Statistics, statistics_in_numpy
from mpgluon_tools.recorder.numerics import page as numerics_page
from mpgluon_tools.recorder.numerics.files import (
    NumericsStep,
    Recording,
    StepLines,
    Tensor,
    TensorName,
    read_numerics,
    write_numerics,
)
from mpgluon_tools.recorder.numerics.page import QUANTITIES, columns_of, histories_of, write_page
from mpgluon_tools.recorder.numerics.recorder import NumericsRecorder

import mxnet as mx
import numpy as np
import pytest
from browser import EXECUTABLE, Browser
from helpers import in_sequence
from mxnet import autograd, gluon
from mxnet.gluon import nn

LABELS = [quantity.label for quantity in QUANTITIES]
HOSTILE = "</script><script>alert(1)</script>$\\frac{&\ud800\u6f22"
DARK, YELLOW, EMPTY = [68, 1, 84, 255], [253, 231, 37, 255], [238, 238, 238, 255]


def tensor(kind, name, values, fmt="float32", call=0):
    values = np.asarray(values, dtype=np.float32)
    statistics = Statistics(statistics_in_numpy(values))
    block = "Dense" if "activation" in kind else ""
    return Tensor(TensorName(kind, name, call), fmt, values.shape, statistics, block)


def recording_of(folder, steps, lines=()):
    """Write tensors by the numbers of their steps, and lines; a step without a line gets one."""
    known = {line["step"]: line for line in lines}
    for number in steps:
        known.setdefault(number, {"step": number, "loss": 1.0 / number, "loss_scale": 1.0})
    of_steps = StepLines(folder, 1)
    for number in sorted(known):
        of_steps.add(known[number])
    for number, tensors in steps.items():
        of_step = {one.id: one for one in tensors}
        write_numerics(folder, NumericsStep(number, known[number], of_step))
    return read_numerics(folder)


def rows_of(recording, cells=10**6):
    """Return the rows of each kind by name."""
    kinds = histories_of(recording, columns_of(recording, cells))
    return {kind: {one.last.id.name: one for one in rows} for kind, rows in kinds.items()}


def numbers_of(row, column=0):
    return dict(zip(LABELS, row.values[column].tolist()))


def decoded_shares(codes):
    return np.where(codes, 2.0 ** ((codes.astype(float) - 81) / 2), 0)


def decoded(codes):
    values = np.where(codes, 2.0 ** ((codes.astype(float) - 32641) / 204), 0)
    return np.where(codes == 65535, math.nan, values)


def data_of(path):
    text = path.read_text()
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*)</script>', text)[1]
    )


def test_steps_that_share_a_column_give_their_largest_numbers_and_all_their_exponents(tmp_path):
    values = {1: [1, 2], 2: [0.25, 0.25], 3: [64, 0], 5: [4, 0.5]}
    steps = {number: [tensor("activation", "a", one)] for number, one in values.items()}
    recording = recording_of(tmp_path, steps)
    assert columns_of(recording, cells=2) == [[1, 2], [3, 5]]
    row = rows_of(recording, cells=2)["activation"]["a"]
    assert row.values[:, 0].tolist() == [2, 64]
    assert row.values[:, LABELS.index("share of zeros")].tolist() == [0, 0.5]
    shares = decoded_shares(row.shares)
    assert {e - 127: shares[0, e] for e in np.flatnonzero(shares[0])} == {-2: 0.5, 0: 0.25, 1: 0.25}
    third = pytest.approx(1 / 3, rel=0.2)
    assert {e - 127: shares[1, e] for e in np.flatnonzero(shares[1])} == {
        -1: third,
        2: third,
        6: third,
    }


@pytest.mark.parametrize(
    ("steps", "tensors", "columns"), [(200, 10, 200), (1000, 10, 200), (1000, 1000, 125)]
)
def test_the_number_of_columns_is_limited(tmp_path, steps, tensors, columns):
    recording_of(tmp_path, {1: [tensor("activation", str(n), [1]) for n in range(tensors)]})
    found = columns_of(Recording(tmp_path, range(1, steps + 1)))
    assert len(found) == columns
    assert sorted(n for numbers in found for n in numbers) == list(range(1, steps + 1))


def test_shares_of_a_tensor(tmp_path):
    values = [0, 2.0**-20, 2.0**-15, 1, math.inf, math.nan, -math.inf, 3]
    steps = {1: [tensor("activation", "a", values, "float16"), tensor("weight", "w", [math.nan])]}
    rows = rows_of(recording_of(tmp_path, steps))
    numbers = numbers_of(rows["activation"]["a"])
    assert (numbers["share that underflows"], numbers["share not finite"]) == (2 / 4, 3 / 8)
    assert (numbers["share of zeros"], numbers["largest value"]) == (1 / 8, 3)
    assert math.isnan(numbers["update over weight"])
    assert math.isnan(numbers_of(rows["weight"]["w"])["largest value"])  # none is finite


def test_updates_are_compared_with_masters_and_gradients_unless_the_step_was_skipped(tmp_path):
    parameter = [
        tensor("weight", "w", [1, 1, 1, 1], "float16"),
        tensor("master", "w", [3, 4, 0, 0]),
        tensor("gradient", "w", [1, 1, 1, 0]),
        tensor("update", "w", [0.5, 0, 0, 0]),
        *(
            tensor("weight", "v", [2, 0]),
            tensor("update", "v", [0, 0.5]),
            tensor("update", "u", [1]),
        ),
    ]
    line = {"step": 2, "loss": 1.0, "loss_scale": 1.0, "skipped": True}
    updates = rows_of(recording_of(tmp_path, {1: parameter, 2: parameter}, [line]))["update"]
    numbers = numbers_of(updates["w"])
    assert numbers["update over weight"] == 0.1
    assert numbers["updates lost to rounding"] == pytest.approx(2 / 3)
    assert numbers_of(updates["v"])["update over weight"] == 0.25
    assert math.isnan(numbers_of(updates["v"])["updates lost to rounding"])  # without a gradient
    assert math.isnan(numbers_of(updates["u"])["update over weight"])
    assert np.isnan(updates["w"].values[1, -2:]).all()


def test_layers_formats_and_shapes_may_change_between_the_steps(tmp_path):
    first = [tensor("activation", "a", [1, 2]), tensor("activation", "b", [1])]
    second = [tensor("activation", "a", [1, 2, 3]), tensor("activation", "new", [1])]
    third = [tensor("activation", "a", [4], "float16")]
    recording = recording_of(tmp_path, {1: first, 2: second, 3: third})
    rows = histories_of(recording, columns_of(recording))["activation"]
    found = [
        (one.last.id.name, one.last.format, one.shapes, one.values[:, 0].tolist()) for one in rows
    ]
    nan = pytest.approx(math.nan, nan_ok=True)
    assert found == [
        ("a", "float32", ["(2,)", "(3,)"], [2, 3, nan]),
        ("b", "float32", ["(1,)"], [1, nan, nan]),
        ("new", "float32", ["(1,)"], [nan, 1, nan]),
        ("a", "float16", ["(1,)"], [nan, nan, 4]),
    ]
    write_page(recording, tmp_path / "page.html")
    (shown,) = data_of(tmp_path / "page.html")["maps"]
    assert shown["rows"][0]["shape"] == "(2,) or (3,)"


def test_codes_are_exact_for_zero_and_nan_and_close_for_all_else():
    values = np.concatenate([2.0 ** np.linspace(-158, 145, 10001), [0, 1, math.nan]])
    found = decoded(numerics_page._codes(values))
    assert np.nanmax(np.abs(found[:-3] / values[:-3] - 1)) < 0.002
    assert found[-3:-1].tolist() == [0, 1]
    assert math.isnan(found[-1])
    counts = np.array([0, 1, 2**40, 3])
    shares = decoded_shares(numerics_page._share_codes(counts))
    assert (shares[0], shares[1:]) == (0, pytest.approx(counts[1:] / counts.sum(), rel=0.2))


def test_columns_reach_half_way_to_the_recorded_steps_next_to_them():
    edges = numerics_page._edges([[1], [10, 20], [40]], (0.5, 100.5))
    assert edges == [(0.5, 5.5), (5.5, 30), (30, 50)]
    assert numerics_page._edges([[7]], (0.5, 9.5)) == [(6.5, 7.5)]
    assert numerics_page._edges([], (0.5, 9.5)) == []


def test_losses_keep_their_extremes_and_what_is_not_finite():
    lines = [{"step": n, "loss": float(n % 7), "loss_scale": None} for n in range(1, 20_001)]
    lines[5000]["loss"], lines[7000]["loss"], lines[9000]["loss"] = math.nan, 1000.0, math.inf
    points = numerics_page._points(lines, "loss")
    assert len(points) <= 3000
    assert {(5001, None), (7001, 1000.0), (9001, None)} <= set(points)
    assert points == sorted(points, key=lambda point: point[0])
    assert numerics_page._points(lines, "loss_scale") == []


def test_a_recording_without_steps_gives_a_page(tmp_path):
    for name, lines in (("bare", []), ("lines", [{"step": 1, "loss": 2.0, "loss_scale": 1.0}])):
        folder = tmp_path / name
        folder.mkdir()
        of_steps = StepLines(folder, 1)
        for line in lines:
            of_steps.add(line)
        write_page(Recording(folder, []), tmp_path / "page.html")
        assert "No step was recorded." in (tmp_path / "page.html").read_text()
        assert data_of(tmp_path / "page.html")["maps"] == []


def test_names_titles_and_warnings_are_text(tmp_path):
    recording = recording_of(tmp_path, {1: [tensor("activation", HOSTILE, [1e-40], "float16")]})
    path = tmp_path / "page.html"
    write_page(recording, path, title="<b>", warnings=["<i>1</i>"])
    text = path.read_text()
    assert "<title>&lt;b&gt;</title>" in text
    assert "<li>&lt;i&gt;1&lt;/i&gt;</li>" in text
    assert "<script>alert" not in text
    assert data_of(path)["maps"][0]["rows"][0]["name"] == HOSTILE


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    recording = recording_of(tmp_path, {1: [tensor("weight", "w", [1])]})
    with pytest.raises(DataError, match=r"cannot write .*missing/page.html"):
        write_page(recording, tmp_path / "missing/page.html")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the recording of a network in float16 whose first loss scale is too large."""
    mx.random.seed(0)
    net = in_sequence(
        nn.Conv2D(4, 3, in_channels=3),
        nn.BatchNorm(in_channels=4),
        nn.Activation("relu"),
        nn.Dense(5, in_units=4 * 4 * 4),
    )
    net.initialize(mx.init.Xavier())
    mpgluon.cast_block(net)
    options = {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    amp.init_trainer(trainer, mpgluon.DynamicLossScale(2.0**20))
    folder = tmp_path_factory.mktemp("numerics")
    recorder = NumericsRecorder(net, trainer, folder, every=5)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    data = np.random.RandomState(1)
    for _ in range(42):
        images = mx.nd.array(data.standard_normal((8, 3, 6, 6)))
        labels = mx.nd.array(data.randint(0, 5, 8))
        with recorder.step(images, labels) as step:
            with autograd.record():
                step.loss = loss_fn(net(images), labels)
                with amp.scale_loss(step.loss, trainer) as scaled:
                    autograd.backward(scaled)
            trainer.step(8)
    return read_numerics(folder)


@pytest.fixture(scope="module")
def trained_path(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "trained.html"
    write_page(trained, path, warnings=["A warning."])
    return path


def test_a_training_run_has_every_kind_in_the_order_of_the_network(trained, trained_path):
    assert list(trained.numbers) == [1, *range(5, 42, 5)]
    data = data_of(trained_path)
    maps = {one["kind"]: one for one in data["maps"]}
    assert list(maps) == list(numerics_page._KINDS)
    layers = [(row["name"], row["block"]) for row in maps["activation"]["rows"]]
    assert layers == [("0", "Conv2D"), ("1", "BatchNorm"), ("2", "Activation"), ("3", "Dense")]
    assert [(row["name"], row["block"]) for row in maps["activation gradient"]["rows"]] == layers
    assert (data["skipped"][0], data["domain"]) == (1, [0.5, 42.5])
    assert [column[:3] for column in data["columns"]] == [[n, n, 1] for n in trained.numbers]
    assert data["columns"][-1][3:] == [37.5, 42.5]
    assert len(data["loss"]) == 42
    assert [scale for _, scale in data["scale"]] == [line["loss_scale"] for line in trained.lines]


@pytest.fixture(scope="module")
def planted_path(tmp_path_factory):
    """Write the page of three steps: all infinite, all zero, missing; subnormal numbers."""
    folder = tmp_path_factory.mktemp("planted")
    small = tensor("activation", "small", [2.0**-15, 1.0, 1.0, 1.0], "float16")
    steps = {
        1: [small, tensor("activation", "full", [math.inf] * 4, "float16")],
        2: [small, tensor("activation", "full", [0] * 4, "float16")],
        3: [small, tensor("weight", HOSTILE, [2.0, 4.0], call=1)],
    }
    lines = [{"step": 2, "loss": math.nan, "loss_scale": 1.0}]
    path = folder / "page.html"
    write_page(recording_of(folder, steps, lines), path, title="Planted")
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if EXECUTABLE is None:
        pytest.skip("there is no chromium or google-chrome to open the page in")
    with Browser(tmp_path_factory.mktemp("profile"), size=(1280, 1000)) as browser:
        yield browser


def opened(browser, path):
    browser.events.clear()
    browser.open(path.as_uri())
    browser.wait_for("width > 0")


@pytest.fixture
def quiet(browser):
    """Fail if a page asks for anything but itself, or writes to the console."""
    yield browser
    requested = [e for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    addresses = {e["params"]["request"]["url"] for e in requested}
    assert len({one for one in addresses if not one.startswith("data:")}) == 1
    noise = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
    assert not [e for e in browser.events if e["method"] in noise]


@pytest.fixture
def page(quiet, trained_path):
    opened(quiet, trained_path)
    return quiet


@pytest.fixture
def planted(quiet, planted_path):
    opened(quiet, planted_path)
    return quiet


def text_of(page, selector):
    return page.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")


def choose(page, control, text):
    page.evaluate(
        f"""(() => {{
            const control = document.getElementById("{control}");
            control.value = [...control.options].find((one) => one.text === "{text}").value;
            control.dispatchEvent(new Event("change"));
        }})()"""
    )


def options_of(page, control):
    return page.evaluate(f"[...document.getElementById('{control}').options].map((o) => o.text)")


def figures_of(page):
    texts = "(row) => [...row.cells].map((cell) => cell.textContent)"
    return dict(page.evaluate(f"[...document.getElementById('figures').rows].map({texts})"))


def middle_of(page, row, column):
    """Return where the middle of a cell of the map is in the window, after scrolling to it."""
    return page.evaluate(
        f"""(() => {{
            const canvas = document.querySelector("canvas");
            const [, , , from, to] = data.columns[{column}];
            canvas.scrollIntoView();
            const box = canvas.getBoundingClientRect();
            return [box.left + xOf((from + to) / 2), box.top + PAD + ({row} + 0.5) * rowHeight()];
        }})()"""
    )


def pixel_of(page, row, column):
    return page.evaluate(
        f"""(() => {{
            const [, , , from, to] = data.columns[{column}], ratio = window.devicePixelRatio;
            const [x, y] = [xOf((from + to) / 2), PAD + ({row} + 0.5) * rowHeight()];
            const pen = new OffscreenCanvas(1, 1).getContext("2d", {{willReadFrequently: true}});
            const canvas = document.querySelector("canvas");
            pen.drawImage(canvas, -Math.floor(x * ratio), -Math.floor(y * ratio));
            return Array.from(pen.getImageData(0, 0, 1, 1).data);
        }})()"""
    )


def click(page, x, y):
    for kind in ("mousePressed", "mouseReleased"):
        page.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


def test_the_page_has_python_s_numbers_and_histograms(page, trained):
    for place, (kind, rows) in enumerate(histories_of(trained, columns_of(trained)).items()):
        wanted = np.stack([one.values for one in rows])
        found = page.evaluate(
            f"""((map) => map.rows.map((_, row) => data.columns.map((_, column) =>
                map.quantities.map((quantity) => valueOf(map, quantity, row, column)).map(
                    (value) => Number.isNaN(value) ? null : value))))(data.maps[{place}])"""
        )
        found = np.array(found, dtype=float)
        assert found.shape[-1] == (7 if kind == "update" else 5)
        np.testing.assert_allclose(found, wanted[..., : found.shape[-1]], rtol=0.002)
        for row, one in enumerate(rows):
            pairs = page.evaluate(f"histogramOf(data.maps[{place}], {row}, 3)")
            shares = decoded_shares(one.shares[3])
            assert pairs == [[e - 127, shares[e]] for e in np.flatnonzero(shares).tolist()]


def test_every_kind_and_quantity_can_be_chosen(page):
    assert options_of(page, "kind") == list(numerics_page._KINDS)
    for kind in numerics_page._KINDS:
        choose(page, "kind", kind)
        offered = options_of(page, "quantity")
        assert offered == LABELS[: 7 if kind == "update" else 5]
        for quantity in offered:
            choose(page, "quantity", quantity)
            page.evaluate("select(1, 2)")
            status = text_of(page, "#status")
            assert status.startswith(f"{kind} of ")
            assert f", step 10: {quantity} " in status
            meaning = next(one.meaning for one in QUANTITIES if one.label == quantity)
            assert text_of(page, "#meaning").startswith(meaning)
            legend = page.evaluate(
                "[...document.querySelectorAll('#scale span')].map((s) => s.innerText)"
            )
            assert len(legend) >= 2
            assert (legend[-1] == "100 %") == next(
                q.is_share for q in QUANTITIES if q.label == quantity
            )
    choose(page, "kind", "activation")  # has no updates: the first quantity is shown
    assert page.evaluate("document.getElementById('quantity').value") == "0"


def test_colours_show_shares_and_what_is_missing(planted):
    choose(planted, "quantity", "share not finite")
    assert [pixel_of(planted, 1, column) for column in range(3)] == [YELLOW, DARK, EMPTY]
    assert pixel_of(planted, 0, 0) == DARK
    choose(planted, "quantity", "largest value")
    assert [pixel_of(planted, 1, column) for column in range(3)] == [
        EMPTY,
        [154] * 3 + [255],
        EMPTY,
    ]
    assert planted.evaluate("[get('zero').hidden, get('none').hidden]") == [False, False]
    planted.send(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    try:
        deadline = time.monotonic() + 60
        while pixel_of(planted, 1, 2) != [36, 41, 48, 255]:  # drawn again
            assert time.monotonic() < deadline
        assert planted.evaluate("getComputedStyle(document.body).color") == "rgb(232, 232, 232)"
    finally:
        planted.send("Emulation.setEmulatedMedia", features=[])


def test_a_click_and_a_finger_open_the_histogram(planted):
    assert planted.evaluate("get('tensor').hidden")
    click(planted, *middle_of(planted, 0, 1))
    assert text_of(planted, "#status") == (
        "activation of small (Dense, float16), step 2: largest value 1"
    )
    assert figures_of(planted) == {
        "format": "float16",
        "shape": "(4,)",
        "largest value": "1",
        "norm": "1.73",
        "share that underflows": "25 %",
        "share not finite": "0 %",
        "share of zeros": "0 %",
    }
    assert planted.evaluate("document.querySelectorAll('#histogram .bar').length") == 2
    edges = "[...document.querySelectorAll('#histogram .edge-name')].map((t) => t.textContent)"
    assert planted.evaluate(edges) == ["2⁻²⁴", "2⁻¹⁴", "65504"]
    assert "smallest subnormal 2⁻²⁴, smallest normal 2⁻¹⁴, largest 65504" in text_of(
        planted, "#range"
    )
    x, y = middle_of(planted, 1, 0)
    planted.send("Emulation.setTouchEmulationEnabled", enabled=True)
    planted.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    planted.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    planted.wait_for("get('status').textContent.includes('step 1')", timeout_s=10)
    planted.send("Emulation.setTouchEmulationEnabled", enabled=False)
    assert figures_of(planted)["share not finite"] == "100 %"
    assert figures_of(planted)["largest value"] == "no number"
    assert planted.evaluate("document.querySelectorAll('#histogram .bar').length") == 0


def test_keys_move_the_cell_and_the_histogram_follows(page):
    page.evaluate("document.getElementById('map').focus()")
    page.press("ArrowDown")  # shows where the cell is
    assert text_of(page, "#status").startswith("activation of 0 (Conv2D, float16), step 40:")
    page.press("ArrowDown")
    page.press("Home")
    assert text_of(page, "#status").startswith("activation of 1 (BatchNorm, float16), step 1:")
    assert page.evaluate("get('tensor').hidden")
    page.press("Enter")
    assert not page.evaluate("get('tensor').hidden")
    drawn = "document.getElementById('histogram').innerHTML"
    before = page.evaluate(drawn), figures_of(page)
    page.press("ArrowRight")
    assert "step 5:" in text_of(page, "#status")
    assert (page.evaluate(drawn), figures_of(page)) != before
    for key in ("End", "ArrowRight"):  # stays on the map
        page.press(key)
        assert "step 40:" in text_of(page, "#status")
    page.press("ArrowUp")
    assert text_of(page, "#status").startswith("activation of 0 (Conv2D")
    page.evaluate("document.querySelector('[aria-label=\"Step before\"]').click()")
    assert "step 35:" in text_of(page, "#status")


def test_charts_mark_skipped_steps_and_losses_that_are_not_finite(page, planted_path):
    skipped = page.evaluate("document.querySelectorAll('#loss line.mark').length")
    assert skipped == len(page.evaluate("data.skipped")) > 0
    assert not page.evaluate("get('scales').hidden")
    assert (
        page.evaluate("document.querySelector('#loss-scale .curve').getAttribute('d').length") > 9
    )
    inside = (
        "[...document.querySelectorAll('#loss .mark')].every((m) => m.getBBox().x >= xOf(begin))"
    )
    assert page.evaluate(inside)
    opened(page, planted_path)
    assert page.evaluate("document.querySelectorAll('#loss path.mark').length") == 1
    assert text_of(page, "#broken") == "Crosses: the loss is not finite."
    assert page.evaluate("get('scales').hidden")  # the loss scale is constant


def test_hostile_names_are_shown_as_text(planted):
    choose(planted, "kind", "weight")
    planted.evaluate("select(0, 2, true)")
    shown = HOSTILE.replace("\ud800", "\N{REPLACEMENT CHARACTER}")
    status = text_of(planted, "#status").replace("\ud800", "\N{REPLACEMENT CHARACTER}")
    assert status.startswith(f"weight of {shown} (call 2) (float32), step 3:")
    assert planted.evaluate("document.querySelectorAll('script').length") == 2


def test_screen_readers_find_the_controls(page):
    page.evaluate("select(0, 0, true)")
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    named = {(node["role"]["value"], node.get("name", {}).get("value")) for node in nodes}
    assert ("application", "Map of all layers and recorded steps") in named
    assert {("combobox", "Tensors"), ("combobox", "Quantity"), ("button", "Next step")} <= named
    assert "status" in {role for role, _ in named}
    assert any(role == "image" and str(name).startswith("Histogram of exp") for role, name in named)


def test_without_javascript_there_are_a_picture_and_a_table(quiet, trained, trained_path):
    quiet.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        quiet.events.clear()
        quiet.open(trained_path.as_uri())
        assert quiet.evaluate("document.querySelector('noscript img').naturalWidth") > 500
        assert quiet.evaluate("document.getElementById('interactive').offsetHeight") == 0
        assert text_of(quiet, "li") == "A warning."
        rows = quiet.evaluate(
            "[...document.querySelector('.wide tbody').rows].map((r) => r.innerText)"
        )
    finally:
        quiet.send("Emulation.setScriptExecutionDisabled", value=False)
    last = trained.step(trained.numbers[-1])
    losing = [one for one in last.tensors.values() if one.overflow or one.underflow]
    worst = max(losing, key=lambda one: (one.overflow, one.underflow))
    assert len(rows) == min(20, len(losing))
    assert rows[0].startswith(str(worst.id))


@pytest.mark.parametrize("steps", [0, 1])
def test_few_steps_can_be_opened(quiet, tmp_path, steps):
    recording = recording_of(tmp_path, {1: [tensor("activation", "a", [1, 2])]})
    write_page(Recording(tmp_path, recording.numbers[:steps]), tmp_path / "page.html")
    opened(quiet, tmp_path / "page.html")
    assert quiet.evaluate("get('all').hidden") == (steps == 0)
    if steps:
        quiet.evaluate("select(5, 5, true)")
        assert "activation of a (Dense, float32), step 1: largest value 2" in text_of(
            quiet, "#status"
        )


@pytest.mark.parametrize("width", [360, 420, 900, 1600])
def test_no_width_needs_scrolling_sideways(page, width):
    with page.window(width):
        page.evaluate("select(1, 1, true)")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.wait_for("document.querySelector('canvas').offsetWidth === get('map').clientWidth")
