"""The page of sources leads somewhere: its links, and the names and options in its code."""

from __future__ import annotations

import re
from pathlib import Path

import mpgluon
from mpgluon import diagnostics, fp16_utils

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "sources.md"
LINKS = sorted(set(re.findall(r"\]\(([^)\s]+)\)", re.sub(r"\n", " ", PAGE.read_text("utf-8")))))
NAMES = {"mpgluon": mpgluon, "diagnostics": diagnostics, "fp16_utils": fp16_utils}


def anchors(page: Path) -> set[str]:
    """Return the names of a page's headings in links."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("link", LINKS)
def test_each_link_leads_to_a_page_and_a_heading(link):
    path, _, heading = link.partition("#")
    page = PAGE if not path else (PAGE.parent / path).resolve()
    assert page.is_file(), link
    if heading:
        assert heading in anchors(page), link


def test_each_name_and_script_in_code_exists():
    text = PAGE.read_text("utf-8")
    named = re.findall(r"`(mpgluon|diagnostics|fp16_utils)\.(\w+)", text)
    assert len(named) > 3
    for module, name in named:
        assert hasattr(NAMES[module], name), name
    for script in re.findall(r"`(scripts/\w+\.py)", text):
        assert (ROOT / script).is_file(), script
