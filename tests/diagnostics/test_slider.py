"""The page in a browser: the slider computes what Python does, for every reader, offline."""

from __future__ import annotations

from mpgluon_tools import report
from mpgluon_tools.diagnostics.ranges import range_report
from mpgluon_tools.diagnostics.scales import LossScales, loss_scales, share_text
from mpgluon_tools.report import Page, Section

import mxnet as mx
import pytest
from browser import EXECUTABLE, Browser
from diagnostics_helpers import make_batch, make_net

POWERS = (-10, -3, 0, 9, 13, 17, 24)
SHOWN = report._SHOWN


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if EXECUTABLE is None:
        pytest.skip("there is no chromium or google-chrome to open the page in")
    with Browser(tmp_path_factory.mktemp("profile"), size=(900, 900)) as browser:
        yield browser


@pytest.fixture(scope="module")
def scales():
    mx.random.seed(0)
    net = make_net()
    few = loss_scales(net, range_report(net, make_batch()), 2.0**13)
    # As many as a deep network has, each moved by some powers of two.
    moved = [
        type(one)(one.block, one.what, one.exponents.times(2.0**-shift))
        for shift in range(0, 40, 4)
        for one in few.gradients
    ]
    return LossScales(moved, few.scale, few.fmt)


@pytest.fixture(scope="module")
def path(scales, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    verdict = Section("Verdict", ["float16 is `safe`; loss scale 2^13."], lines="x < 1\n")
    Page("A network", [verdict, Section("Scales", scales=scales)]).write(path)
    return path


@pytest.fixture
def page(browser, path):
    browser.events.clear()
    browser.open(path.as_uri())
    yield browser
    requested = [e for e in browser.events if e["method"] == "Network.requestWillBeSent"]
    assert {e["params"]["request"]["url"] for e in requested} == {path.as_uri()}
    assert not [e for e in browser.events if e["method"] == "Runtime.exceptionThrown"]


def rows_of(page):
    return page.evaluate(
        """Array.from(document.getElementById('layers').rows, (row) =>
            Array.from(row.cells, (cell) => cell.textContent))"""
    )


def move_to(page, power):
    page.evaluate(
        f"""(() => {{
            const slider = document.getElementById('scale');
            slider.value = {power};
            slider.dispatchEvent(new Event('input'));
        }})()"""
    )


def text_of(page, selector):
    return page.evaluate(f"document.querySelector({selector!r}).textContent")


@pytest.mark.parametrize("power", POWERS)
def test_the_slider_shows_the_worst_layers_with_python_s_shares(page, scales, power):
    shares = page.evaluate(f"histograms.layers.map((layer) => sharesOf(layer, {power}))")
    assert shares == scales.shares(2.0**power)  # to the last bit
    move_to(page, power)
    assert text_of(page, "#summary") == scales.summary(2.0**power)
    expected = scales.worst(2.0**power, SHOWN)
    for row, (one, shares) in zip(rows_of(page), expected):
        parts = [share_text(shares[part]) for part in ("lost", "subnormal", "overflow")]
        assert [*row[:2], *row[3:]] == [one.block.name, one.what, *parts]
    assert len(rows_of(page)) == len(expected)
    assert text_of(page, "pre") == "x < 1\n"  # lines to paste are as they were


def test_all_layers_come_in_the_order_of_the_network(page, scales):
    page.evaluate("document.getElementById('all').click()")
    assert [row[:2] for row in rows_of(page)] == [
        [one.block.name, one.what] for one in scales.gradients
    ]


def test_the_keyboard_moves_the_scale_and_screen_readers_announce_it(page, scales):
    page.evaluate("document.getElementById('scale').focus()")
    page.press("ArrowRight")
    assert text_of(page, "#summary") == scales.summary(2.0**14)
    page.press("Home")
    assert text_of(page, "#summary") == scales.summary(2.0**-10)
    assert "2\N{MINUS SIGN}10 = 0.0009765625" in text_of(page, "label[for=scale]")
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    (slider,) = [node for node in nodes if node["role"]["value"] == "slider"]
    assert slider["name"]["value"].startswith("Loss scale S = 2")
    spoken = page.evaluate("document.getElementById('scale').getAttribute('aria-valuetext')")
    assert spoken == "2 to the power of -10, 0.0009765625"
    assert {"status", "checkbox", "button", "region"} <= {node["role"]["value"] for node in nodes}
    page.evaluate("document.getElementById('recommended').click()")
    assert text_of(page, "#summary") == scales.summary(scales.scale)


@pytest.mark.parametrize("width", [360, 900, 1400])
def test_no_width_needs_scrolling_sideways(page, width):
    with page.window(width):
        assert page.evaluate("document.documentElement.scrollWidth") <= width
