"""Drawings with sliders, which need no kernel: HTML and JavaScript in one piece, in any browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from IPython.display import HTML

__all__ = ["NAMES", "widget"]

_FOLDER = Path(__file__).parent / "widgets"
NAMES = tuple(sorted(path.stem for path in _FOLDER.glob("*.html") if path.stem != "common"))


def widget(name: str, **data: Any) -> HTML:
    """Return a drawing that a notebook and the site show.

    Parameters
    ----------
    name : str
        ``"rounding"``: a number in a format of chosen widths, bit by bit. ``"spacing"``: the
        numbers of a format, and the distance between them. ``"loss_scale"``: gradients and what a
        scale makes of them; needs ``counts``, how many have each exponent of two,
        ``{exponent: count}``.

    Raises
    ------
    ValueError
        If there is no such drawing.
    """
    if name not in NAMES:
        raise ValueError(f"there is no drawing {name!r}; there are {', '.join(NAMES)}")
    common, page = ((_FOLDER / f"{one}.html").read_text("utf-8") for one in ("common", name))
    return HTML(common + page.replace("__DATA__", json.dumps(data)))
