"""Run a training step again that was skipped: where it overflowed, and what would have saved it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for mpgluon_command

from mpgluon_command import begin_without_mxnet


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run ``mpgluon replay``."""
    import_all_of_mpgluon = begin_without_mxnet()
    from mpgluon_tools.commands import Door, run

    door = Door("replay.py", __doc__, import_all_of_mpgluon=import_all_of_mpgluon)
    return run("replay", arguments, door)


if __name__ == "__main__":
    sys.exit(main())
