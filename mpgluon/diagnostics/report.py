"""Everything about one network on one page: tables and pictures in a single HTML file."""

from __future__ import annotations

import base64
import html
import math
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import mxnet as mx
from mxnet import gluon

from mpgluon import plots
from mpgluon.diagnostics.alignment import alignment_report
from mpgluon.diagnostics.compare import compare_with_fp32, suggest_keep_fp32
from mpgluon.diagnostics.doctor import DoctorReport, check_machine
from mpgluon.diagnostics.exponents import ExponentHistogram, batch_exponents
from mpgluon.diagnostics.memory import memory_estimate
from mpgluon.diagnostics.observe import Batch
from mpgluon.diagnostics.ranges import range_report
from mpgluon.numerics.formats import FLOAT16
from mpgluon.tables import Table

__all__ = ["Page", "Section", "diagnose"]


@dataclass(frozen=True)
class Section:
    """A heading, sentences, tables and pictures.

    Attributes
    ----------
    title : str
    sentences : sequence of str
        What to notice.
    tables : sequence of Table
    pictures : sequence of (bytes, str)
        PNG files, and what is to be seen on each in words.
    """

    title: str
    sentences: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[tuple[bytes, str]] = ()


@dataclass(frozen=True)
class Page:
    """What was found out about a network; ``print`` it, or write it as HTML."""

    title: str
    sections: Sequence[Section]

    def __str__(self) -> str:
        blocks = [self.title]
        for section in self.sections:
            blocks += [f"== {section.title} ==", *section.sentences, *map(str, section.tables)]
        return "\n\n".join(blocks)

    def write(self, path: Path) -> None:
        """Write one HTML file that needs nothing beside it."""
        path.write_text(_html(self), encoding="utf-8")


def diagnose(
    net: gluon.HybridBlock,
    batch: Batch,
    *,
    title: str,
    about: Sequence[str] = (),
    dtype: str = "float16",
    progress: Callable[[str], None] = lambda _: None,
) -> Page:
    """Look at a network in every way that this folder has.

    Parameters
    ----------
    net : gluon.HybridBlock
        In FP32, initialized; it is left as it was.
    batch : Batch
        With one input. A small one: all of its arrays are kept in memory for the comparison.
    title : str
    about : sequence of str
        Where the network and the batch come from.
    dtype : {"float16", "bfloat16"}
        With which FP32 is compared.
    progress : callable
        Is told what is being done.
    """
    shape = batch.arguments[0].shape
    sections = []
    progress("exponents")
    exponents = batch_exponents(net, batch)
    progress("ranges")
    at_one = range_report(net, batch)
    scale = at_one.recommended_loss_scale(headroom=2)
    scaled = range_report(net, batch, loss_scale=scale)
    weights = {p.name for p in net.collect_params().values() if len(p.shape) > 1}
    layers = {name: one for name, one in exponents.gradients.items() if name in weights}
    sections.append(
        Section(
            "Which part of float16's range is used",
            [
                "Every float is a number from 1 to 2 times 2^e; the histograms count e. float16 "
                "has all its bits from 2^-14 to 65504, fewer below, and none below 2^-25.",
                f"A loss scale of 2^{math.log2(scale):.0f} would move the gradients as far to the "
                "right as they can go with a headroom of 2.",
            ],
            [exponents.table()],
            [
                _picture(
                    lambda axes: plots.draw_exponents(
                        axes,
                        {
                            name: _as_plain(exponents.overall()[name])
                            for name in ("weights", "activations")
                        },
                    ),
                    "Exponents of weights and activations",
                ),
                _picture(
                    lambda axes: plots.draw_exponents(
                        axes,
                        {"gradients": _as_plain(exponents.overall()["gradients"])},
                        loss_scale=scale,
                    ),
                    "Exponents of the parameters' gradients, and what the loss scale makes of them",
                ),
                _picture(
                    lambda axes: plots.draw_exponent_heatmap(
                        axes, list(layers), [_as_plain(one) for one in layers.values()]
                    ),
                    "Exponents of the gradient of each weight, first layer at the top",
                    height=1.5 + 0.17 * len(layers),
                ),
            ],
        )
    )
    sections.append(
        Section(
            "What float16 would lose",
            [
                f"With the recommended loss scale of {scale:g} first, then without one. Fractions "
                "are of elements; the largest value is without the scale.",
                "Where dynamic scaling settles depends on the largest gradient of many batches: "
                "expect it within a factor of four.",
            ],
            [scaled.table(10), at_one.table(10)],
        )
    )
    progress(f"comparison of {dtype} with float32")
    comparison = compare_with_fp32(net, batch, dtype=dtype, loss_scale=scale)
    suggestion = suggest_keep_fp32(net, batch, dtype=dtype, loss_scale=scale)
    sections.append(
        Section(
            f"{dtype} beside FP32, layer by layer",
            [
                f"Relative error of the network's result: {comparison.result:.2g}. Each figure is "
                "the norm of a difference divided by the norm in FP32; the first column is the "
                "error that a layer introduces by itself.",
                f"Suggestion: {suggestion}.",
            ],
            [comparison.table(15)],
        )
    )
    progress("alignment")
    alignment = alignment_report(net, shape)
    sections.append(
        Section(
            "Shapes for Tensor Cores",
            str(alignment).split("\n\n")[0].splitlines()[: 1 + bool(alignment.misaligned)],
            [alignment.table()] if alignment.misaligned else [],
        )
    )
    progress("memory")
    memory = [memory_estimate(net, shape, ctx=ctx) for ctx in (mx.gpu(0), mx.cpu(0))]
    sections.append(
        Section(
            "Memory of a training step with SGD",
            [
                f"Estimated for input of shape {shape}, first in the arithmetic of a GPU, then in "
                "that of a CPU, where float16 is computed in FP32; workspaces are not counted.",
            ],
            [estimate.table() for estimate in memory],
        )
    )
    progress("machine")
    sections.append(Section("This machine", [], [_findings(check_machine())]))
    return Page(title, [Section("What was looked at", [*about, _versions()]), *sections])


def _as_plain(histogram: ExponentHistogram) -> tuple[Any, Any, int]:
    return histogram.exponents, histogram.counts, histogram.zeros


def _findings(report: DoctorReport) -> Table:
    return Table(
        ("level", "topic", "what", "why", "fix"),
        [(one.level, one.topic, one.what, one.why, one.fix) for one in report.findings],
    )


def _versions() -> str:
    return (
        f"MXNet {mx.__version__}, Python {platform.python_version()}, {platform.system()} on "
        f"{platform.machine()}; {FLOAT16.name} up to {FLOAT16.max:g}."
    )


def _picture(draw: Callable[[Any], Any], caption: str, *, height: float = 4.0) -> tuple[bytes, str]:
    return plots.png(draw, height=height), caption


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
       max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; }
table { border-collapse: collapse; font-size: 0.85rem; margin: 1rem 0; }
.wide { overflow-x: auto; }
th, td { padding: 0.2rem 0.7rem 0.2rem 0; text-align: left; vertical-align: top; }
th { border-bottom: 1px solid #1a1a1a; white-space: nowrap; }
.figure { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
sup { line-height: 0; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; }
figcaption { font-size: 0.85rem; color: #555; }
"""


def _html(page: Page) -> str:
    title = html.escape(page.title)
    body = "\n".join(_section_html(section) for section in page.sections)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f"{body}\n</body>\n</html>\n"
    )


_POWER = re.compile(r"\b2\^(-?\w+)")


def _raised(power: re.Match[str]) -> str:
    return f"2<sup>{power[1].replace('-', '&minus;')}</sup>"


def _section_html(section: Section) -> str:
    parts = [f"<h2>{html.escape(section.title)}</h2>"]
    parts += [
        f"<p>{_POWER.sub(_raised, html.escape(sentence))}</p>" for sentence in section.sentences
    ]
    for content, caption in section.pictures:
        data, words = base64.b64encode(content).decode(), html.escape(caption)
        parts.append(
            f'<figure><img src="data:image/png;base64,{data}" alt="{words}">'
            f"<figcaption>{words}</figcaption></figure>"
        )
    parts += [_table_html(table) for table in section.tables]
    return f"<section>\n{chr(10).join(parts)}\n</section>"


def _table_html(table: Table) -> str:
    looks = [' class="figure"' if numeric else "" for numeric in table.numeric]

    def row(cells: Sequence[str], tag: str) -> str:
        filled = (f"<{tag}{look}>{html.escape(cell)}</{tag}>" for cell, look in zip(cells, looks))
        return f"<tr>{''.join(filled)}</tr>"

    rows = "\n".join(row(cells, "td") for cells in table.rows)
    return (
        f'<div class="wide"><table>\n<thead>{row(table.headings, "th")}</thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table></div>"
    )
