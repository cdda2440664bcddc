"""A comparison of a port as a page: the difference of each layer in a picture, and the table.

One HTML file that loads nothing else. This module needs no more than a port's environment has.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator

from mpgluon_tools.leaving.parity import Parity, Part

__all__ = ["parity_page"]

_WIDTH, _HEIGHT, _LEFT, _BELOW = 900, 260, 60, 24  # of the picture, and of its margins
_LOWEST, _HIGHEST = -1.0, 8.0  # exponents of ten of the units that it shows
_TICKS = {0: "1", 2: "100", 4: "10⁴", 6: "10⁶", 8: "10⁸"}

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: light-dark(#1a1a1a, #e8e8e8);
  --paper: light-dark(#ffffff, #161616); --faint: light-dark(#d8d8d8, #3a3a3a);
  --right: light-dark(#0067a5, #56b4e9); --wrong: light-dark(#b34700, #ff9a57); }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper); }}
svg {{ width: 100%; min-width: 40rem; height: auto; }}
svg text {{ fill: var(--ink); font-size: 13px; }}
.line {{ stroke: var(--faint); }} .limit {{ stroke: var(--ink); stroke-width: 2; }}
circle {{ fill: var(--right); stroke: var(--right); stroke-width: 1.5; }}
circle.operand {{ fill: none; }} circle.wrong {{ stroke: var(--wrong); }}
circle.wrong:not(.operand) {{ fill: var(--wrong); }}
div {{ overflow-x: auto; }} table {{ border-collapse: collapse; }}
td, th {{ padding: .15rem .7rem; border-bottom: 1px solid var(--faint); }}
</style></head><body>
<h1>{title}</h1>
<p><strong>{verdict}</strong></p>
<div><svg viewBox="0 0 {width} {height}" role="img" aria-label="The difference of each layer">
{picture}</svg></div>
<p>Each layer from the left to the right, on the recorded operand, in FP32. A dot is the norm of
the difference of its result, a ring of its operand, in units of 2<sup>-24</sup> of the norm; the
dash is what sums in another order explain. What differs is orange: point at it for its name.</p>
<div>{table}</div>
</body></html>
"""


def parity_page(parity: Parity, title: str) -> str:
    """Return the page of a comparison.

    Parameters
    ----------
    parity : Parity
    title : str
        Such as ``"port.py and layers.npz"``.
    """
    return _PAGE.format(
        title=html.escape(title), verdict=html.escape(_sentence(parity.verdict)), width=_WIDTH,
        height=_HEIGHT, picture="".join(_picture(parity)), table=parity.table().to_html(),
    )  # fmt: skip


def _picture(parity: Parity) -> Iterator[str]:
    for exponent, label in _TICKS.items():
        y = _place(10.0**exponent)
        yield f'<line class="line" x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    names = list(dict.fromkeys(part.name for part in parity.parts))
    step = (_WIDTH - _LEFT) / max(len(names), 1)
    for part in parity.parts:
        x = _LEFT + (names.index(part.name) + 0.5) * step
        if part.limit > 0:
            y = _place(part.limit)
            yield (f'<line class="limit" x1="{x - 0.3 * step:.1f}" x2="{x + 0.3 * step:.1f}" '
                   f'y1="{y:.1f}" y2="{y:.1f}"/>')  # fmt: skip
        kinds = "operand " * bool(part.follows) + "wrong" * (not part.is_right)
        yield (f'<circle class="{kinds.strip()}" cx="{x:.1f}" cy="{_place(part.units):.1f}" r="4">'
               f"<title>{html.escape(_words(part))}</title></circle>")  # fmt: skip
    yield f'<text x="{_LEFT}" y="{_HEIGHT - 6}">the first layer</text>'
    yield f'<text x="{_WIDTH}" y="{_HEIGHT - 6}" text-anchor="end">the last one</text>'


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _place(units: float) -> float:
    """Return where the picture shows a difference, from the top; the ends show all beyond them."""
    exponent = math.log10(units) if 0 < units < math.inf else _HIGHEST if units else _LOWEST
    share = (min(max(exponent, _LOWEST), _HIGHEST) - _LOWEST) / (_HIGHEST - _LOWEST)
    return 8 + (1 - share) * (_HEIGHT - _BELOW - 8)


def _words(part: Part) -> str:
    where = f"between {part.follows} and {part.name}" if part.follows else part.name
    return f"{where}: {part.said or f'{part.units:.3g}, at most {part.limit:.0f}'}"
