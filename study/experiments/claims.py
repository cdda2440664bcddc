"""The words of the pages that hold only as long as the records support them.

A person writes a conclusion, and its condition here. ``python study/scripts/evidence.py document``
and a test name each one that the records do not support; a person then writes another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable

__all__ = ["CLAIMS"]


def _ablations_show_harm(v: Any) -> bool:
    a = v.ablations
    failed = "skipped_at_a_scale_that_just_failed"
    return bool(
        a["masters"]["without"]["final_loss"] > a["masters"]["with"]["final_loss"]
        and a["underflow"]["unscaled"]["final_loss"] > a["underflow"]["scaled"]["final_loss"]
        and a["batch_norm"]["float16"]["final_accuracy"]
        < a["batch_norm"]["float32"]["final_accuracy"]
        and a["loss_reduction"]["float16"]["final_true_loss"]
        > a["loss_reduction"]["float32"]["final_true_loss"]
        and a["labels"]["float16"]["accuracy_above"] < a["labels"]["int32"]["accuracy_above"]
        and a["back_off"]["contrib"][failed] > a["back_off"]["mpgluon"][failed]
    )


def _no_format_differs(v: Any) -> bool:
    compared = (v.imagenet_weights, v.caltech101, v.cifar10, v.recurrent, v.sequences)
    return (
        all(view.none_differs for view in compared)
        and not v.fine_tuning.formats.differs
        and not v.parity.different
        and _ablations_show_harm(v)
    )


def _as_fp32(view: Any, seeds: int) -> bool:
    """Return whether no row differs from FP32, with the number of seeds that the words have."""
    return view.none_differs and len(view.seeds) == seeds


def _e5m2_needs_larger_gradients(v: Any) -> bool:
    rows = ("e5m2-mean", "e5m2-none", "e5m2-loss-scale")
    mean, *others = (v.cifar10.mean(row, "test_accuracy") for row in rows)
    return bool(mean + 10 < min(others))


def _nearest_is_worse(v: Any) -> bool:
    losses = v.bfloat16_weights.losses
    others = (0.0, losses["stochastic"].mean, losses["kahan"].mean)
    return not v.bfloat16_weights.different and losses["nearest"].lower > max(others)


def _a_gan_shifts(v: Any) -> bool:
    view = v.growing_resolution
    return bool(view.shifts and view.static_are_as_described and view.discriminator_stops)


def _a_larger_batch_fits(v: Any) -> bool:
    view = v.batch_doubling
    return _as_fp32(view, 3) and bool(40 < view.measured["largest_batch"] < 80)


def _twenty_pairs_decide_nothing(v: Any) -> bool:
    view = v.lost_batches
    rows = {title: found for title, *_, found in view.pooled_table()}
    arms = (*(f"FP16, {how} loss scale" for how in ("dynamic", "measured")),
            "FP32 without the batches that FP16 skipped")  # fmt: skip
    return all(rows[f"{arm}, minus FP32"] == "not decided" for arm in arms)


def _the_test_costs_nothing(v: Any) -> bool:
    rows = {title: found for title, *_, found in v.lost_batches.pooled_table()}
    return bool(rows["FP16, dynamic, tested in FP32 minus in FP16"].startswith("equal"))


def _is_not_confirmed(v: Any) -> bool:
    arms = (v.lost_batches.compare(f"float16-{how}") for how in ("dynamic", "measured"))
    return _twenty_pairs_decide_nothing(v) and all(
        one.pairs == 20 and one.lower > v.together.float16.mean and one.lower > -1 / 3
        for one in arms
    )


def _measured_skips_nothing(v: Any) -> bool:
    skipped = [row[5] for row in v.lost_batches.table() if row[1].startswith("FP16, measured")]
    return len(skipped) == 2 and all(one.startswith("0 of ") for one in skipped)


# The words as a reader sees them, in one line, by page.
CLAIMS: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    "README.md": {
        "in FP16 as in FP32, as far as twenty pairs of runs can tell": _twenty_pairs_decide_nothing,
        "the new ones do not confirm it": _is_not_confirmed,
    },
    "docs/results.md": {
        "No experiment alone shows a difference of the accuracy that it tests": _no_format_differs,
        "together afterwards, had a third of a point less in FP16; twenty new pairs": lambda v: (
            v.together.costs_accuracy and abs(v.together.float16.mean + 1 / 3) < 1 / 12
        ),
        "by a protocol do not confirm that FP16 costs accuracy": _is_not_confirmed,
        "with the measured one, which skips no step": _measured_skips_nothing,
        "that skipped batches cost anything is not shown": lambda v: (
            not v.lost_batches.batches_are_the_cause
        ),
        "the test in 16 bits costs nothing": _the_test_costs_nothing,
        '`"dynamic"` remains PyTorch\'s rule': lambda v: (
            not v.lost_batches.measured_becomes_the_default
        ),
        "of eight bits as in FP32, as far as 5 seeds can tell by the mean": lambda v: _as_fp32(
            v.imagenet_weights, 5
        ),
        ", is the fastest for eight images and for one": lambda v: (
            v.engines.fastest(1) == v.engines.fastest(8) and v.engines.fewest_same >= 0.98
        ),
        "A ResNet-20 learns CIFAR-10 in FP16 and in BF16 as in FP32, as far as 3 seeds": lambda v: (
            _as_fp32(v.cifar10, 3)
        ),
        "Products of E5M2 need gradients that are large enough": _e5m2_needs_larger_gradients,
        "The gradients of the activations are what a format loses first": lambda v: (
            v.exponents.gradients_are_smallest
        ),
        "ResNet-50 learns Caltech 101 in float16 and bfloat16 as in float32, as far as 3 seeds": (
            lambda v: _as_fp32(v.caltech101, 3)
        ),
        "fine-tunes as in float32, as far as 3 seeds can tell, and better than from scratch": (
            lambda v: (
                v.fine_tuning.helps
                and not v.fine_tuning.formats.differs
                and len(v.fine_tuning.seeds) == 3
            )
        ),
        "No format differs from float32 by more than chance** over 8 networks and 5 seeds": (
            lambda v: (
                not v.parity.different and (len(v.parity.networks), len(v.parity.seeds)) == (8, 5)
            )
        ),
        "less well if updates are rounded to nearest": _nearest_is_worse,
        "In test accuracy 15 pairs show no difference": lambda v: (
            not v.bfloat16_weights.different and v.bfloat16_weights.pooled["nearest"].pairs == 15
        ),
        "Products of E4M3 numbers train as float32 does, as far as 15 pairs can tell": lambda v: (
            not v.eight_bits.different and v.eight_bits.pooled["tensor"].pairs == 15
        ),
        "difference to the accuracy of a CIFAR ResNet-20, as far as 5 seeds can tell": lambda v: (
            not v.tensor_core_sums.different and len(v.tensor_core_sums.seeds) == 5
        ),
        "Training gets worse without each part of mixed precision": _ablations_show_harm,
        "An LSTM learns as well in 16 bits as in float32": lambda v: _as_fp32(v.recurrent, 5),
        "learn in 16 bits as in float32, as far as 5 seeds can tell": lambda v: _as_fp32(
            v.sequences, 5
        ),
        "costs the generator one step and half its loss scale, and the discriminator nothing": (
            lambda v: v.two_losses.costs_the_generator_alone
        ),
        "so the loss scale has to fall: a dynamic one does, a static one does not": _a_gan_shifts,
        "float32 takes for batches of 40, float16 has room for batches of": _a_larger_batch_fits,
        "a step in float16, cast or autocast, takes": lambda v: v.step_times["float16"][1] >= 1,
    },
    "docs/results-details.md": {
        "No format differs from float32 by more than chance** over all networks and seeds": (
            lambda v: not v.parity.different
        ),
        "have the same losses, accuracies and loss scales to the last bit": lambda v: (
            v.parity.equal_float16
        ),
        "`static_float16` skips none, and differs from `float16` by": lambda v: (
            v.parity.skipped_percent("static_float16") == 0 and not v.parity.control.differs
        ),
        "No row in 16 bits differs from FP32 by more than chance": lambda v: (
            v.recurrent.none_differs and v.sequences.none_differs
        ),
        "corrected for 5 comparisons after Holm": lambda v: len(v.recurrent.compared) == 5,
        "corrected for 4 comparisons after Holm": lambda v: len(v.sequences.compared) == 4,
        "that step and half its loss scale, and the discriminator nothing": lambda v: (
            v.two_losses.costs_the_generator_alone
        ),
        "The scales settle apart": lambda v: v.two_losses.scale_ratio > 1,
    },
}
