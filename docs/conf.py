"""How the site is built: `make docs`.

Sources are the Markdown files of the whole checkout, so that a link works alike on the site and
where the files are read as they are; so this folder holds the configuration, and its parent is the
folder of sources. Notebooks are shown with the outputs that they are stored with, and never run.
"""

from __future__ import annotations

import re
import sys
from html import escape
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_extensions")]

import mpgluon  # noqa: E402

DESCRIPTION = (
    "Train MXNet Gluon networks in 16-bit floating point with three changes to the loop: a "
    "toolkit, twelve lessons, and figures to touch."
)
project = "mpgluon"
author = "the authors of mpgluon"
version = release = mpgluon.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "mathml",
    "reference",
    "lessons",
    "concept_map",
    "live_figures",
    "finished_site",
]

root_doc = "docs/index"
include_patterns = ["docs/**", "notebooks/*.ipynb", "*.md", "data/README.md", "notebooks/README.md"]
exclude_patterns = ["docs/_*"]

# --- pages: nothing is executed, headings have GitHub's anchors ---
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "attrs_block"]
myst_heading_anchors = 4

# --- reference: each name is documented once, by its docstring ---
nitpicky = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False
toc_object_entries_show_parents = "hide"

# Modules of the reference, in the order in which a reader needs them. A name that several of them
# have is described at the first.
public_modules = [
    "mpgluon",
    "mpgluon.amp",
    "mpgluon.fp16_utils",
    "mpgluon.checkpoint",
    "mpgluon.estimator",
    "mpgluon.diagnostics",
    "mpgluon_tools.diagnostics.observe",
    "mpgluon_tools.diagnostics.ranges",
    "mpgluon_tools.diagnostics.compare",
    "mpgluon_tools.diagnostics.sums",
    "mpgluon_tools.diagnostics.alignment",
    "mpgluon_tools.diagnostics.overflow",
    "mpgluon_tools.diagnostics.exponents",
    "mpgluon_tools.diagnostics.called_operators",
    "mpgluon_tools.recorder.numerics.files",
    "mpgluon_tools.recorder.numerics.trends",
    "mpgluon_tools.recorder.numerics.comparison",
    "mpgluon_tools.recorder.numerics.differences",
    "mpgluon_tools.recorder.steps.rerun",
    "mpgluon_tools.diagnostics.doctor",
    "mpgluon.deployment",
    "mpgluon.tools.onnx",
    "mpgluon_tools.leaving.mxnet_files",
    "mpgluon_tools.leaving.record_files",
    "mpgluon_tools.leaving.torch_writer",
    "mpgluon_tools.leaving.parity",
    "mpgluon.distributed",
    "recipes.data",
    "recipes.data.loaders",
    "recipes.training",
    "recipes.training.networks",
    "recipes.weights",
    "mpgluon.tools.zoo",
    "mpgluon.tools.plots",
    "mpgluon_tools.tables",
    "mpgluon.kernels",
    "mpgluon.errors",
    "mpgluon.cast",
    "mpgluon.formats.scaling",
    "mpgluon.formats.tensor_core",
]

# --- appearance ---
html_theme = "furo"
html_title = "mpgluon"
html_favicon = "_static/icon.svg"
html_theme_options = {"light_logo": "icon.svg", "dark_logo": "icon.svg"}
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css", "print.css"]
html_js_files = ["site.js"]
html_extra_path = ["_root"]
html_copy_source = False
html_domain_indices = False  # of modules: cut off on narrow screens, and the index has all names
html_show_sphinx = False
html_show_copyright = False
highlight_language = "text"
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"

# A link to a folder of the checkout has no page to lead to.
_LINK_TO_FOLDER = re.compile(r"\[([^][]*)\]\(([^)#:]+)\)")


def _without_links_to_folders(app: Sphinx, docname: str, source: list[str]) -> None:
    folder = Path(app.env.doc2path(docname)).parent

    def replaced(link: re.Match[str]) -> str:
        return link[1] if (folder / link[2]).is_dir() else link[0]

    source[0] = _LINK_TO_FOLDER.sub(replaced, source[0])


def _with_names_and_levels(
    _: Sphinx, __: str, ___: str, context: dict[str, Any], ____: Any
) -> None:
    """Complete what is read aloud: captions in the sidebar have a level, folds their own words."""
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace(
        'role="heading"', 'role="heading" aria-level="2"'
    )
    body = context.get("body", "")
    context["body"] = body.replace(' aria-label="Toggle hidden content"', "")


def _with_a_preview(app: Sphinx, _: str, __: str, context: dict[str, Any], ___: Any) -> None:
    """Say what a message shows of a link to the page: title, sentence and picture.

    The picture's address is complete if the site's is known: ``-D html_baseurl=ADDRESS``.
    """
    site, picture = app.config.html_baseurl, "_static/preview.png"
    shown = {
        "og:type": "website",
        "og:title": re.sub("<[^>]*>", "", context.get("title", project)),
        "og:description": DESCRIPTION,
        "og:image": f"{site}{picture}" if site else context["pathto"](picture, 1),
    }
    tags = (f'<meta property="{name}" content="{escape(text)}">' for name, text in shown.items())
    description = f'<meta name="description" content="{escape(DESCRIPTION)}">'
    context["metatags"] = "".join([context.get("metatags", ""), description, *tags])


def setup(app: Sphinx) -> None:
    """Connect what is only for these pages."""
    app.connect("html-page-context", _with_a_preview)
    app.connect("html-page-context", _with_names_and_levels, priority=900)  # after the theme
    app.connect("source-read", _without_links_to_folders)
