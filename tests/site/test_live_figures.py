"""The live figures: the bits of their kernels, and their controls in a browser."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

from mpgluon import kernels
from mpgluon.formats.float_format import FLOAT16, FLOAT32
from mpgluon.formats.tensor_core import ACCUMULATIONS

import mxnet as mx
import numpy as np
import pytest
from live_page import assert_same_bits, status

pytest.importorskip("sphinx", reason="`make docs` installs Sphinx, and runs this")
pytest.importorskip("ziglang", reason="ziglang is in the environment of `make docs`")
import live_figures

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", live_figures.FIGURES)
def test_a_figure_and_its_data_are_small(name, folder):
    sizes = [(folder / script).stat().st_size for script in live_figures.scripts_of([name])]
    assert sum(sizes) < 300_000


def test_each_figure_is_shown_in_the_lesson_that_teaches_its_idea():
    figures = live_figures.figures_by_anchor()
    names = [re.match(r"```{live} (\w+)\n", text)[1] for text in figures.values()]
    assert names == list(live_figures.FIGURES)
    shown = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        source = [path.read_text("utf-8")]
        application = SimpleNamespace(env=SimpleNamespace(note_dependency=str))
        live_figures.embed_figures(application, f"notebooks/{path.stem}", source)
        found = re.findall(r"```{live} (\w+)\\n", source[0])
        shown.update(dict.fromkeys(found, path.stem[:2]))
        assert len(set(found)) == len(found)
    assert shown == {
        "number": "01", "training": "02", "gradients": "03", "hunt": "06", "sum": "11"
    }  # fmt: skip


# --- the kernels, in Node


def numbers(count):
    """Return FP32 numbers of all exponents, and special ones."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2**32, count, dtype=np.uint32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65520, 448, 464], np.float32)
    return np.concatenate([codes.view(np.float32), special])


@pytest.mark.parametrize("name", live_figures.FORMATS)
def test_a_million_numbers_round_to_the_bits_of_the_native_library(name, computed):
    fmt = live_figures.FORMATS[name]
    given = numbers(1_000_000)
    assert kernels.load()
    expected = given
    if fmt != FLOAT32:
        operator = kernels.operator("plain_value", fmt)
        expected = kernels.invoke(operator, mx.nd.array(given)).asnumpy()
    lines = f"""
for (let first = 0; first < given.length; first += 60000)
  for (const one of live.round(given.slice(first, first + 60000), live.formats.{name}))
    results.push(one);
"""
    assert_same_bits(computed(given, lines), expected)


@pytest.mark.parametrize("name", live_figures.FORMATS)
def test_every_code_is_the_number_that_it_stands_for(name, computed):
    """All 65,536 of float16 among them; of FP32 and TF32, some thousands."""
    fmt = live_figures.FORMATS[name]
    width = 1 + fmt.exponent_bits + fmt.significand_bits - 1
    step = max(1, 2**width // 2**16)
    lines = f"""
const format = live.formats.{name};
for (let code = 0; code < 2 ** {width}; code += {step}) {{
  const bits = [...code.toString(2).padStart({width}, "0")].map(Number);
  const value = live.valueOf(bits, format);
  results.push(value);
  const back = live.bitsOf(value, format).join("");
  if (!Number.isNaN(value) && back !== bits.join("")) throw `${{code}}: ${{value}} is ${{back}}`;
}}
"""
    found = computed([], lines)
    finite = found[np.isfinite(found)]
    assert len(found) == 2**width // step
    assert fmt.finite_only or np.isinf(found).any()
    assert np.abs(finite).max() <= fmt.max
    lines = f"results.push(...live.round(given, live.formats.{name}));"
    some = finite[:: max(1, len(finite) // 60_000)][:60_000]
    assert_same_bits(computed(some, lines), some)
    if fmt == FLOAT16:
        codes = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
        assert_same_bits(found, codes)


@pytest.mark.parametrize("generation", ACCUMULATIONS)
def test_sums_have_the_bits_of_the_native_library(generation, computed):
    assert kernels.load()
    rng = np.random.default_rng(1)
    operator = kernels.accumulating_operator("on_values_FullyConnected", FLOAT16, generation)
    given, expected, lengths = [], [], [1, 3, 4, 5, 16, 17, 64, 1000, 4608]
    for length in lengths:
        for spread in (0, 4, 12):
            pairs = rng.standard_normal((2, length)) * 2.0 ** rng.integers(
                -spread, spread + 1, (2, length)
            )
            a, b = pairs.astype(np.float16).astype(np.float32)
            given.append(np.stack([a, b]).ravel())
            options = {"num_hidden": 1, "no_bias": True}
            one = kernels.invoke(operator, mx.nd.array([a]), mx.nd.array([b]), **options)
            expected += one.asnumpy().ravel().tolist()
    lines = f"""
let at = 0;
for (const length of {lengths}) for (let spread = 0; spread < 3; spread++) {{
  const [a, b] = [0, 1].map((half) => given.slice(at + half * length, at + (half + 1) * length));
  results.push(live.sumAsTensorCore(a, b, "{generation}"));
  at += 2 * length;
}}
"""
    assert_same_bits(computed(np.concatenate(given), lines), np.array(expected, np.float32))


def test_stochastic_rounding_is_right_in_the_mean(computed):
    lines = """
const draws = Array.from({length: 60000}, (_, place) => place / 60000);
results.push(...live.roundStochastically(2049, draws, live.formats.FP16));
results.push(...live.roundStochastically(2 ** -25, draws, live.formats.FP16));
"""
    found = computed([], lines).reshape(2, -1)
    assert set(found[0]) == {2048, 2050}
    assert set(found[1]) == {0, 2.0**-24}
    np.testing.assert_allclose(found.mean(axis=1), [2049, 2.0**-25], rtol=1e-4)


# --- the controls, in a browser


def row(browser, name):
    return browser.evaluate(
        "[...[...document.querySelectorAll('[data-figure=number] tbody tr')]"
        f".find((row) => row.textContent.trim().startsWith('{name}'))"
        ".parentElement.querySelectorAll('td:not(.bits), .what')].map((cell) => cell.textContent)"
    )


def type_number(browser, text):
    browser.evaluate(
        f"(() => {{const box = document.querySelector('#live-number'); box.value = '{text}';"
        "box.dispatchEvent(new Event('input'));})()"
    )


@pytest.mark.multiprocess
def test_a_number_is_typed_its_bits_pressed_and_its_size_dragged(browser):
    type_number(browser, "1e-8")
    assert row(browser, "FP16") == ["0", "100 %", "underflow: zero"]
    assert row(browser, "BF16")[2] == "rounded"
    type_number(browser, "65520")
    assert row(browser, "FP16")[::2] == ["∞", "overflow: infinite"]
    assert row(browser, "E4M3")[::2] == ["NaN", "overflow: NaN, as it has no infinity"]
    assert row(browser, "E2M1")[::2] == ["6", "overflow: the largest number"]
    type_number(browser, "1/3")
    assert status(browser, "number").startswith("0.333333333 in FP16 is 0.333251953: rounded")
    type_number(browser, "1,5")
    assert status(browser, "number").startswith("1.5 in FP16 is 1.5: exact")
    type_number(browser, "-inf")
    assert row(browser, "FP16")[::2] == ["\N{MINUS SIGN}∞", "infinite"]
    type_number(browser, "nan")
    assert row(browser, "FP16")[::2] == ["NaN", "not a number"]
    assert row(browser, "E2M1")[::2] == ["\N{EN DASH}", "this format has no NaN"]
    type_number(browser, "65519.99")
    assert row(browser, "FP16")[::2] == ["65504", "rounded"]
    type_number(browser, "-0")
    assert row(browser, "FP16")[0] == "\N{MINUS SIGN}0"
    type_number(browser, "1")
    press = "document.querySelector('[aria-label=\"E4M3, exponent, bit 0\"]').click()"
    browser.evaluate(press)
    assert browser.evaluate("document.querySelector('#live-number').value") == "0.5"
    assert row(browser, "E4M3")[:2] == ["0.5", "0 %"]
    browser.evaluate(
        "(() => {const drag = document.querySelector('[data-figure=number] [type=range]');"
        "drag.focus(); drag.value = 16; drag.dispatchEvent(new Event('input'));})()"
    )
    assert browser.evaluate("document.querySelector('#live-number').value") == "65540"


@pytest.mark.multiprocess
def test_what_is_not_a_number_gets_words_and_changes_nothing(browser):
    type_number(browser, "1/3")
    for text in ("one", "", " ", "1,234.5", "1/2/3", "2^", "/3", "1e", "0x"):
        type_number(browser, text)
        assert browser.evaluate("document.querySelector('#live-number').ariaInvalid") == "true"
        words = f'Cannot read "{text}" as a number: 0.1' if text.strip() else "Type a number: 0.1"
        assert status(browser, "number").startswith(words)
        assert status(browser, "number").endswith("Shown is 0.333333333.")
        assert row(browser, "FP16")[0] == "0.333251953"


@pytest.mark.multiprocess
@pytest.mark.parametrize("width", [420, 1280])
def test_every_bit_and_label_is_inside_of_its_card(browser, width):
    with browser.window(width):
        for text in ("0.1", "-1.2345678e-8", "65504.1"):
            type_number(browser, text)
            outside = """
(() => {
  const card = document.querySelector("[data-figure=number]"), edges = card.getBoundingClientRect();
  const parts = [...card.querySelectorAll(".bits button, .what, .live-line span, [role=status]")];
  return parts.filter((one) => {
    const box = one.getBoundingClientRect();
    return box.left < edges.left || box.right > edges.right;
  }).map((one) => one.className + one.textContent);
})()"""
            assert browser.evaluate(outside) == []


@pytest.mark.multiprocess
def test_tab_goes_from_format_to_format_and_arrows_from_bit_to_bit(browser):
    browser.evaluate("document.querySelector('[aria-label=\"FP16, sign\"]').focus()")
    name = "document.activeElement.getAttribute('aria-label')"
    last = "fraction, bit 0"
    for key, bit in (("ArrowRight", "exponent, bit 4"), ("End", last), ("ArrowRight", last),
                     ("Home", "sign")):  # fmt: skip
        browser.press(key)
        assert browser.evaluate(name) == f"FP16, {bit}"
    stops = "[...document.querySelectorAll('.bits button')].filter((e) => e.tabIndex === 0).length"
    assert browser.evaluate(stops) == len(live_figures.FORMATS)


@pytest.mark.multiprocess
def test_a_number_is_rounded_stochastically(browser):
    type_number(browser, "2049")
    browser.evaluate("document.querySelector('[value=FP16]').click()")
    browser.evaluate(
        "document.querySelector('[data-figure=number] .live-controls:last-child button').click()"
    )
    words = browser.evaluate("document.querySelector('.live-line p').textContent")
    assert words.startswith("Between 2048 and 2050, 2 apart; the nearest is 2048.")
    up = int(re.search(r"Stochastically, (\d+) of 200 went up, where 100", words)[1])
    assert 50 < up < 150
    assert browser.evaluate("document.querySelectorAll('.live-line .dot').length") == 200
    type_number(browser, "2048")
    assert browser.evaluate("document.querySelector('.live-line').textContent") == (
        "FP16 has this number: nothing is rounded."
    )


@pytest.mark.multiprocess
def test_a_sum_changes_with_its_terms_their_order_and_a_large_one(browser):
    def change(label, value):
        browser.evaluate(
            f"(() => {{const box = document.querySelector('[aria-label=\"{label}\"]');"
            f"box.value = '{value}'; for (const kind of ['input', 'change'])"
            " box.dispatchEvent(new Event(kind));})()"
        )

    assert status(browser, "sum").startswith("The sum is 341.25. In FP16 it is 328, off by 3.9 %")
    change("Number of terms", 4)
    stuck = status(browser, "sum")
    assert stuck.startswith("The sum is 1365. In FP16 it is 10")
    change("A large first term", 15)
    assert "In FP16 it is 32768, off by" in status(browser, "sum")
    sums = browser.evaluate(
        "[...document.querySelectorAll('[data-figure=sum] tbody td:nth-child(2)')]"
        ".map((cell) => cell.textContent.split('.')[0])"
    )
    assert sums == ["34133", "32768", "34128", "34128", "34128", "34131"]
    change("Order", "smallest first")
    assert "In FP16 it is 32768" not in status(browser, "sum")
    change("Terms", "random, of both signs")
    first = status(browser, "sum")
    change("Order", "largest first")
    assert status(browser, "sum") != first


@pytest.mark.multiprocess
def test_what_stands_there_without_javascript_is_what_the_figures_begin_with(browser):
    page = (ROOT / "docs" / "play.md").read_text("utf-8")
    tables = re.findall(r"```\{live\} (\w+)\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in tables] == list(live_figures.FIGURES)
    for name, text in tables:
        rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
        for label, value, error in ([cell.strip() for cell in cells] for cells in rows[2:]):
            shown = browser.evaluate(
                f"[...document.querySelectorAll('[data-figure={name}] tbody tr')].map((row) =>"
                "[...row.querySelectorAll('th, td:not(.bits)')].map((c) => c.textContent.trim()))"
            )
            assert [label, value, error] in [one[:3] for one in shown]


@pytest.mark.multiprocess
@pytest.mark.parametrize("width", [360, 700, 1600])
def test_nothing_is_cut_off_at_any_width(browser, width):
    with browser.window(width):
        wide = browser.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0
