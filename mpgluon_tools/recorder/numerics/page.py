"""A page that shows a recording: loss, a map of all layers over the steps, histograms of exponents.

The page is one HTML file that loads nothing else. Its map has a row for each tensor and at most 200
columns: of more recorded steps, several share a column, which has the largest of their numbers and
the sum of their histograms. Numbers are stored with an error of at most 0.2 %, and the shares of
histograms in steps of a factor of the square root of two. The page of a network of any size has at
most about three million characters.
"""

from __future__ import annotations

import base64
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional

from mpgluon.base.files import disk_error
from mpgluon_tools import plots
from mpgluon_tools.extras import extra
from mpgluon_tools.recorder.numerics.files import NumericsStep, Recording, Tensor, TensorName
from mpgluon_tools.tables import Table, counted, percent

import numpy as np
import numpy.typing as npt

with extra("report"):
    import jinja2

__all__ = ["QUANTITIES", "History", "columns_of", "histories_of", "write_page"]

_KINDS = ("activation", "activation gradient", "gradient", "weight", "master", "update")
_COLUMNS, _CELLS, _POINTS = 200, 130_000, 1000  # of the map; tensors times columns; of a curve
_ROWS, _LABELS = 20, 60  # of the table, of the picture


class Quantity(NamedTuple):
    """A number of each tensor: a share in [0, 1], or one of which the map shows the exponent."""

    label: str
    meaning: str
    is_share: bool
    of_updates_only: bool = False


QUANTITIES = (
    Quantity("largest value", "The largest absolute value that is finite.", False),
    Quantity("norm", "The square root of the sum of the squares of the finite values.", False),
    Quantity(
        "share that underflows",
        "The share of the nonzero values below the smallest normal number of the tensor's format.",
        is_share=True,
    ),
    Quantity("share not finite", "The share of all values that are infinite or NaN.", True),
    Quantity("share of zeros", "The share of all values that are 0.", True),
    Quantity(
        "update over weight",
        "The norm of the update over the norm of the weight, or of its FP32 master.",
        is_share=False,
        of_updates_only=True,
    ),
    Quantity(
        "updates lost to rounding",
        "The share of the elements with a nonzero gradient that the step did not change.",
        is_share=True,
        of_updates_only=True,
    ),
)


@dataclass(frozen=True)
class History:
    """The numbers of one tensor, in one format, over the columns of the map.

    Attributes
    ----------
    last : Tensor
        As it was recorded last.
    shapes : list of str
        All shapes that it had.
    values : array of float64, shape (columns, len(QUANTITIES))
        The largest of the steps of each column; NaN where there is none.
    shares : array of uint8, shape (columns, 255)
        Codes of the shares of the exponents from -127 on, of all steps of each column.
    """

    last: Tensor
    shapes: list[str]
    values: npt.NDArray[np.float64]
    shares: npt.NDArray[np.uint8]


def columns_of(recording: Recording, cells: int = _CELLS) -> list[Sequence[int]]:
    """Return which recorded steps share a column: at most ``cells`` tensors times columns."""
    numbers = recording.numbers
    tensors = len(recording.step(numbers[0]).of(*_KINDS)) if numbers else 1
    most = max(1, min(_COLUMNS, cells // max(tensors, 1)))
    together = -(-len(numbers) // most) or 1
    return [numbers[start : start + together] for start in range(0, len(numbers), together)]


def histories_of(
    recording: Recording, columns: Sequence[Sequence[int]]
) -> dict[str, list[History]]:
    """Read the recorded steps; return the tensors of each kind in the order of the network."""
    histories: dict[tuple[TensorName, str], History] = {}
    for column, numbers in enumerate(columns):
        counts: dict[tuple[TensorName, str], Any] = {}
        for step in map(recording.step, numbers):
            for tensor in step.of(*_KINDS):
                key = (tensor.id, tensor.format)
                if key not in histories:
                    empty = np.full((len(columns), len(QUANTITIES)), math.nan)
                    histories[key] = History(
                        tensor, [], empty, np.zeros((len(columns), 255), np.uint8)
                    )
                own = histories[key]
                own.values[column] = np.fmax(own.values[column], _values(tensor, step))
                counts[key] = counts.get(key, 0) + tensor.statistics.counts
                if str(tensor.shape) not in own.shapes:
                    own.shapes.append(str(tensor.shape))
        for key, count in counts.items():
            histories[key].shares[column] = _share_codes(count)
    kinds = {kind: [h for key, h in histories.items() if key[0].kind == kind] for kind in _KINDS}
    kinds["activation gradient"].reverse()  # recorded in the order of the backward pass
    return {kind: rows for kind, rows in kinds.items() if rows}


def _values(tensor: Tensor, step: NumericsStep) -> list[float]:
    """Return the numbers of ``QUANTITIES``."""
    numbers = tensor.statistics
    return [
        math.nan if numbers.not_finite == numbers.size else numbers.largest,
        math.nan if numbers.not_finite == numbers.size else numbers.norm,
        tensor.underflow,
        tensor.overflow,
        numbers.zeros / max(numbers.size, 1),
        *_of_update(tensor, step),
    ]


def _of_update(tensor: Tensor, step: NumericsStep) -> tuple[float, float]:
    """Return the last two numbers: NaN of all that is not the update of a step that was taken."""
    if tensor.id.kind != "update" or step.line.get("skipped"):
        return math.nan, math.nan
    weight, master, gradient = (
        None if one is None else one.statistics
        for one in (
            step.tensors.get(TensorName(kind, tensor.id.name))
            for kind in ("weight", "master", "gradient")
        )
    )
    changed, update = master or weight, tensor.statistics
    ratio = update.norm / changed.norm if changed is not None and changed.norm else math.nan
    moving = 0 if gradient is None else update.size - gradient.zeros
    if gradient is None or not moving:
        return ratio, math.nan
    return ratio, max(update.zeros - gradient.zeros, 0) / moving


def _share_codes(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Return 0 for no share, otherwise 81 plus twice the base-two logarithm of the share."""
    logarithms = np.log2(np.maximum(counts, 1) / max(counts.sum(), 1))
    return np.where(counts, np.clip(np.rint(81 + 2 * logarithms), 1, 81), 0).astype(np.uint8)


def _codes(values: npt.NDArray[np.float64]) -> npt.NDArray[np.uint16]:
    """Return 65535 for NaN, 0 for 0, otherwise 32641 plus 204 times the base-two logarithm."""
    codes = 32641 + np.rint(204 * np.log2(np.where(values > 0, values, 1)))
    codes = np.where(values > 0, codes.clip(1, 65534), 0)
    return np.where(np.isnan(values), 65535, codes).astype("<u2")


def _data(
    recording: Recording,
    columns: Sequence[Sequence[int]],
    kinds: Mapping[str, Sequence[History]],
) -> dict[str, Any]:
    """Return the data that the page's script draws; ``numbers`` has all codes, compressed."""
    lines = recording.lines
    steps = [*(line["step"] for line in lines), *recording.numbers] or [1]
    domain = (min(steps) - 0.5, max(steps) + 0.5)
    maps, values, shares = [], [], []
    for kind, rows in kinds.items():
        of_all = np.stack([one.shares for one in rows])
        used = np.flatnonzero(of_all.any(axis=(0, 1)))
        first, end = (int(used[0]), int(used[-1]) + 1) if used.size else (0, 0)
        chosen = [n for n, q in enumerate(QUANTITIES) if kind == "update" or not q.of_updates_only]
        values += [_codes(np.stack([one.values[:, n] for one in rows])).tobytes() for n in chosen]
        shares.append(of_all[:, :, first:end].tobytes())
        maps.append(
            {
                **{"kind": kind, "rows": [_about(one) for one in rows], "quantities": chosen},
                **{"first": first - 127, "exponents": end - first},
            }
        )
    scales = _points(lines, "loss_scale")
    skipped = [line["step"] for line in lines if line.get("skipped")]
    return {
        "domain": domain,
        "columns": [
            [numbers[0], numbers[-1], len(numbers), *edges]
            for numbers, edges in zip(columns, _edges(columns, domain))
        ],
        "loss": _points(lines, "loss"),
        "scale": scales if len({scale for _, scale in scales}) > 1 else [],
        "skipped": skipped[:: -(-len(skipped) // _POINTS) or 1],
        "quantities": [one._asdict() for one in QUANTITIES],
        "maps": maps,
        "numbers": base64.b64encode(zlib.compress(b"".join(values + shares), 9)).decode(),
    }


def _about(row: History) -> dict[str, Any]:
    tensor, fmt = row.last, row.last.float_format
    return {
        "name": tensor.id.name,
        "call": tensor.id.call,
        "block": tensor.block,
        "format": tensor.format,
        "shape": " or ".join(row.shapes[:3]) + " or others" * (len(row.shapes) > 3),
        # Exponents; the subnormal numbers of FP32 are all counted as -127.
        "subnormal": round(math.log2(fmt.smallest_subnormal)),
        "normal": fmt.min_exponent,
        "largest": fmt.max,
    }


def _edges(
    columns: Sequence[Sequence[int]], domain: tuple[float, float]
) -> list[tuple[float, float]]:
    """Return where each column begins and ends: half way to the recorded steps next to it."""
    if not columns:
        return []
    inner = [(a[-1] + b[0]) / 2 for a, b in zip(columns, columns[1:])]
    before = inner[0] - columns[0][-1] if inner else 0.5
    after = columns[-1][0] - inner[-1] if inner else 0.5
    begin, end = max(domain[0], columns[0][0] - before), min(domain[1], columns[-1][-1] + after)
    return list(zip([begin, *inner], [*inner, end]))


def _points(lines: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, Optional[float]]]:
    """Return steps and values, of many steps the extremes; ``None`` is infinite or NaN."""
    known = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    points: list[tuple[int, Optional[float]]] = []
    together = -(-len(known) // _POINTS) or 1
    for start in range(0, len(known), together):
        group = known[start : start + together]
        finite = sorted((p for p in group if math.isfinite(p[1])), key=lambda p: p[1])
        other = [(step, None) for step, value in group if not math.isfinite(value)]
        points += sorted({*finite[:1], *finite[-1:], *other[:1]}, key=lambda p: p[0])
    return points


def _picture(data: Mapping[str, Any], rows: Sequence[History]) -> bytes:
    """Draw the loss, and the largest values of one kind of tensor, over the steps."""
    labels = [re.sub(r"[^ -~]|\$", "?", one.last.id.name)[-40:] for one in rows]
    values = np.stack([one.values[:, 0] for one in rows])
    powers = np.log2(np.where(values > 0, values, math.nan))
    edges = [column[3] for column in data["columns"]] + [data["columns"][-1][4]]
    every = -(-len(labels) // _LABELS)

    def draw(axes: Any) -> None:
        figure = axes.figure
        axes.remove()
        heights = [1, 0.5 + min(len(labels), _LABELS) / 15]
        above, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": heights})
        losses = [(step, math.nan if loss is None else loss) for step, loss in data["loss"]]
        above.plot(*(zip(*losses) if losses else ((), ())), color="black", linewidth=1)
        above.set_ylabel("loss")
        mesh = below.pcolormesh(edges, np.arange(len(labels) + 1), powers, cmap="viridis")
        figure.colorbar(mesh, ax=below, label=r"$\log_2$ of the largest value")
        below.set_yticks(np.arange(0, len(labels), every) + 0.5, labels[::every], fontsize="small")
        below.set(xlabel="step", xlim=data["domain"], ylim=(len(labels), 0))

    return plots.png(draw, height=3.5 + 0.17 * min(len(labels), _LABELS))


def _losing(step: NumericsStep) -> Table:
    """Return the tensors of a step that lose most: non-finite ones first, then underflow."""
    losing = [one for one in step.tensors.values() if one.overflow or one.underflow]
    losing.sort(key=lambda one: (one.overflow, one.underflow), reverse=True)
    rows = [
        (
            *(str(one.id), one.block, one.format, f"{one.statistics.largest:.3g}"),
            *(percent(one.overflow), percent(one.underflow)),
        )
        for one in losing[:_ROWS]
    ]
    return Table(("tensor", "layer", "format", "largest", "not finite", "underflow"), rows)


def write_page(
    recording: Recording,
    path: Path,
    *,
    title: str = "Numerics of a training run",
    warnings: Sequence[str] = (),
) -> None:
    """Write the page of a recording, one HTML file that needs no other file.

    It shows the tensors of layers and parameters. All recorded steps are read once.

    Parameters
    ----------
    recording : Recording
    path : Path
    title : str
    warnings : sequence of str
        Sentences that stand at the top.

    Raises
    ------
    CheckpointError
        If a recorded step cannot be read.
    DataError
        If the file cannot be written.
    """
    columns = columns_of(recording)
    kinds = histories_of(recording, columns)
    data = _data(recording, columns, kinds)
    last = recording.step(recording.numbers[-1]) if recording.numbers else NumericsStep(0, {}, {})
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mpgluon_tools", "recorder/numerics"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    pictured = next(iter(kinds), "")
    text = environment.get_template("page.html.jinja").render(
        title=title,
        about=_sentence(recording, last),
        warnings=warnings,
        skipped=sum(bool(line.get("skipped")) for line in recording.lines),
        steps=len(recording.lines),
        data=data,
        pictured=pictured,
        picture=base64.b64encode(_picture(data, kinds[pictured])).decode() if pictured else "",
        step=last.number,
        losing=_losing(last),
    )
    try:
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise disk_error(error, path, "write the page again") from error


def _sentence(recording: Recording, last: NumericsStep) -> str:
    """Return which steps were recorded, and with which versions."""
    numbers = recording.numbers
    if not numbers:
        return "No step was recorded."
    of_run = f" of {counted(len(recording.lines), 'step')}" if recording.lines else ""
    versions = [f"{name} {number}" for name, number in last.about.get("versions", {}).items()]
    recorded = f"{counted(len(numbers), 'recorded step')}{of_run}, {numbers[0]} to {numbers[-1]}"
    return f"{'; '.join([recorded, ', '.join(versions)][: 1 + bool(versions)])}."
