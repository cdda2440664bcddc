"""The site's script: a series of pictures becomes a slider, and stays links without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import EXECUTABLE, Browser

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "_static" / "site.js"
PAGE = """<!DOCTYPE html>
<p><img src="3.png" alt="the picture"></p>
<div class="frames"><p>{links}</p></div>
<p><img src="other.png" alt="another"></p>
"""
SHOWN = "document.querySelector('img').src.split('/').pop()"
NAMED = "document.querySelector('output').textContent"


@pytest.fixture
def browser(tmp_path):
    if EXECUTABLE is None:
        pytest.skip("there is no chromium or google-chrome to open the page in")
    links = "\n".join(f'<a href="{number}.png">epoch {number}</a>' for number in (1, 2, 3))
    page = tmp_path / "page.html"
    page.write_text(PAGE.format(links=links) + f"<script>{SCRIPT.read_text()}</script>")
    with Browser(tmp_path / "profile") as browser:
        browser.open(page.as_uri())
        yield browser


@pytest.mark.multiprocess
def test_a_series_of_pictures_is_a_slider_for_keys_too(browser):
    assert browser.evaluate("document.querySelectorAll('.frames a').length") == 0
    assert (browser.evaluate(SHOWN), browser.evaluate(NAMED)) == ("3.png", "epoch 3")
    browser.evaluate("document.querySelector('input').focus()")
    for expected in ("2", "1", "1"):
        browser.press("ArrowLeft")
        assert browser.evaluate(SHOWN) == f"{expected}.png"
        assert browser.evaluate(NAMED) == f"epoch {expected}"
    slider = "document.querySelector('input')"
    assert browser.evaluate(f"{slider}.getAttribute('aria-valuetext')") == "epoch 1"
    assert browser.evaluate(f"{slider}.labels.length") == 1
    assert browser.evaluate("document.querySelectorAll('img')[1].src").endswith("/other.png")
