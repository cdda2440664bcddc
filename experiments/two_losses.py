"""Two losses: a small GAN with a loss scale for each network, and the section on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from experiments.experiment import Experiment, Group, Outcome, Place, Record, Section
from experiments.gan import CROP, NAMES, Settings
from experiments.gan_training import cut_crops, train
from experiments.photographs import mini_tree
from experiments.runner import command_for
from experiments.two_losses_figure import draw_two_losses
from mpgluon.tables import Table

__all__ = ["GROUP", "RUNS", "experiments", "section"]

_FP32, _UNDISTURBED, _DISTURBED = (
    "two_losses/float32",
    "two_losses/float16",
    "two_losses/float16-overflow",
)
RUNS = {
    _FP32: Settings(),
    _UNDISTURBED: Settings(dtype="float16"),
    _DISTURBED: Settings(dtype="float16", overflow=2.0**20),
}
# What is written down about each network around the watched step, and how the page calls it.
_WATCHED = {
    "scale_before": "loss scale in it",
    "scale_after": "loss scale after it",
    "skips_until_then": "skipped steps so far",
    "bits_before": "bits before it",
    "bits_after": "bits after it",
}

Records = Mapping[str, Record]


def experiments() -> list[Experiment]:
    """Return float32, float16, and float16 with an overflow that is brought about."""
    return [
        Experiment(name, asdict(settings), partial(_run, settings), needs_photographs=True)
        for name, settings in RUNS.items()
    ]


def _run(settings: Settings, place: Place) -> Outcome:
    return train(settings, cut_crops(mini_tree(place), settings))


def section(records: Records) -> Section:
    """Return tables, statements and picture."""
    parts = [_protocol(), _table(records), _scales(records), _overflow(records)]
    figures: dict[str, Any] = {}
    if _UNDISTURBED in records:
        outcomes = {name: records[name].outcome for name in RUNS if name in records}
        figures["two-losses"] = partial(
            draw_two_losses,
            undisturbed=outcomes[_UNDISTURBED],
            disturbed=outcomes.get(_DISTURBED),
            fp32=outcomes.get(_FP32),
            overflow_at=RUNS[_DISTURBED].watched_step,
        )
        parts.append(
            "![Both loss scales over time, both losses, and generated images below photographs]"
            "(results/two-losses.png)"
        )
    missing = [name for name in RUNS if name not in records]
    if missing:
        parts.append(f"Not run yet: {', '.join(missing)}.")
    return Section("\n\n".join(part for part in parts if part), figures)


def _protocol() -> str:
    one = RUNS[_UNDISTURBED]
    return (
        "A small DCGAN: a generator of transposed convolutions draws, and a discriminator judges, "
        f"crops of {CROP} pixels from caltech101-mini's photographs of the category "
        f"`{one.category}`. {one.steps} steps of {one.batch_size} images, Adam, learning rate "
        f"{one.learning_rate:g}. Each network has a Trainer, and in float16 each Trainer a dynamic "
        f"loss scale of its own, from 2^{math.log2(one.init_scale):.0f} on and doubled after "
        f"{one.growth_interval} steps without overflow.\n\n"
        "The generator's backward pass goes through the discriminator and leaves gradients there, "
        "with the generator's scale on them. They are never used: the discriminator's own backward "
        "pass overwrites them before its Trainer looks at any, as Gluon does by default. With "
        '`grad_req="add"` they would have to be zeroed in between.'
    )


def _table(records: Records) -> str:
    rows = [
        [
            name.split("/")[1],
            "none" if RUNS[name].dtype == "float32" else _two(figures, "usual_scale", "g"),
            f"{_two(figures, 'skipped_steps', 'd')} of {figures['steps']}",
            _two(figures, "final_loss", ".2f"),
            f"`{command_for(name)}`",
        ]
        for name in RUNS
        if name in records and (figures := records[name].outcome.figures)
    ]
    headings = ["run", "loss scales, medians of the second half", "skipped steps",
                "losses, means of the last 100 steps", "command"]  # fmt: skip
    table = Table(headings, rows).to_markdown()
    return f"Of generator and discriminator, in this order:\n\n{table}" if rows else ""


def _two(figures: Mapping[str, Any], what: str, form: str) -> str:
    values = [figures[f"{name}_{what}"] for name in NAMES]
    return ", ".join("not finite" if value is None else f"{value:{form}}" for value in values)


def _scales(records: Records) -> str:
    """Return where the scales settle, in words that depend on it."""
    if _UNDISTURBED not in records:
        return ""
    outcome = records[_UNDISTURBED].outcome
    usual = {name: outcome.figures[f"{name}_usual_scale"] for name in NAMES}
    skipped = {name: set(outcome.curves[f"{name}_skipped"]) for name in NAMES}
    high, low = sorted(NAMES, key=lambda name: -usual[name])
    both, either = set.intersection(*skipped.values()), set.union(*skipped.values())
    words = (
        f"**The scales settle apart**: in `{_UNDISTURBED.split('/')[-1]}` the {high}'s median is "
        f"{usual[high] / usual[low]:g} times the {low}'s."
        if usual[high] != usual[low]
        else f"The scales settle at the same value, {usual[high]:g}."
    )
    return (
        f"{words} Of {outcome.figures['steps']} steps in float16, {len(either)} were skipped by at "
        f"least one network, and {len(both)} by both."
    )


def _overflow(records: Records) -> str:
    """Return what an overflow of the generator did, in words that depend on it."""
    if not {_UNDISTURBED, _DISTURBED} <= records.keys():
        return ""
    settings = RUNS[_DISTURBED]
    without, disturbed = (records[name].outcome.figures for name in (_UNDISTURBED, _DISTURBED))
    rows = [
        [f"{name}'s {words}", *(_cell(one[f"{name}_{what}"]) for one in (without, disturbed))]
        for name in NAMES
        for what, words in _WATCHED.items()
    ]
    skipped_alone = (
        without["generator_bits_before"] == disturbed["generator_bits_before"]
        and without["generator_bits_before"] != without["generator_bits_after"]
        and disturbed["generator_bits_before"] == disturbed["generator_bits_after"]
        and disturbed["generator_scale_after"] == disturbed["generator_scale_before"] / 2
        and all(
            without[f"discriminator_{what}"] == disturbed[f"discriminator_{what}"]
            for what in _WATCHED
        )
    )
    verdict = (
        "**It costs the generator that step and half its scale, and the discriminator nothing**: "
        "the discriminator's update of that step has the same bits as without the overflow, and "
        "its scale and its count of skipped steps are the same."
        if skipped_alone
        else "**That is not all that it changed, or not what it should have**: see the table."
    )
    step = f"step {settings.watched_step}"
    table = Table([step, *(name.split("/")[1] for name in (_UNDISTURBED, _DISTURBED))], rows)
    return (
        f"In {step} of `{_DISTURBED}` the generator's loss is multiplied by "
        f"2^{math.log2(settings.overflow):.0f}; up to then the run is `{_UNDISTURBED}`. {verdict} "
        "Bits are a hash of weights, FP32 masters and momenta. In later steps the two runs show "
        "the discriminator other images.\n\n" + table.to_markdown()
    )


def _cell(value: Any) -> str:
    return f"`{value}`" if isinstance(value, str) else f"{value:g}"


GROUP = Group("two_losses", "Two losses, two scales", experiments, section)
