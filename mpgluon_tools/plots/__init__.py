"""Figures of plain data: each ``draw_`` function draws on Axes of Matplotlib and returns them.

What :mod:`mpgluon.diagnostics` returns draws itself: ``result.plot()``.
The figures of a training run take events of :mod:`recipes.training.history`: ``steps`` have
``step``, ``epoch``, ``loss``, ``loss_scale`` (of that step), ``skipped`` and, where they are known,
``images``, ``images_per_second`` and ``gradient_norm``; ``epochs`` have ``step`` (its last),
``train_loss``, and in [0, 1] ``train_accuracy``, ``test_accuracy`` and, if known,
``test_accuracy_per_class``, the mean of the classes' accuracies.

Matplotlib is imported only when a figure is drawn. Every figure can be read without colour: grey
for single steps, black for means, and line styles, marks and hatches besides. ``FORMAT_LOOKS`` has
the colour, mark and line style of each number format, as keywords of ``Axes.plot``. The colours are
from Wong, "Color blindness", Nature Methods 8, 2011; colour-blind readers can distinguish them.
"""

from __future__ import annotations

from mpgluon_tools.plots.axes import png
from mpgluon_tools.plots.exponents import draw_exponent_heatmap, draw_exponents
from mpgluon_tools.plots.looks import FORMAT_LOOKS
from mpgluon_tools.plots.training import (
    draw_accuracy,
    draw_gradient_norm,
    draw_loss,
    draw_loss_scale,
    draw_speed,
    draw_training,
    save_training_curves,
)

__all__ = [
    "FORMAT_LOOKS",
    "draw_accuracy",
    "draw_exponent_heatmap",
    "draw_exponents",
    "draw_gradient_norm",
    "draw_loss",
    "draw_loss_scale",
    "draw_speed",
    "draw_training",
    "png",
    "save_training_curves",
]
