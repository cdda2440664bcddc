"""Everything about one network on one page: tables and pictures in a single HTML file."""

from __future__ import annotations

import base64
import math
import platform
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional

from mpgluon.base.blocks import shape_of
from mpgluon.base.files import disk_error
from mpgluon.formats.float_format import FLOAT16, format_named
from mpgluon_tools import plots
from mpgluon_tools.diagnostics.alignment import AlignmentReport, alignment_report
from mpgluon_tools.diagnostics.called_operators import operator_formats
from mpgluon_tools.diagnostics.compare import (
    Comparison,
    Suggestion,
    compare_with_fp32,
    suggest_keep_fp32,
)
from mpgluon_tools.diagnostics.doctor import DoctorReport, check_machine
from mpgluon_tools.diagnostics.exponents import BatchExponents, batch_exponents
from mpgluon_tools.diagnostics.observe import Batch, complete
from mpgluon_tools.diagnostics.ranges import RangeReport, range_report
from mpgluon_tools.diagnostics.reference import sixteen_bits
from mpgluon_tools.diagnostics.scales import loss_scales
from mpgluon_tools.extras import extra
from mpgluon_tools.report.verdict import HEADROOM, judge
from mpgluon_tools.tables import Table

import mxnet as mx
from mxnet import gluon

with extra("report"):
    import jinja2
    import markupsafe

__all__ = ["Page", "Section", "diagnose"]

_ABOUT_SHARES = (
    "Shares of the numbers that are not zero, in the gradients of each layer's parameters and of "
    "its output. Lost: below 2^-24, the smallest float16; most become zero. Subnormal: below "
    "2^-14, with fewer bits. Overflow: from 2^16; the step is skipped."
)


@dataclass(frozen=True)
class Section:
    """A heading, sentences, tables and pictures."""

    title: str
    sentences: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[tuple[bytes, str]] = ()  # PNG files, each with a caption
    lines: str = ""  # Python to paste
    machine: Optional[DoctorReport] = None  # in text, in the place of the section's table


@dataclass(frozen=True)
class Page:
    """The report on a network; ``print`` it, or write it as HTML."""

    title: str
    sections: Sequence[Section]

    def __str__(self) -> str:
        return self.text()

    def text(self, width: Optional[int] = None) -> str:
        """Return the report without pictures, by default in lines of any length.

        Parameters
        ----------
        width : int, optional
            Characters of a line: sentences and tables are broken, Python is not.
        """

        def sentence(words: str) -> str:
            return words if width is None else textwrap.fill(words, width, break_long_words=False)

        def table(one: Table) -> str:
            return str(one) if width is None else one.fitted(width)

        blocks = [sentence(self.title)]
        for section in self.sections:
            blocks += [f"== {section.title} ==", *map(sentence, section.sentences)]
            if section.machine is None:
                blocks += map(table, section.tables)
            else:
                blocks.append(section.machine.text(width or 100))
            if section.lines:
                blocks.append(section.lines.rstrip())
        return "\n\n".join(blocks)

    def write(self, path: Path) -> None:
        """Write one HTML file that needs no other file."""
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("mpgluon_tools", "report"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            keep_trailing_newline=True,
        )
        environment.filters["marked"] = _marked
        environment.filters["base64"] = lambda png: base64.b64encode(png).decode()
        text = environment.get_template("report.html.jinja").render(page=self)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise disk_error(error, path, "examine the network again") from error


def _marked(sentence: str) -> markupsafe.Markup:
    """Return a sentence with 2^-14 and `names` as HTML writes powers and code."""
    escaped = str(markupsafe.escape(sentence))

    def raised(power: re.Match[str]) -> str:
        return f"2<sup>{power[1].replace('-', '&minus;')}</sup>"

    coded = re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)
    return markupsafe.Markup(re.sub(r"\b2\^(-?\w+)", raised, coded))


def diagnose(
    net: gluon.HybridBlock,
    batch: Batch,
    *,
    title: str,
    about: Sequence[str] = (),
    dtype: str = "float16",
    progress: Callable[[str], None] = lambda _: None,
) -> Page:
    """Examine a network with every tool of this folder.

    Parameters
    ----------
    net : gluon.HybridBlock
        In FP32, initialized; it is not changed.
    batch : Batch
        A small one: all of its arrays are kept in memory for the comparison.
    title : str
    about : sequence of str
        Where the network and the batch come from.
    dtype : {"float16", "bfloat16"}
        The format to compare with FP32.
    progress : callable
        Receives the name of each step as it begins.
    """
    complete(net, batch)
    versions = (
        f"MXNet {mx.__version__}, Python {platform.python_version()}, {platform.system()} on "
        f"{platform.machine()}; {FLOAT16.name} up to {FLOAT16.max:g}."
    )
    looked_at = Section("What was looked at", [*about, versions])
    progress("exponents")
    exponents = batch_exponents(net, batch)
    progress("ranges")
    at_one = range_report(net, batch)
    finite = not at_one.broken_gradients()
    scale = at_one.recommended_loss_scale(HEADROOM) if finite else 1.0
    scaled = range_report(net, batch, loss_scale=scale)
    ranges = [_exponents(net, exponents, scale, finite=finite), _losses(at_one, scaled)]
    progress(f"comparison of {dtype} with float32")
    comparison = compare_with_fp32(net, batch, dtype=dtype, loss_scale=scale)
    suggestion = suggest_keep_fp32(net, batch, dtype=dtype, loss_scale=scale)
    formats = [_comparison(comparison, suggestion, dtype), _operators(net, batch, dtype)]
    progress("verdict")
    scales = loss_scales(net, at_one, scale if dtype == "float16" else 1.0, format_named(dtype))
    verdict = judge(net, batch, at_one, scales, suggestion, dtype=dtype)
    said = [f"{verdict.sentence}.", *verdict.reasons]
    if verdict.lines:
        said.append("The lines to paste, which use your net, loss_fn, inputs and labels:")
    first = [Section("Verdict", said, lines=verdict.lines)]
    if dtype == "float16" and finite and scales.gradients:
        heading = "Gradients at the recommended loss scale"
        first.append(Section(heading, [_ABOUT_SHARES, scales.summary()], [scales.table()]))
    progress("alignment")
    alignment = _alignment(alignment_report(net, [one.shape for one in batch.arguments]))
    progress("machine")
    machine = check_machine()
    cells = [(one.level, one.topic, one.what, one.why, one.fix) for one in machine.findings]
    table = Table(("level", "topic", "what", "why", "fix"), cells)
    last = Section("This machine", [], [table], machine=machine)
    return Page(title, [*first, looked_at, *ranges, *formats, alignment, last])


def _exponents(
    net: gluon.Block, exponents: BatchExponents, scale: float, *, finite: bool
) -> Section:
    recommended = (
        f"A loss scale of 2^{math.log2(scale):.0f} would move the gradients as far to the right as "
        f"they can go with a headroom of {HEADROOM:g}."
        if finite
        else "Gradients are not finite in FP32 already, so no loss scale is recommended."
    )
    return Section(
        "Which part of float16's range is used",
        [
            "Every float is a number from 1 to 2 times 2^e; the histograms count e. float16 "
            "has all its bits from 2^-14 to 65504, fewer below, and none below 2^-25.",
            recommended,
        ],
        [exponents.table()],
        _pictures(net, exponents, scale),
    )


def _losses(at_one: RangeReport, scaled: RangeReport) -> Section:
    return Section(
        "What float16 would lose",
        [
            f"With a loss scale of {scaled.loss_scale:g} first, then without one. Fractions "
            "are of elements; the largest value is without the scale.",
            "Where dynamic scaling settles depends on the largest gradient of many batches: "
            "expect it within a factor of four.",
        ],
        [scaled.table(10), at_one.table(10)],
    )


def _comparison(comparison: Comparison, suggestion: Suggestion, dtype: str) -> Section:
    return Section(
        f"{dtype} against FP32, layer by layer",
        [
            f"Relative error of the network's result: {comparison.result:.2g}. Each figure is "
            "the norm of a difference divided by the norm in FP32; the first column is the "
            "error that a layer introduces by itself.",
            f"Suggestion: {suggestion}.",
        ],
        [comparison.table(15)],
    )


def _operators(net: gluon.HybridBlock, batch: Batch, dtype: str) -> Section:
    with sixteen_bits(net, batch, dtype):
        operators = operator_formats(net, batch)
    return Section(
        "Operators by format",
        [
            f"Calls in one forward pass of the network in {dtype}. A product's format is that "
            "of its operands; it sums in FP32. Operators that only move numbers count too."
        ],
        [operators.table()],
    )


def _alignment(report: AlignmentReport) -> Section:
    return Section(
        "Shapes for Tensor Cores",
        str(report).splitlines()[: 1 + bool(report.misaligned)],
        [report.table()] if report.misaligned else [],
    )


def _pictures(net: gluon.Block, exponents: BatchExponents, scale: float) -> list[tuple[bytes, str]]:
    """Draw the histograms of weights and activations, of gradients, and of each layer with one."""
    overall = exponents.overall()
    gradients = {"gradients": overall["gradients"]}
    values = {name: overall[name] for name in ("weights", "activations")}
    weights = {p.name for p in net.collect_params().values() if len(shape_of(p)) > 1}
    layers = {name: one for name, one in exponents.gradients.items() if name in weights}
    names, histograms = list(layers), list(layers.values())
    pictures = [
        (
            plots.png(lambda axes: plots.draw_exponents(axes, values)),
            "Exponents of weights and activations",
        ),
        (
            plots.png(lambda axes: plots.draw_exponents(axes, gradients, loss_scale=scale)),
            "Exponents of the parameters' gradients, and what the loss scale makes of them",
        ),
    ]
    if layers:
        heatmap = plots.png(
            lambda axes: plots.draw_exponent_heatmap(axes, names, histograms),
            height=1.5 + 0.17 * len(layers),
        )
        pictures.append(
            (heatmap, "Exponents of the gradient of each weight, first layer at the top")
        )
    return pictures
