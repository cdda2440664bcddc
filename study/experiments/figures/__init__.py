"""Pictures of the groups of experiments; marks and line styles tell formats apart.

All are ``WIDTH`` inches wide, so that words in Matplotlib's usual sizes can be read on a page of
420 pixels: what does not fit into that width goes below.
"""

from __future__ import annotations

from study.experiments.figures.costs import draw_batch_doubling, draw_engines, draw_step_times
from study.experiments.figures.exponents import draw_data_flow, draw_layers
from study.experiments.figures.looks import WIDTH
from study.experiments.figures.players import draw_growing_resolution, draw_two_losses
from study.experiments.figures.runs import (
    draw_accuracies,
    draw_curves,
    draw_differences,
    draw_learning,
    draw_loss_scales,
    draw_pairs,
    draw_rows,
)
from study.experiments.figures.sequences import draw_recurrent, draw_sequences

__all__ = ["WIDTH", "draw_accuracies", "draw_batch_doubling", "draw_curves", "draw_data_flow",
           "draw_differences", "draw_engines", "draw_growing_resolution", "draw_layers",
           "draw_learning", "draw_loss_scales", "draw_pairs", "draw_recurrent", "draw_rows",
           "draw_sequences", "draw_step_times", "draw_two_losses"]  # fmt: skip
