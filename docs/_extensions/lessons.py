"""The page of lessons, and what their pictures say to a reader who cannot see them."""

from __future__ import annotations

import ast
import base64
import html
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from docutils import nodes
from PIL import Image
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
_THUMBNAIL_PIXELS = (480, 270)
_ROW = re.compile(r"^\| \[(\d\d) ([^]]+)\]\(([^)]+)\) \| (.*) \| (\d+) \|$", re.M)


class Lessons(SphinxDirective):
    """``{lessons}``: a card for each row of the table in notebooks/README.md."""

    def run(self) -> list[nodes.Node]:
        """Return the cards, in the table's order."""
        index = NOTEBOOKS / "README.md"
        self.env.note_dependency(str(index))
        items = []
        for number, title, file, teaches, minutes in _ROW.findall(index.read_text("utf-8")):
            self.env.note_dependency(str(NOTEBOOKS / file))
            page = f"../notebooks/{file.removesuffix('.ipynb')}.html"
            unit = "minute" if minutes == "1" else "minutes"
            items.append(
                f'<li><a href="{page}">{_thumbnail(file)}<span class="title">{number} '
                f"{html.escape(title)}</span></a>"
                f"<p>{_inline_code(teaches)}</p><p>{minutes} {unit} on two cores</p></li>"
            )
        return [nodes.raw("", f'<ul class="lessons">{"".join(items)}</ul>', format="html")]


def _inline_code(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def _thumbnail(file: str) -> str:
    """Return the first picture of a notebook, small; decoration, since the title is beside it."""
    for _, png in pictures(nbformat.read(NOTEBOOKS / file, as_version=4)):
        picture, small = Image.open(io.BytesIO(png)), io.BytesIO()
        picture.thumbnail(_THUMBNAIL_PIXELS)
        picture.convert("RGB").quantize(64).save(small, "png", optimize=True)
        data = base64.b64encode(small.getvalue()).decode()
        return f'<img alt="" role="presentation" src="data:image/png;base64,{data}">'
    return ""


def pictures(notebook: Any) -> Iterator[tuple[Any, bytes]]:
    """Yield the cell and the PNG file of each picture among a notebook's outputs."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            png = output.get("data", {}).get("image/png")
            if png:
                yield cell, base64.b64decode(png)


def describe_picture(code: str) -> str:
    """Return a sentence about what a cell draws, from its titles, axes and labels."""
    named: dict[str, list[str]] = {"title": [], "xlabel": [], "ylabel": [], "label": []}
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in ("set_title", "suptitle", "title") and node.args:
            named["title"] += _text(node.args[0])
        elif name in ("set_xlabel", "set_ylabel", "xlabel", "ylabel") and node.args:
            named[name.removeprefix("set_")] += _text(node.args[0])
        for keyword in node.keywords:
            if keyword.arg in named:
                named[keyword.arg] += _text(keyword.value)
    words = {"title": "", "xlabel": "horizontally ", "ylabel": "vertically ", "label": "curves: "}
    parts = [
        words[kind] + ", ".join(dict.fromkeys(texts)) for kind, texts in named.items() if texts
    ]
    return "; ".join(parts)


def _text(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return [
            "".join("…" if not isinstance(v, ast.Constant) else str(v.value) for v in node.values)
        ]
    return []


def describe_pictures(_: Sphinx, docname: str, source: list[str]) -> None:
    """Give each cell that draws a text for its picture: ``alt``, or what its code names."""
    if (
        not docname.startswith("notebooks/")
        or not (NOTEBOOKS / f"{Path(docname).name}.ipynb").exists()
    ):
        return
    notebook = nbformat.reads(source[0], as_version=4)
    for cell, _ in pictures(notebook):
        text = cell.metadata.get("alt") or describe_picture(cell.source)
        if text:
            cell.metadata.setdefault("mystnb", {})["image"] = {"alt": text}
    source[0] = nbformat.writes(notebook)


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive, and the texts of pictures."""
    app.add_directive("lessons", Lessons)
    app.connect("source-read", describe_pictures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
