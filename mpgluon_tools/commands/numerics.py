"""Show the recorded numbers of a training run, or where two runs part."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mpgluon_tools.commands.arguments import width
from mpgluon_tools.tables import Table, counted, percent

if TYPE_CHECKING:
    from mpgluon_tools.recorder.numerics.files import NumericsStep, Recording

__all__ = ["EPILOG", "add_arguments", "run"]

EPILOG = (
    "Exit status: 0 if nothing is about to fail, or two recordings are equal; 1 if there are "
    "warnings or they differ; 2 for an error.\n"
)
_SHOWN = 15  # recorded steps in the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "recording",
        help="the folder of mpgluon.diagnostics.NumericsRecorder, or the --output-dir of "
        "train_caltech.py --record-numerics",
    )
    parser.add_argument(
        "other", nargs="?", help="another one: print the first step and layer that differ"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with a map of all layers")


def run(options: argparse.Namespace, import_all_of_mpgluon: Callable[[], None]) -> int:
    """Print a summary of the recording, or the comparison; return 1 if there is a finding."""
    import_all_of_mpgluon()
    from mpgluon_tools.recorder.numerics.comparison import compare_numerics
    from mpgluon_tools.recorder.numerics.files import folder_of, read_numerics
    from mpgluon_tools.recorder.numerics.trends import lines_of, trends_of

    recording = read_numerics(folder_of(options.recording))
    if options.other is not None:
        if options.html is not None:
            raise ValueError("--html shows one recording; leave out the other one, or --html")
        found = compare_numerics(recording, read_numerics(folder_of(options.other)))
        print(found.sentence)
        if found.settings:
            print(f"\n{found.settings}")
        if found.differences:
            print(f"\n{found.table().fitted(width())}")
        return int(found.step is not None)
    trends = trends_of(recording)
    print(_summary(recording))
    print("\nNothing is about to fail." if not trends else "")
    lines = lines_of(trends)
    print(*lines, sep="\n", end="\n" * bool(lines))
    overflows = sorted(recording.folder.parent.glob("overflows/overflow-*.npz"))
    if overflows:
        newest = shlex.quote(str(overflows[-1]))
        print(f"\nA skipped step can be run again: mpgluon replay {newest}")
    if options.html is not None:
        from mpgluon_tools.recorder.numerics.page import write_page

        write_page(recording, Path(options.html), warnings=lines)
        print(f"\nA map of all layers over time: {options.html}")
    return int(bool(trends))


def _summary(recording: Recording) -> str:
    """Return a summary of the recording, and a table of up to 15 recorded steps."""
    numbers = recording.numbers
    places = {round(i * (len(numbers) - 1) / (_SHOWN - 1)) for i in range(_SHOWN)}
    rows = [_row(recording.step(numbers[place])) for place in sorted(places)]
    skipped = sum(bool(line.get("skipped")) for line in recording.lines)
    headings = ("step", "loss", "loss scale", "largest activation", "its layer",
                "gradients underflowing most", "share", "updates lost, most")  # fmt: skip
    return (
        f"{counted(len(numbers), 'recorded step')} of {len(recording.lines)}, {skipped} skipped; "
        f"{recording.folder}\n\n{Table(headings, rows).fitted(width())}"
    )


def _row(step: NumericsStep) -> tuple[str, ...]:
    activations = step.of("activation")
    largest = max(activations, key=lambda t: (t.overflow, t.statistics.largest), default=None)
    gradients = step.of("activation gradient", "gradient")
    worst = max(gradients, key=lambda tensor: tensor.underflow, default=None)
    loss, lost = step.line.get("loss"), max(step.lost_updates().values(), default=math.nan)
    return (
        str(step.number),
        "-" if loss is None else f"{loss:.4g}",
        f"{step.line.get('loss_scale', 1.0):g}",
        "-"
        if largest is None
        else "inf"
        if largest.overflow
        else f"{largest.statistics.largest:.3g}",
        "-" if largest is None else largest.id.name,
        "-" if worst is None or not worst.underflow else str(worst.id),
        "-" if worst is None else percent(worst.underflow),
        "-" if math.isnan(lost) else percent(lost),
    )
