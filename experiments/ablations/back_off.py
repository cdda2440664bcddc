"""contrib.amp's late back-off: the step after an overflow is taken with the same loss scale."""

from __future__ import annotations

import math
from typing import Any

import mxnet as mx
from mxnet import gluon
from mxnet.contrib import amp as contrib_amp
from mxnet.contrib.amp.loss_scaler import LossScaler
from mxnet.gluon import nn
from mxnet.ndarray import NDArray

from experiments.ablations.ablation import Ablation, Variants, figure_of
from experiments.ablations.training import batches, shapes, train
from experiments.experiment import Outcome
from experiments.series import means, rounded
from mpgluon import DynamicLossScale, amp, cast_block
from mpgluon.trainer import inside

__all__ = ["ABLATION", "run"]


def run(
    variant: str,
    *,
    steps: int,
    learning_rate: float,
    growth_interval: int,
    images_per_class: int,
    image_size: int,
    batch_size: int,
) -> Outcome:
    """Train a small network in float16 with one library's dynamic loss scale, from 2**16 on.

    It has no normalization layer: contrib.amp cannot check gradients of two formats together.

    Parameters
    ----------
    variant : {"mpgluon", "contrib"}
        Both train the network that mpgluon has cast; masters begin with its FP32 weights, and with
        contrib.amp, as MXNet makes them, with rounded ones.
    steps, growth_interval, images_per_class, image_size, batch_size : int
    learning_rate : float
    """
    images, labels = shapes(images_per_class, image_size)
    mx.random.seed(0)
    net = nn.HybridSequential()
    net.add(nn.Dense(32, activation="relu", in_units=3 * image_size**2))
    net.add(nn.Dense(10, in_units=32))
    net.initialize(mx.init.Xavier())
    cast_block(net)
    net.hybridize(static_alloc=True, static_shape=True)
    options = {"learning_rate": learning_rate, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    scales: list[float] = []
    skipped_at: list[int] = []
    if variant == "mpgluon":
        amp.init_trainer(trainer, DynamicLossScale(2.0**16, growth_interval=growth_interval))
    else:
        scaler = _Contrib(growth_interval)
        inside.occupy(trainer, scaler)
        trainer._amp_original_scale = inside.scale_of(trainer)  # contrib.amp's own field

    def loss_fn(logits: NDArray, labels: NDArray) -> NDArray:
        scales.append(amp.loss_scale(trainer) if variant == "mpgluon" else scaler.loss_scale)
        return losses_of(logits, labels)

    def look(step: int) -> None:
        skipped = amp.step_was_skipped(trainer) if variant == "mpgluon" else scaler.skipped
        if skipped:
            skipped_at.append(step)

    losses_of = gluon.loss.SoftmaxCrossEntropyLoss()
    losses = train(
        net,
        loss_fn,
        batches(images / 127.5 - 1, labels, batch_size),
        trainer,
        steps,
        library=amp if variant == "mpgluon" else contrib_amp,
        step_size=batch_size,  # Gluon's own way: gradients of sums, divided in the step
        after_step=look,
    )
    powers = [round(math.log2(scale)) for scale in scales]
    return Outcome(
        figures={
            "final_loss": means(losses[-growth_interval:], growth_interval)[0],
            "skipped_steps": len(skipped_at),
            "skipped_at_a_scale_that_just_failed": sum(
                # Steps count from 1, so powers[step] is the scale of the step after it.
                step + 1 in skipped_at and powers[step] == powers[step - 1]
                for step in skipped_at
            ),
            "mean_log2_scale": rounded(sum(powers) / steps),
        },
        curves={"log2_scale": powers, "skipped_at": skipped_at},
    )


class _Contrib(LossScaler):
    """contrib.amp's loss scale, with an interval of one's own, and it remembers its answer."""

    def __init__(self, growth_interval: int) -> None:
        super().__init__()
        self._scale_seq_len = growth_interval
        self.skipped = False

    def has_overflow(self, params: Any) -> bool:
        self.skipped = bool(super().has_overflow(params))
        return self.skipped


def _text(records: Variants) -> str:
    late, at_once = records["contrib"], records["mpgluon"]
    wasted = "skipped_at_a_scale_that_just_failed"
    settings = late.config
    return (
        "Both libraries train one small network in float16, from a loss scale of 2^16 on "
        "(contrib.amp with masters that begin with rounded weights), with "
        f"{settings['growth_interval']} instead of 2,000 finite steps from one growth to the "
        f"next, so that {settings['steps']} steps see many overflows. contrib.amp halves the "
        "scale one step late: the step after an overflow uses the scale that has just failed, "
        "and if it fails as well, the scale is halved twice. Of its "
        f"{figure_of(late, 'skipped_steps')} skipped steps {figure_of(late, wasted)} failed with "
        f"such a scale; of mpgluon's {figure_of(at_once, 'skipped_steps')}, "
        f"{figure_of(at_once, wasted)}. Its scale, which then needs longer to overflow again, is "
        f"2^{late.outcome.figures['mean_log2_scale']:.2f} in the geometric mean, mpgluon's "
        f"2^{at_once.outcome.figures['mean_log2_scale']:.2f}. The loss ends at "
        f"{figure_of(late, 'final_loss')} and {figure_of(at_once, 'final_loss')}."
    )


def _draw(figure: Any, records: Variants) -> None:
    panels = figure.subplots(2, 1, sharex=True, sharey=True)
    lowest, highest = [], []
    for axes, (variant, title) in zip(
        panels, (("mpgluon", "mpgluon: at once"), ("contrib", "contrib.amp: one step late"))
    ):
        powers = records[variant].outcome.curves["log2_scale"]
        skipped_at = records[variant].outcome.curves["skipped_at"]
        lowest.append(min(powers))
        highest.append(max(powers))
        axes.step(range(1, len(powers) + 1), powers, where="mid", color="0.4", linewidth=1)
        axes.plot(
            skipped_at, [powers[step - 1] for step in skipped_at], "kx", label="skipped step"
        )  # fmt: skip
        axes.set_title(title, loc="left", fontsize="medium")
        axes.set_ylabel("loss scale")
        axes.grid(color="0.92")
    ticks = range(min(lowest), max(highest) + 1)
    panels[0].set_yticks(ticks, [f"$2^{{{power}}}$" for power in ticks])
    panels[0].legend(frameon=False)
    panels[1].set_xlabel("step")


ABLATION = Ablation(
    name="back_off",
    title="contrib.amp's late back-off",
    run=run,
    variants=("mpgluon", "contrib"),
    wrong="contrib",
    right="mpgluon",
    settings={
        "steps": 400,
        "learning_rate": 0.005,
        "growth_interval": 20,
        "images_per_class": 20,
        "image_size": 16,
        "batch_size": 40,
    },
    figure="skipped_at_a_scale_that_just_failed",
    unit="steps skipped with a scale that had just failed",
    text=_text,
    draw=_draw,
)
