"""The live figure of gradients: its data, rounding in blocks, and its controls."""

from __future__ import annotations

import base64
import json
import re
from functools import partial

from mpgluon.formats.float_format import BFLOAT16, FLOAT16, round_to
from mpgluon.formats.scaling import round_scaled, scale_exponents
from mpgluon.tools.zoo import build_network

import live_page
import mxnet as mx
import numpy as np
import pytest

pytest.importorskip("sphinx", reason="`make docs` installs Sphinx, and runs this")
pytest.importorskip("ziglang", reason="ziglang is in the environment of `make docs`")
import live_figures

SCRIPTS = ("gradients.data.js", "gradients.js")
E5M2, E4M3, E2M1 = (live_figures.FORMATS[name] for name in ("E5M2", "E4M3", "E2M1"))
WAYS = {
    "FP16": (FLOAT16, False),
    "BF16": (BFLOAT16, False),
    "E5M2": (E5M2, False),
    "E4M3": (E4M3, False),
    "E5M2 in blocks (MX)": (E5M2, True),
    "E4M3 in blocks (MX)": (E4M3, True),
    "E2M1 in blocks (MX)": (E2M1, True),
}


@pytest.fixture(scope="module")
def gradients():
    """Return the recorded gradients, shape (layers, values), as Python decodes them."""
    text = (live_figures.SOURCES / "gradients.data.js").read_text("utf-8")
    data = json.loads(re.search(r"= (\{.*\});", text)[1])
    codes = np.frombuffer(base64.b64decode(data["values"]), "<u2").astype(np.uint32)
    return (codes << 16).view(np.float32).reshape(data["layers"], -1)


def with_figure(folder, lines):
    """Return lines of JavaScript after the figure's scripts, for a place without pages."""
    page = 'const document = {readyState: "loading", addEventListener() {}};'
    return "\n".join([page, *((folder / name).read_text() for name in SCRIPTS), lines])


def assert_equal_with_signs(found, expected):
    np.testing.assert_array_equal(found, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(found[numbers]), np.signbit(expected[numbers]))


# --- the data


def test_the_data_are_the_gradients_of_all_convolutions_in_whole_blocks(folder, gradients):
    assert (folder / "gradients.data.js").stat().st_size < 150_000
    assert gradients.shape == (53, 12 * 32)
    assert np.isfinite(gradients).all()
    assert (np.abs(gradients).max(axis=1) > 0).all()


def test_stages_are_those_of_the_network(folder):
    net = build_network("resnet50_v1", classes=10, image_size=48, devices=[mx.cpu()])
    stages = []

    def count(block):
        if isinstance(block, mx.gluon.nn.Conv2D):
            stages.append(re.search(r"stage(\d)", block.name))

    net.apply(count)
    numbers = [int(stage[1]) if stage else 0 for stage in stages]
    ends = np.cumsum([numbers.count(stage) for stage in range(5)]).tolist()
    script = (folder / "gradients.js").read_text()
    assert f"ENDS = {[0, *ends]}" in script


# --- rounding, in Node


def test_the_script_decodes_the_gradients(folder, computed, gradients):
    lines = with_figure(folder, "results.push(...gradientsUnderScale.values);")
    assert_equal_with_signs(computed([], lines), gradients.ravel())


@pytest.mark.parametrize("name", ["E5M2", "E4M3", "E3M2", "E2M3", "E2M1"])
def test_blocks_round_to_the_bits_of_the_package(name, folder, computed, gradients):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2**32, 32 * 600, dtype=np.uint32)
    anything = codes.view(np.float32).reshape(-1, 32)  # some blocks hold an infinity or NaN
    similar = rng.standard_normal((600, 32)) * 2.0 ** rng.integers(-60, 60, (600, 1))
    powers = 2.0 ** rng.integers(-20, 1, (40, 32))  # ties, and blocks at the edge of a scale
    edges = live_figures.FORMATS[name].max * np.array([[1.0], [1 + 2**-20], [1 - 2**-20]])
    parts = [anything, similar, powers, np.repeat(edges, 32, 1), np.zeros((1, 32)), gradients]
    given = np.concatenate([part.astype(np.float32).ravel() for part in parts])
    given = given[: 60_000 // 32 * 32]
    lines = f"results.push(...gradientsUnderScale.roundInBlocks(given, live.formats.{name}));"
    expected = round_scaled(given.reshape(-1, 32), live_figures.FORMATS[name], block=32)
    assert np.isnan(expected).any()
    assert_equal_with_signs(computed(given, with_figure(folder, lines)), expected.ravel())


# --- what the page says


def test_what_the_page_says_of_the_gradients_is_true(gradients):
    page = (live_figures.ROOT / "docs" / "play.md").read_text("utf-8")
    assert f"{gradients.size:,} gradients" in page
    zero, _, subnormal = expected_row(gradients.ravel(), "FP16", 0)
    assert f"In FP16 at scale 1, {zero} become zero and {subnormal} are subnormal" in page
    (kept, fits), (e5m2_kept, e5m2_fits), (e4m3_kept, e4m3_fits) = (
        limits(gradients, WAYS[name][0]) for name in ("FP16", "E5M2", "E4M3")
    )
    assert f"From 2^{kept} on none becomes zero, and from 2^{fits + 1} on" in page
    assert f"keeps all of these gradients from 2^{e5m2_kept} to 2^{e5m2_fits}" in page
    assert f"below 2^{e4m3_kept} some become zero, and from 2^{e4m3_fits + 1} on" in page
    e4m3, e2m1 = (
        expected_row(gradients.ravel(), f"{name} in blocks (MX)", 0)[0] for name in ("E4M3", "E2M1")
    )
    assert f"E4M3 then loses {e4m3}, and E2M1, with 4 bits, {e2m1}" in page


def limits(gradients, fmt):
    """Return the exponents of the smallest scale without a zero and of the largest that fits."""
    sizes = np.abs(gradients[gradients != 0])
    at = {e: round_to(sizes * np.float32(2.0**e), fmt) for e in range(41)}
    return (
        min((e for e in at if at[e].all()), default=None),
        max((e for e in at if np.isfinite(at[e]).all()), default=None),
    )


# --- the controls, in a browser


evaluate = partial(live_page.evaluate, figure="gradients")
status = partial(live_page.status, figure="gradients")


def move(browser, exponent):
    evaluate(
        browser,
        f"const drag = box.querySelector('[type=range]'); drag.value = {exponent};"
        "drag.dispatchEvent(new Event('input'));",
    )


def choose(browser, name):
    evaluate(browser, f"box.querySelector('[type=radio][value=\"{name}\"]').click()")


def choose_layers(browser, name):
    evaluate(
        browser,
        f"const menu = box.querySelector('select'); menu.value = '{name}';"
        "menu.dispatchEvent(new Event('change'));",
    )


def table(browser):
    rows = evaluate(
        browser,
        "return [...box.querySelectorAll('tbody tr')].map((row) =>"
        "[...row.children].map((cell) => cell.textContent.trim()))",
    )
    return {name: tuple(cells) for name, *cells in rows}


def percent(count, total):
    rounded = float(f"{100 * count / total:.2g}")
    return f"{min(99.9, rounded) if count < total else rounded:g} %"


def expected_row(values, name, exponent):
    """Return the shares that become zero, overflow and are subnormal."""
    fmt, in_blocks = WAYS[name]
    given = values * np.float32(2.0**exponent)
    if in_blocks:
        blocks = given.reshape(-1, 32)
        scale = scale_exponents(np.abs(blocks).max(axis=1, keepdims=True), fmt)
        scaled = np.ldexp(round_scaled(blocks, fmt, block=32), scale).ravel()
    elif fmt == FLOAT16:
        with np.errstate(over="ignore"):
            scaled = given.astype(np.float16).astype(np.float32)
    else:
        scaled = round_to(given, fmt)
    size = np.abs(scaled)
    counts = (
        (size == 0) & (values.ravel() != 0),
        ~np.isfinite(size),
        (size > 0) & (size < fmt.smallest_normal),
    )
    return tuple(percent(count.sum(), np.count_nonzero(values)) for count in counts)


@pytest.mark.multiprocess
@pytest.mark.parametrize("exponent", [0, 10, 24, 40])
def test_shares_are_those_of_numpy_at_each_scale_and_format(exponent, browser, gradients):
    move(browser, exponent)
    expected = {name: expected_row(gradients.ravel(), name, exponent) for name in WAYS}
    assert table(browser) == expected
    for name, (zero, overflow, subnormal) in expected.items():
        choose(browser, name)
        words = status(browser)
        assert words.startswith(
            f"At loss scale 2^{exponent}, {zero} of the gradients become zero in {name}, "
            f"{subnormal} are subnormal, and {overflow} overflow."
        )
        picture = evaluate(browser, "return box.querySelector('svg').getAttribute('aria-label')")
        assert f"{zero} become zero, {subnormal} are subnormal" in picture


@pytest.mark.multiprocess
def test_a_block_scale_makes_the_loss_scale_unnecessary(browser):
    move(browser, 0)
    before = table(browser)
    move(browser, 33)
    after = table(browser)
    assert {name for name in WAYS if before[name] == after[name]} >= {
        name for name, (_, in_blocks) in WAYS.items() if in_blocks
    }
    assert before["FP16"] != after["FP16"]
    choose(browser, "E4M3 in blocks (MX)")
    assert "the loss scale changes nothing" in status(browser)
    buttons = "return [...box.querySelectorAll('button')].map((one) => one.disabled)"
    assert evaluate(browser, buttons) == [True, True]


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["FP16", "BF16", "E5M2", "E4M3"])
def test_limits_are_true_and_buttons_go_there(name, browser, gradients):
    kept, fits = limits(gradients, WAYS[name][0])
    choose(browser, name)
    words = status(browser)
    assert f"From 2^{kept} on none becomes zero" in words
    over = f"from 2^{fits + 1} on the largest overflows"
    assert ("up to 2^40 none overflows" if fits == 40 else over) in words
    assert ("No scale keeps all of them" in words) == (kept > fits)
    for place, exponent in enumerate((kept, fits)):
        evaluate(browser, f"box.querySelectorAll('button')[{place}].click()")
        assert evaluate(browser, "return box.querySelector('[type=range]').value") == str(exponent)
        assert status(browser).startswith(f"At loss scale 2^{exponent},")


@pytest.mark.multiprocess
def test_layers_are_chosen(browser, gradients):
    for name, rows in {
        "the first convolution": slice(0, 1),
        "stage 1": slice(1, 11),
        "stage 4": slice(43, 53),
    }.items():
        choose_layers(browser, name)
        expected = {way: expected_row(gradients[rows].ravel(), way, 0) for way in WAYS}
        assert table(browser) == expected


@pytest.mark.multiprocess
def test_the_scale_moves_with_the_keyboard(browser):
    evaluate(browser, "box.querySelector('[type=range]').focus()")
    browser.press("ArrowRight")
    assert status(browser).startswith("At loss scale 2^1,")
    label = "return document.querySelector('label[for=live-loss-scale]').textContent"
    assert evaluate(browser, label).startswith("Loss scale")


@pytest.mark.multiprocess
def test_bars_of_what_is_lost_have_a_pattern(browser):
    fills = evaluate(
        browser,
        "return [...box.querySelectorAll('.bar.zero')].map((bar) => bar.getAttribute('style'))",
    )
    assert fills
    assert all(fill.startswith("fill: url(#live-zero") for fill in fills)
