"""The talk of the finished site, presented in a browser: `make docs-look` runs it."""

from __future__ import annotations

import base64
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import EXECUTABLE, Browser

TALK = Path(__file__).resolve().parents[2] / "build" / "site" / "docs" / "talk.html"
SLIDES = "document.querySelectorAll('#the-talk > section').length"
PLACE = "location.hash"
NOTES = "document.querySelector('.shown .talk-notes').checkVisibility({visibilityProperty: true})"
CUT_OFF = """
[document.querySelector(".shown"), ...document.querySelectorAll(".shown :is(pre, .live-wide, img)")]
  .filter((box) => box.scrollHeight > box.clientHeight || box.scrollWidth > box.clientWidth
    || box.matches("img") && box.clientHeight < 0.3 * innerHeight).length"""
BARE = """[...document.querySelectorAll("h1, aside, .shown ~ section")]
  .every((one) => !one.checkVisibility({visibilityProperty: true}))"""


@pytest.fixture
def browser(tmp_path):
    if not TALK.is_file():
        pytest.skip("needs build/site, which `make docs` makes")
    if EXECUTABLE is None:
        pytest.skip("needs chromium or google-chrome")
    with Browser(tmp_path) as browser, browser.window(1280, 720):
        browser.open(TALK.as_uri())
        yield browser
        assert not [e for e in browser.events if e["method"] == "Runtime.exceptionThrown"]


@contextmanager
def second_window(browser):
    """Send what follows to the window that the page has opened."""
    first = browser._session
    pages = [t for t in browser.send("Target.getTargets")["targetInfos"] if t["type"] == "page"]
    view = next(page["targetId"] for page in pages if "#view-" in page["url"])
    attached = browser.send("Target.attachToTarget", targetId=view, flatten=True)
    browser._session = attached["sessionId"]
    try:
        yield
    finally:
        browser._session = first


def present(browser):
    browser.evaluate("document.querySelector('.talk-start button').click()")


def test_keys_move_the_slides_and_escape_leads_back_to_the_page(browser):
    count = browser.evaluate(SLIDES)
    assert browser.evaluate(NOTES.replace(".shown ", ""))
    present(browser)
    keys = ["ArrowRight", "PageDown", "ArrowDown", " ", "ArrowLeft", "ArrowUp", "PageUp", "Home"]
    for key, place in zip([*keys, "ArrowLeft", "End", "ArrowRight"],
                          [2, 3, 4, 5, 4, 3, 2, 1, 1, count, count]):  # fmt: skip
        browser.press(key)
        assert browser.evaluate(PLACE) == f"#slide-{place}", key
        assert not browser.evaluate(NOTES)
        assert browser.evaluate(BARE)
    browser.send("Page.reload")
    browser.wait_for(f"document.querySelector('.talk-bar')?.textContent.includes('{count} / ')")
    browser.press("Escape")
    assert browser.evaluate("document.body.dataset.talk") is None
    assert browser.evaluate("document.querySelector(location.hash).matches('section')")
    assert browser.evaluate(NOTES.replace(".shown ", ""))


@pytest.mark.parametrize("size", [(1280, 720), (1024, 768)])
def test_each_slide_fits_into_its_screen(browser, size):
    with browser.window(*size):
        present(browser)
        for place in range(browser.evaluate(SLIDES)):
            browser.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
            assert browser.evaluate(CUT_OFF) == 0, f"slide {place + 1}"
            assert browser.evaluate("parseFloat(document.documentElement.style.fontSize)") > 17
            browser.press("PageDown")
        assert browser.evaluate(f"document.documentElement.style.fontSize = '60px', {CUT_OFF}")


def test_a_slider_keeps_its_keys(browser):
    browser.evaluate("location.hash = 'slide-9'")
    browser.wait_for("document.querySelector('.shown input[type=range]') !== null")
    browser.evaluate("document.querySelector('.shown input[type=range]').focus()")
    browser.press("ArrowRight")
    assert browser.evaluate(PLACE) == "#slide-9"
    assert browser.evaluate("document.activeElement.value") == "1"
    browser.press("PageDown")
    assert browser.evaluate(PLACE) == "#slide-10"
    browser.press("Escape")
    assert not browser.evaluate("[...document.querySelectorAll('.live')].some((e) => e.style.zoom)")


def test_the_presenters_view_has_the_notes_and_both_windows_follow_each_other(browser):
    present(browser)
    browser.press("p")
    with second_window(browser):
        browser.wait_for("document.querySelector('.talk-clock')?.textContent")
        assert browser.evaluate(NOTES)
        assert browser.evaluate("document.querySelector('.talk-next').textContent").startswith(
            "Next: 2."
        )
        browser.press("ArrowRight")
    browser.wait_for(f"{PLACE} === '#slide-2'")
    browser.press("End")
    with second_window(browser):
        browser.wait_for(f"{PLACE} === '#view-25'")


def test_each_slide_is_a_page_on_paper(browser):
    pdf = base64.b64decode(browser.send("Page.printToPDF", preferCSSPageSize=True)["data"])
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == browser.evaluate(SLIDES)
