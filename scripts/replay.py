"""Run a training step again that was skipped: where it overflowed, and what would have saved it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Optional

from mpgluon.tools.commands import Door, run


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run ``mpgluon replay``."""
    return run("replay", arguments, Door("replay.py", __doc__))


if __name__ == "__main__":
    sys.exit(main())
