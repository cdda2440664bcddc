"""Live figures: ```` ```{live} NAME ````, around what is shown without JavaScript.

Their arithmetic is the package's own C++, compiled to WebAssembly (`docs/_live/kernels.cc`), and is
stored in a script with the formats' numbers, so that pages opened from a disk work too. The content
of the directive is shown where scripts do not run. In the site, a lesson's link to a figure of
docs/play.md is followed by the figure.
"""

from __future__ import annotations

import base64
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpgluon.formats.float_format import SMALL, TFLOAT32, FloatFormat, format_named
from mpgluon.formats.tensor_core import ACCUMULATIONS

import nbformat
from docutils import nodes
from lessons import is_lesson
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "docs" / "_live"
PLAY = ROOT / "docs" / "play.md"
_LINK = re.compile(r"\(\.\./docs/play\.md#([a-z0-9-]+)\)")
FIGURES = ("number", "sum", "gradients", "hunt", "training")
"""The figures, each with a script of its own, and perhaps more, NAME.*.js, which come before it."""

FORMATS: dict[str, FloatFormat] = {
    "FP32": format_named("float32"),
    "TF32": TFLOAT32,
    "BF16": format_named("bfloat16"),
    "FP16": format_named("float16"),
    **dict(zip(("E4M3", "E5M2", "E3M2", "E2M3", "E2M1"), SMALL)),
}
"""The formats under the names that the figures show."""


class live(nodes.General, nodes.Element):  # noqa: N801 - as docutils names its nodes
    """A figure; its children are what is shown without JavaScript."""


class Live(SphinxDirective):
    """``{live} NAME``: one of the figures."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the figure around the content."""
        name = self.arguments[0]
        if name not in FIGURES:
            raise self.error(f"unknown live figure {name!r}; choose one of {', '.join(FIGURES)}")
        node = live(name=name)
        self.state.nested_parse(self.content, self.content_offset, node)
        return [node]


def scripts_of(figures: Sequence[str]) -> list[str]:
    """Return the names of the scripts of some figures, in the order in which a page loads them."""
    more = {one: sorted(path.name for path in SOURCES.glob(f"{one}.*.js")) for one in figures}
    return [
        "kernels.js",
        "live.js",
        *(name for one in figures for name in (*more[one], f"{one}.js")),
    ]


def compile_kernels(path: Path) -> None:
    """Compile the kernels to a WebAssembly module without imports.

    Raises
    ------
    ExtensionError
        If the compiler fails.
    """
    command = [
        *(sys.executable, "-m", "ziglang", "c++", "-target", "wasm32-wasi"),
        *("-mexec-model=reactor", "-std=c++14", "-O2", "-s", "-fno-exceptions"),
        *("-ffp-contract=off", "-I", str(ROOT / "mpgluon" / "kernels")),
        *(str(SOURCES / "kernels.cc"), "-o", str(path)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExtensionError(f"the kernels of the live figures do not compile: {done.stderr}")


def kernels_script(module: bytes) -> str:
    """Return the script that holds the module and the numbers of the formats."""
    numbers = {
        name: {
            "significandBits": fmt.significand_bits,
            "exponentBits": fmt.exponent_bits,
            "minExponent": fmt.min_exponent,
            "largest": fmt.max,
            "beyond": _text(fmt.overflow),
            "finiteOnly": fmt.finite_only,
            "hasNaN": fmt.has_nan,
        }
        for name, fmt in FORMATS.items()
    }
    data = {
        "module": base64.b64encode(module).decode(),
        "formats": numbers,
        "accumulations": {name: list(how) for name, how in ACCUMULATIONS.items()},
    }
    return f'"use strict";\nconst mpgluonKernels = {json.dumps(data)};\n'


def _text(number: float) -> str:
    """Return a number as JavaScript's `Number` reads it."""
    return {math.inf: "Infinity"}.get(number, "NaN" if math.isnan(number) else str(number))


def figures_by_anchor() -> dict[str, str]:
    """Return the text of each figure of docs/play.md, by the anchor of its section."""
    figures = {}
    for section in PLAY.read_text("utf-8").split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        figure = re.search(r"^```{live} .*?^```$", text, re.M | re.S)
        if figure is not None:
            figures[re.sub(r"[^a-z0-9]+", "-", heading.lower()).strip("-")] = figure[0]
    return figures


def embed_figures(app: Sphinx, docname: str, source: list[str]) -> None:
    """Show a figure below each paragraph of a lesson that links to it."""
    if not is_lesson(docname):
        return
    app.env.note_dependency(str(PLAY))
    figures = figures_by_anchor()
    notebook = nbformat.reads(source[0], as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            paragraphs = cell.source.split("\n\n")
            for place, paragraph in reversed(list(enumerate(paragraphs))):
                for anchor in reversed(_LINK.findall(paragraph)):
                    paragraphs.insert(place + 1, figures[anchor])
            cell.source = "\n\n".join(paragraphs)
    source[0] = nbformat.writes(notebook)


def _make_scripts(app: Sphinx, config: Config) -> None:
    """Write the scripts into a folder of static files."""
    folder = Path(app.outdir).parent / "live"
    (folder / "live").mkdir(parents=True, exist_ok=True)
    module = folder / "kernels.wasm"
    compile_kernels(module)
    (folder / "live" / "kernels.js").write_text(kernels_script(module.read_bytes()))
    module.unlink()
    for source in [*SOURCES.glob("*.js"), *SOURCES.glob("*.css")]:
        (folder / "live" / source.name).write_text(source.read_text("utf-8"), "utf-8")
    config.html_static_path.append(str(folder))


def _add_scripts(
    app: Sphinx, _: str, __: str, ___: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Let a page load the scripts of its figures, and no others."""
    figures = dict.fromkeys(node["name"] for node in doctree.findall(live)) if doctree else {}
    if figures:
        app.add_css_file("live/live.css")
    for script in scripts_of(list(figures)) if figures else []:
        app.add_js_file(f"live/{script}", loading_method="defer")


def _begin(translator: Any, node: live) -> None:
    translator.body.append(f'<div class="live" data-figure="{node["name"]}">')


def _end(translator: Any, _: live) -> None:
    translator.body.append("</div>")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_node(live, html=(_begin, _end))
    app.add_directive("live", Live)
    app.connect("config-inited", _make_scripts)
    app.connect("source-read", embed_figures)
    app.connect("html-page-context", _add_scripts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
