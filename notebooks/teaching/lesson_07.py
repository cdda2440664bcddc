"""The exercises of lesson 07: a fair clock, the batch of a dense layer, the images that fit."""

from __future__ import annotations

import math
import time
from typing import Any

from teaching.exercises import Verdict, exercise, number_of

OPERATIONS_PER_BYTE = 125e12 / 900e9  # of a V100 in FP16
MEMORY_MIB = 8 * 1024
MEASURED_MIB = {8: 1055, 32: 2409}  # peaks of training ResNet-50 in FP16, by batch size


class _SlowingMachine:
    """Work that is asked for and done later, by sleeping: each call takes longer than the last."""

    seconds_of_a, true_ratio = 0.004, 1.5

    def __init__(self) -> None:
        self.order = ""
        self.waits = 0
        self._seconds = 0.0

    def a(self) -> None:
        self._ask("a", self.seconds_of_a)

    def b(self) -> None:
        self._ask("b", self.seconds_of_a * self.true_ratio)

    def wait(self) -> None:
        self.waits += 1
        time.sleep(self._seconds)
        self._seconds = 0.0

    def _ask(self, name: str, seconds: float) -> None:
        self.order += name
        self._seconds += seconds * (1 + len(self.order) / 20)


@exercise("07.1")
def fair_ratio(answer: Any) -> Verdict:
    if not callable(answer):
        raise TypeError(f"the answer is a function of a, b and wait, received {answer!r}")
    machine = _SlowingMachine()
    ratio = number_of(answer(machine.a, machine.b, machine.wait), "how many times as long")
    calls, waits = len(machine.order), machine.waits
    found = f"Your function says {ratio:.2f}; the machine was built for {machine.true_ratio}."
    if abs(ratio / machine.true_ratio - 1) < 0.1 and waits >= calls:
        return Verdict(True, f"{found} It made {calls} calls, and waited {waits} times.")
    if waits < calls:
        return Verdict(
            False,
            f"{found} It made {calls} calls and waited {waits} times: without a wait the clock "
            "sees how fast Python asks, and the work is counted in what is timed next.",
        )
    if "ab" * 2 not in machine.order and "ba" * 2 not in machine.order and calls > 2:
        return Verdict(
            False,
            f"{found} It called {machine.order}: what comes later meets a slower machine.",
        )
    return Verdict(False, f"{found} It called {machine.order}. Take the ratio of each round.")


def _intensity(batch: int) -> float:
    """Return the operations per byte of ResNet-50's last layer in FP16."""
    inputs, outputs = 2048, 1000
    numbers = batch * inputs + inputs * outputs + batch * outputs
    return 2 * batch * inputs * outputs / (2 * numbers)


@exercise("07.2")
def batch_that_keeps_a_v100_busy(answer: Any) -> Verdict:
    batch = round(number_of(answer, "images"))
    if batch < 1:
        return Verdict(False, "A batch has at least one image.")
    intensity = _intensity(batch)
    found = (
        f"With a batch of {batch} the layer does {intensity:.1f} operations per byte; "
        f"a V100 needs {OPERATIONS_PER_BYTE:.1f} in FP16."
    )
    if intensity < OPERATIONS_PER_BYTE:
        busy = math.floor(100 * intensity / OPERATIONS_PER_BYTE)
        return Verdict(False, f"{found} Its Tensor Cores would be busy {busy} % of the time.")
    if _intensity(batch - 1) >= OPERATIONS_PER_BYTE:
        return Verdict(False, f"{found} That is enough, but a smaller batch is, too.")
    return Verdict(True, f"{found} With one image less it would be too few.")


@exercise("07.3")
def images_that_fit(answer: Any) -> Verdict:
    batch = round(number_of(answer, "images"))
    if batch < 1:
        return Verdict(False, "A batch has at least one image.")
    found = f"A batch of {batch} takes about {_mib(batch):,.0f} MiB."
    if _mib(batch) > MEMORY_MIB:
        return Verdict(False, f"{found} That is more than {MEMORY_MIB:,}.")
    if _mib(batch + 1) <= MEMORY_MIB:
        return Verdict(False, f"{found} It fits, and one more image would fit, too.")
    return Verdict(True, f"{found} One more image would not fit.")


def _mib(batch: int) -> float:
    """Return the peak on the straight line through two measured ones."""
    (few, low), (many, high) = MEASURED_MIB.items()
    return low + (batch - few) * (high - low) / (many - few)
