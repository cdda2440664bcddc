"""The exercises of lesson 02: the bytes of a weight, and which updates survive."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from mpgluon import BFLOAT16, round_to

import mxnet as mx
import numpy as np

from teaching.exercises import Verdict, exercise, number_of


@exercise("02.1")
def bytes_of_a_weight(answer: Any) -> Verdict:
    value = number_of(answer, "bytes for each weight")
    parts = _measured_bytes("float16")
    total = sum(parts.values())
    if value == total:
        listed = ", ".join(f"{name} {size}" for name, size in parts.items())
        fp32_total = sum(_measured_bytes("float32").values())
        return Verdict(
            True, f"Measured: {listed}. Training in FP32 takes {fp32_total} bytes, no more."
        )
    for count in reversed(range(1, len(parts))):
        for counted in combinations(parts, count):
            if sum(parts[name] for name in counted) == value:
                left_out = " and ".join(f"the {name}" for name in parts if name not in counted)
                return Verdict(
                    False, f"{value:g} bytes hold the {', the '.join(counted)}, but not {left_out}."
                )
    if value > total:
        return Verdict(False, f"{value:g} bytes are more than all the arrays take together.")
    return Verdict(
        False, f"The arrays have 2 or 4 bytes for each weight; no set of them has {value:g}."
    )


def _measured_bytes(dtype: str) -> dict[str, int]:
    """Return the bytes of each array that Adam's training keeps for one weight."""
    weight = mx.nd.ones(1, dtype=dtype)
    weight.attach_grad()
    adam = mx.optimizer.create("adam", multi_precision=dtype == "float16")
    state = adam.create_state_multi_precision(0, weight)
    master, averages = state if dtype == "float16" else (None, state)
    arrays = {"weight": [weight], "gradient": [weight.grad]}
    if master is not None:
        arrays["master"] = [master]
    arrays["averages"] = list(averages)
    return {
        name: sum(np.dtype(array.dtype).itemsize for array in some) for name, some in arrays.items()
    }


@exercise("02.2")
def smallest_rate_that_moves_the_weight(answer: Any) -> Verdict:
    rate = number_of(answer, "a learning rate")
    if not 0 < rate < 1:
        return Verdict(False, f"A learning rate lies between 0 and 1, and {rate:g} does not.")
    smaller, end, larger = (_weight_after_training(factor * rate) for factor in (0.95, 1, 1.05))
    update = f"The first update is {rate * 0.25:.6f}; half the spacing above 1 is {2**-11:.6f}."
    if larger == 1:
        return Verdict(False, f"With a rate of {rate:g} the weight stays at 1 for ever. {update}")
    if smaller != 1:
        return Verdict(
            False,
            f"With a rate of {rate:g} the weight moves to {end:.6g} and stops there. But it also "
            f"moves with {0.95 * rate:.3g}, which is less. {update}",
        )
    return Verdict(
        True,
        f"With a little more than that, {1.05 * rate:.3g}, the weight moves: to {larger:.6g}, and "
        "stops there, far from 1.25. As it comes nearer, its gradient shrinks, and the updates are "
        "lost again.",
    )


def _weight_after_training(rate: float) -> float:
    """Return the lesson's FP16 weight after 8000 steps without a master."""
    weight, target = np.float16(1), np.float16(1.25)
    for _ in range(8000):
        before, weight = weight, weight - np.float16(rate) * (weight - target)
        if weight == before:  # the same gradient, and so the same update, for ever
            break
    return float(weight)


@exercise("02.3")
def ratio_below_which_bfloat16_loses_all(answer: Any) -> Verdict:
    ratio = number_of(answer, "update / weight")
    if not 0 < ratio < 1:
        return Verdict(False, f"The ratio lies between 0 and 1, and {ratio:g} does not.")
    smaller, lost, larger = (_lost_in_bfloat16(factor * ratio) for factor in (0.95, 1, 1.05))
    share = f"Of updates of weight / {1 / ratio:.0f} a BF16 weight loses {lost:.0%}"
    if smaller < 1:
        return Verdict(False, f"{share}; the others survive.")
    if larger == 1:
        twice = _lost_in_bfloat16(2 * ratio)
        return Verdict(
            False, f"{share}. But the limit is higher: of twice as large ones it loses {twice:.0%}."
        )
    return Verdict(True, f"{share}, of those 5 % larger {larger:.0%}, of twice as large ones none.")


def _lost_in_bfloat16(ratio: float) -> float:
    """Return the share of the BF16 numbers from 1 up to 2 that lose such an update, up or down."""
    numbers = 1 + np.arange(2**7) / 2**7
    changed = [round_to(numbers * (1 + sign * ratio), BFLOAT16) for sign in (1, -1)]
    return float(np.mean([result == numbers for result in changed]))
