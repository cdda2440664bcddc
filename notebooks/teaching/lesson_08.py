"""The exercises of lesson 08: an overflow agreed upon, dividing first, and shares of an epoch."""

from __future__ import annotations

from typing import Any

from mpgluon import DynamicLossScale

import numpy as np
import numpy.typing as npt

from teaching.exercises import Verdict, exercise, number_of

_STEPS, _BAD_STEP = 40, 10
_Floats = npt.NDArray[np.float32]


@exercise("08.1")
def one_verdict_without_an_infinity(answer: Any) -> Verdict:
    _require_function(answer, "agree(gradients)")
    for unlucky in (0, 1):
        weights, apart, skipped, jump = _train_two_replicas(answer, unlucky)
        where = f"With an infinity on replica {unlucky} in step {_BAD_STEP}"
        if apart > 0:
            return Verdict(
                False,
                f"{where} the replicas made steps of their own: their weights were apart by up to "
                f"{apart:.3g} ({_spoilt(weights)}). Skipped steps: {skipped[0]} of replica 0, "
                f"{skipped[1]} of replica 1. Both need the same verdict.",
            )
        if skipped[0] == 0:
            return Verdict(
                False,
                f"{where} both replicas stepped, and a weight moved by {jump:.3g} in that one step "
                f"({_spoilt(weights)} in the end). The clipped sum is finite; ask the gradients "
                "before they are added.",
            )
        if skipped[0] > 1:
            return Verdict(
                False,
                f"{where} both replicas skipped {skipped[0]} of {_STEPS} steps, and only one step "
                "had an infinity. Steps with finite gradients must happen.",
            )
        if not np.isfinite(weights).all():
            return Verdict(False, f"{where} both skipped, and then {_spoilt(weights)}.")
    return Verdict(
        True,
        f"With an infinity on either replica both skipped step {_BAD_STEP} and no other, both "
        "scales fell from 256 to 128 once, and the replicas were equal after every step.",
    )


def _train_two_replicas(agree: Any, unlucky: int) -> tuple[_Floats, float, list[int], float]:
    """Return weights, largest distance, steps skipped by each, and how far the bad step moved."""
    examples = np.random.default_rng(0).standard_normal((2, 32, 17)).astype(np.float32)
    weights = np.ones((2, 16), np.float32)
    scales = [DynamicLossScale(2.0**8), DynamicLossScale(2.0**8)]
    apart, jump, skipped = 0.0, 0.0, [0, 0]
    with np.errstate(invalid="ignore", over="ignore"):  # a wrong answer may spoil the weights
        for step in range(1, _STEPS + 1):
            gradients = [
                ((part[:, :16] @ w - part[:, 16]) @ part[:, :16] / 64 * scale.scale)
                .astype(np.float16)
                .astype(np.float32)
                for part, w, scale in zip(examples, weights, scales)
            ]
            if step == _BAD_STEP:
                gradients[unlucky][0] = np.inf
            total, finite = agree(gradients)
            before = weights.copy()
            for number, scale in enumerate(scales):
                if finite[number]:
                    weights[number] -= 0.2 * np.asarray(total) / scale.scale
                else:
                    skipped[number] += 1
                scale.update(bool(finite[number]))
            if step == _BAD_STEP:
                jump = float(np.abs(weights - before).max())
            if not np.array_equal(weights[0], weights[1], equal_nan=True):
                distance = float(np.abs(weights[0] - weights[1]).max())
                apart = max(apart, distance if np.isfinite(distance) else np.inf)
    return weights, apart, skipped, jump


def _spoilt(weights: _Floats) -> str:
    bad = int((~np.isfinite(weights)).sum())
    return f"{bad} of their {weights.size} weights are infinite or NaN" if bad else "all finite"


@exercise("08.2")
def workers_at_which_nothing_arrives(answer: Any) -> Verdict:
    workers = number_of(answer, "workers")
    if workers < 1 or np.log2(workers) % 1:
        return Verdict(False, f"{workers:g} is not a power of two.")
    so_many = f"{workers:g} worker{'s' * (workers > 1)}"
    sent = np.float16(2.0**-18 / workers)
    result, wanted = workers * float(sent), 2.0**-18
    if result:
        return Verdict(
            False,
            f"With {so_many} each sends {float(sent):.3g}, and the result is "
            f"{result:.3g}: all of {wanted:.3g} arrives. FP16's smallest number is {2.0**-24:.3g}.",
        )
    with_half = workers / 2 * float(np.float16(2.0**-18 / (workers / 2)))
    if not with_half:
        return Verdict(
            False, f"The result is 0 with {workers:g} workers, and with {workers / 2:g} already."
        )
    return Verdict(
        True,
        f"Each of {workers:g} workers would send {2.0**-18 / workers:.3g}, half of FP16's smallest "
        f"number, which is rounded to 0. With {workers / 2:g} workers the result is still "
        f"{with_half:.3g}. Added in FP32 and divided afterwards, nothing is lost with any number.",
    )


@exercise("08.3")
def shares_of_an_epoch(answer: Any) -> Verdict:
    _require_function(answer, "share(epoch, rank, world_size, count)")
    count, world_size = 1000, 4
    orders: list[npt.NDArray[np.int64]] = []
    for epoch in range(3):
        shares = [np.asarray(answer(epoch, rank, world_size, count)) for rank in range(world_size)]
        sizes = [len(share) for share in shares]
        if len(set(sizes)) > 1:
            return Verdict(
                False,
                f"The processes get {', '.join(map(str, sizes))} images. One of them takes more "
                "steps than the others, and waits for their gradients for ever.",
            )
        order = np.concatenate(shares)
        if (
            order.dtype.kind not in "iu"
            or order.min(initial=0) < 0
            or order.max(initial=0) >= count
        ):
            return Verdict(
                False, f"The numbers of {count} images are integers from 0 to {count - 1}."
            )
        times = np.bincount(order, minlength=count)
        if (times != 1).any():
            return Verdict(
                False,
                f"In epoch {epoch} {int((times == 0).sum())} of {count} images were seen by no "
                f"process, and {int((times > 1).sum())} more than once.",
            )
        if any(np.array_equal(order, earlier) for earlier in orders):
            return Verdict(
                False,
                f"Each image is seen once, but epoch {epoch} has the order of an earlier epoch: "
                "the network sees the same batches again.",
            )
        orders.append(order)
    return Verdict(
        True,
        f"In each of {len(orders)} epochs the {world_size} processes saw {count // world_size} "
        f"images each and together each of {count} once, every time in another order.",
    )


def _require_function(answer: Any, signature: str) -> None:
    if not callable(answer):
        raise TypeError(f"the answer is a function {signature}, received {answer!r}")
