"""Write the log of tuning into docs/performance.md, from study/results/*-tuning.json.

The records are made by `python study/scripts/benchmark.py tuning --output study/results`, on a
machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for folders that are not installed

from mpgluon.errors import MpgluonError
from mpgluon_tools.commands import exit_status

from study.benchmarks.record import BenchmarkRecord, read_record
from study.benchmarks.report import heading
from study.benchmarks.tuning import gains, tuning_table

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- tuning: begin -->", "<!-- tuning: end -->"
NO_RECORD = "Not measured yet: `python study/scripts/benchmark.py tuning --output results`."


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Parse the command line and write the page; with --check the status is 1 if it is old."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR",
        help="folder of docs/performance.md and results")  # fmt: skip
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    page = options.root / "docs" / "performance.md"

    def work() -> int:
        before = page.read_text(encoding="utf-8")
        after = with_log(before, sorted((options.root / "study" / "results").glob("*-tuning.json")))
        if options.check:
            return int(before != after)
        page.write_text(after, encoding="utf-8")
        print(f"written: {page}")
        return 0

    return exit_status(work, errors=(OSError, ValueError, MpgluonError))


def with_log(page: str, records: Sequence[Path]) -> str:
    """Return a page with the log of each record between its two comments.

    Raises
    ------
    ValueError
        If it does not have one place for it.
    DataError
        If a file is not a record.
    """
    sections = [section(read_record(path), path.stem) for path in records]
    text = "\n\n".join(sections) or NO_RECORD
    parts = re.split(f"(?<={BEGIN}\n).*?(?={END})", page, flags=re.DOTALL)
    if len(parts) != 2:
        raise ValueError(f"the page needs one place for the log, between {BEGIN} and {END}")
    return f"{parts[0]}\n{text}\n\n{parts[1]}"


def section(record: BenchmarkRecord, stem: str) -> str:
    """Return the conclusion, the picture, the tables and the origin of a record, in Markdown.

    Parameters
    ----------
    record : BenchmarkRecord
    stem : str
        The name of its files in ``results``, without a suffix.
    """
    parts = []
    for case in record.cases:
        found = gains(case)
        first, best = found[0], max(found, key=lambda one: one.images_per_second.median)
        ends = [one.images_per_second.median for one in (first, best)]
        about = "{model}, batches of {batch_size}, {image_size} px".format_map(case.settings)
        files = {"rendered": "rendered images"}.get(case.settings["images"], "photographs")
        sentence = f"**From {ends[0]:.1f} to {ends[1]:.1f} images a second**: {about}, {files}."
        useless = [f"*{one.name}*" for one in found if one.words == "nothing"]
        if useless:
            sentence += f" Nothing is brought by {', '.join(useless)}."
        parts += [sentence, tuning_table(case).to_markdown()]
    picture = f"![Images a second after each measure of the log](../study/results/{stem}.png)"
    origin = f"{'; '.join(heading(record).splitlines())} ([record](../study/results/{stem}.json))."
    return "\n\n".join([parts[0], picture, *parts[1:], origin])


if __name__ == "__main__":
    sys.exit(main())
