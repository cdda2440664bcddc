"""Experiments that take no time, for the tests of the script and of the pages."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from study.experiments.experiment import Experiment, Group, Outcome, Place
from study.experiments.page import Document


def threads(place: Place) -> Outcome:
    """Find the number of threads, and count in the work folder how often it was run there."""
    count = place.work_dir / "count"
    count.write_text(str(1 + int(count.read_text() if count.exists() else 0)))
    return Outcome(
        {"threads": int(os.environ["OMP_NUM_THREADS"]), "runs here": int(count.read_text())},
        {"curve": [1, 0.1, None]},
        {"clock": time.time()},
    )


def differs(_: Place) -> Outcome:
    return Outcome({}, {"curve": [0, secrets.token_hex()]})


def fails(_: Place) -> Outcome:
    raise ValueError("it went wrong")


def photographs(place: Place) -> Outcome:
    return Outcome({"folder": Path(place.data_dir).name})


EXPERIMENTS = [
    Experiment("tiny/threads", {"size": 1, "pair": (1, 2)}, threads),
    Experiment("tiny/fails", {}, fails),
    Experiment("other/differs", {}, differs),
    Experiment("other/photographs", {}, photographs, needs_photographs=True, categories=101),
]


def group(name: str) -> Group:
    members = [one for one in EXPERIMENTS if one.name.startswith(f"{name}/")]
    return Group(name, members, dict, {name: lambda figure, _: figure.add_subplot()})


GROUPS = (group("tiny"), group("other"))

PAGES = {
    "docs/results.md": """# Tiny results

**It has run.** There are <!-- {len(records)} -->0<!-- end --> records.

<!-- table: names() -->
| record |
<!-- end -->

![a picture](results/tiny.png) ![another one](results/other.png)
""",
    "docs/results-details.md": "# Tiny details\n",
    "README.md": "Of tiny experiments, <!-- {number(len(tiny))} -->none<!-- end --> have run.\n",
}
DOCUMENT = Document(
    GROUPS,
    {"names": lambda views: [[name] for name in views.records]},
    {"docs/results.md": {"It has run.": lambda views: "tiny/threads" in views.tiny}},
)
