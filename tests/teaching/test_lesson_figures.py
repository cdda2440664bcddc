"""The lessons' drawings stand alone, have a description, and are where a lesson looks."""

import base64
import io
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
DRAWINGS = sorted((NOTEBOOKS / "figures").glob("*.svg"))
SOURCES = sorted((NOTEBOOKS / "source").glob("*.py"))
NOTEBOOK_FILES = sorted(NOTEBOOKS.glob("*.ipynb"))
# Lessons whose pictures are wider, in pixels: they take minutes, or have measured times in them.
WIDER = {"05": 911, "07": 911}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.stem)
def test_a_drawing_is_described_legible_and_complete_in_one_file(path):
    root = ElementTree.parse(path).getroot()
    assert (root.tag, root.get("role")) == (f"{SVG}svg", "img")
    texts = {child.get("id"): (child.text or "").strip() for child in root[:2]}
    assert list(texts) == root.get("aria-labelledby").split() == ["title", "desc"]
    assert 0 < len(texts["title"]) < len(texts["desc"])

    width, height = (float(root.get(name)) for name in ("width", "height"))
    assert root.get("viewBox") == f"0 0 {width:g} {height:g}"
    assert width == 720
    background = root.find(f"{SVG}rect").attrib
    expected = {"width": f"{width:g}", "height": f"{height:g}", "fill": "#ffffff"}
    assert {name: background[name] for name in expected} == expected
    sizes = re.findall(r"font(?:-size)?: ([\d.]+)px", root.find(f"{SVG}style").text)
    assert min(map(float, sizes)) >= 13

    allowed = {"svg", "title", "desc", "style", "marker", "rect", "circle", "path", "text"}
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= allowed
    text = path.read_text("utf-8").replace(f'xmlns="{SVG[1:-1]}"', "")
    assert not re.search(r"href|//|@import|<!DOCTYPE|<\?xml-", text)
    inside = {element.get("id") for element in root.iter()}
    assert set(re.findall(r"url\(#(\w+)\)", text)) <= inside
    assert text.count("url(") == text.count("url(#")


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_drawings_that_a_lesson_names_exist_and_have_an_alternative_text(source):
    text = source.read_text("utf-8")
    named = re.findall(r"!\[([^]]*)\]\((figures/[^)]*)\)", text)
    assert text.count("figures/") == len(named)
    for alternative, file in named:
        assert (NOTEBOOKS / file).is_file(), f"{source.name} names {file}"
        assert len(alternative.replace("# ", "").split()) > 3


def test_each_lesson_shows_the_drawing_of_its_number():
    lessons = {source.stem[:2]: source.read_text("utf-8") for source in SOURCES}
    shown = {number: re.findall(r"figures/([\w.]+)", text) for number, text in lessons.items()}
    assert shown == {path.stem[:2]: [path.name] for path in DRAWINGS}


@pytest.mark.parametrize("notebook", NOTEBOOK_FILES, ids=lambda path: path.stem)
def test_words_in_the_pictures_of_a_lesson_can_be_read_on_a_page_of_420_pixels(notebook):
    """Words of Matplotlib's 10 points are 1000 / 72 pixels high; 9 should remain of them."""
    widest = WIDER.get(notebook.stem[:2], 1000 / 72 * 420 / 9)
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in str(output)]
    widths = [Image.open(io.BytesIO(base64.b64decode(picture))).width for picture in pictures]
    assert 0 < max(widths) <= widest
