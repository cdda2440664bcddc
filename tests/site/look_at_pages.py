"""The finished pages in a browser, at three widths: nothing cut off, and axe-core finds no fault.

`make docs-look` runs it, after `make docs` (its name keeps it out of `make test`, which builds no
site). Every request has to be for a file of the site.

References
----------
axe-core, https://github.com/dequelabs/axe-core: contrast, names, landmarks, and whether all that
scrolls can be reached with the keyboard.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import EXECUTABLE, Browser

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
AXE = ROOT / ".venv" / "node_modules" / "axe-core" / "axe.min.js"
WIDTHS = {400: "light", 1100: "dark", 1400: "light"}  # and the theme there
PAGES = sorted(path for path in SITE.rglob("*.html") if path != SITE / "index.html")

# Elements that reach beyond the window without a box of their own that scrolls.
CUT_OFF = """
(() => {
  const scrolls = (element) => {
    for (let box = element; box.tagName !== "ARTICLE"; box = box.parentElement) {
      if (/auto|scroll/.test(getComputedStyle(box).overflowX)) return true;
    }
    return false;
  };
  const wide = [...document.querySelectorAll("article *")].filter(
    (e) => e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e));
  return wide.slice(0, 3).map((e) => `${e.tagName} ${e.className} ${e.textContent.slice(0, 40)}`);
})()
"""
# Controls of the header that lie over each other.
OVERLAP = """
(() => {
  const shown = [...document.querySelectorAll("header svg, .content-icon-container svg")]
    .map((e) => e.getBoundingClientRect()).filter((box) => box.width);
  const isBelow = (box, place) => box.left < shown[place].right + 4;
  return shown.slice(1).filter(isBelow).map((box) => box.left);
})()
"""
# The corner of a table may be empty: its first column needs no title.
FAULTS = """
axe.run(document, {
  resultTypes: ["violations"], rules: {"empty-table-header": {enabled: false}},
}).then((found) => found.violations.map((fault) =>
  `${fault.id}: ` + fault.nodes.slice(0, 3).map((node) => node.html.slice(0, 160)).join(" | ")))
"""
FOUND = "document.querySelectorAll('#search-results ul.search a')"


@contextmanager
def in_theme(browser, theme):
    """Emulate a system whose theme is light or dark."""
    wanted = [{"name": "prefers-color-scheme", "value": theme}]
    browser.send("Emulation.setEmulatedMedia", features=wanted)
    try:
        yield
    finally:
        browser.send("Emulation.setEmulatedMedia", features=[])


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if not PAGES:
        pytest.skip("needs build/site, which `make docs` makes")
    if EXECUTABLE is None:
        pytest.skip("needs chromium or google-chrome")
    if not AXE.is_file():
        pytest.skip("axe-core is not installed: make docs-look, with npm")
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.mark.parametrize(
    "page", PAGES or [None], ids=lambda path: path and path.relative_to(SITE).as_posix()
)
def test_a_page_is_whole_and_accessible_at_each_width(browser, page):
    browser.events.clear()
    for width, theme in WIDTHS.items():
        with browser.window(width), in_theme(browser, theme):
            browser.open(page.as_uri())
            assert browser.evaluate(CUT_OFF) == [], f"cut off at {width} pixels"
            assert browser.evaluate(OVERLAP) == [], f"one over the other at {width} pixels"
            browser.evaluate(AXE.read_text("utf-8"))
            faults = browser.evaluate(FAULTS)
            assert not faults, f"axe-core at {width} pixels, {theme}: " + "\n".join(faults)
    requested = [
        e["params"]["request"]["url"]
        for e in browser.events
        if e["method"] == "Network.requestWillBeSent"
    ]
    outside = [url for url in requested if not url.startswith((SITE.as_uri(), "data:"))]
    assert outside == []
    assert not [e for e in browser.events if e["method"] == "Runtime.exceptionThrown"]


def test_a_table_that_is_cut_off_is_seen(browser):
    with browser.window(min(WIDTHS)):
        browser.open((SITE / "docs" / "index.html").as_uri())
        browser.evaluate(
            """document.querySelector("article").insertAdjacentHTML(
                "beforeend", "<table><tr><td>" + "wide".repeat(200) + "</td></tr></table>")"""
        )
        assert browser.evaluate(CUT_OFF)


@pytest.mark.parametrize(
    ("theme", "filtered"), [("light", [False, False]), ("dark", [True, False])]
)
def test_the_dark_theme_inverts_drawings_and_no_photographs(browser, theme, filtered):
    pictures = ("results.html", "summary."), ("index.html", "predictions.")
    with in_theme(browser, theme):
        for (page, name), inverted in zip(pictures, filtered):
            browser.open((SITE / "docs" / page).as_uri())
            style = f"getComputedStyle(document.querySelector('article img[src*=\"{name}\"]'))"
            assert ("invert" in browser.evaluate(f"{style}.filter")) is inverted


def test_a_link_to_a_page_has_a_title_a_sentence_a_picture_and_an_icon(browser):
    browser.open((SITE / "docs" / "play.html").as_uri())
    tag = "document.querySelector('meta[property=\"og:{}\"]').content".format
    assert browser.evaluate(tag("title")) == "Play"
    assert browser.evaluate(tag("description")).startswith("Train MXNet Gluon networks")
    assert (SITE / "docs" / browser.evaluate(tag("image"))).resolve().is_file()
    icon = browser.evaluate("document.querySelector('link[rel~=icon]').href")
    assert Path(icon.removeprefix("file://")).is_file()


def test_a_search_finds_a_public_name(browser):
    browser.open(f"{(SITE / 'search.html').as_uri()}?q=clip_global_norm")
    browser.wait_for(f"{FOUND}.length > 0")
    links = browser.evaluate(f"Array.from({FOUND}, (link) => link.href)")
    assert any("reference/amp.html" in link for link in links)


def test_the_first_link_reached_with_the_keyboard_leads_to_the_content(browser):
    browser.open((SITE / "docs" / "index.html").as_uri())
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.textContent.trim()") == "Skip to content"
