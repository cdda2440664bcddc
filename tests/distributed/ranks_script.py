"""Runs `scripts/train_caltech.py`, in which something happens on one rank after a step.

ranks_script.py KIND CULPRIT STEP MOMENT options of the script ...
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from faults import happen

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "train_caltech.py"
sys.path.insert(0, str(ROOT))  # the recipes/ of this checkout

from recipes.training.steps import Stepper  # noqa: E402


def sabotage(kind: str, culprit: int, bad_step: int, moment: Path) -> None:
    """Make one of the culprit's steps, counted from 1 in this process, end badly."""
    do_step, steps = Stepper.__call__, [0]

    def do_step_and_fail(self, images, labels, *, seed):
        figures = do_step(self, images, labels, seed=seed)
        steps[0] += 1
        if self._processes.rank == culprit and steps[0] == bad_step:
            happen(kind, moment)
        return figures

    Stepper.__call__ = do_step_and_fail


if __name__ == "__main__":
    kind, culprit, step, moment, *options = sys.argv[1:]
    sabotage(kind, int(culprit), int(step), Path(moment))
    sys.argv = [str(SCRIPT), *options]
    runpy.run_path(str(SCRIPT), run_name="__main__")
