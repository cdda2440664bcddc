"""Timing several functions in turn, so that a busy machine slows all of them alike."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Callable, NamedTuple

__all__ = ["Quartiles", "interleave", "quartiles", "ratios", "turns"]


class Quartiles(NamedTuple):
    """A median with the quartiles around it."""

    lower: float
    median: float
    upper: float


def interleave(
    cases: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warm_up: int = 2,
    limit_s: float = math.inf,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, list[float]]:
    """Call every function once in each round, and return the seconds of each by name.

    The order is reversed from round to round, so that none always follows the same other. Each
    must wait for the device itself; ``warm_up`` calls of each are not timed. No further round
    begins ``limit_s`` seconds after the first call, but one is always done. ``progress`` receives
    the name of each round as it begins.

    Raises
    ------
    ValueError
        If there is nothing to time.
    """
    if not cases or rounds < 1:
        raise ValueError(f"nothing to time: received {len(cases)} cases and {rounds} rounds")
    start = time.perf_counter()
    for name, case in cases.items():
        progress(f"warm-up of {name}")
        for _ in range(warm_up):
            case()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number, name in enumerate(turns(cases, rounds)):
        done, place = divmod(number, len(cases))
        if place == 0:
            if done and time.perf_counter() - start > limit_s:
                break
            progress(f"round {done + 1} of {rounds}")
        began = time.perf_counter()
        cases[name]()
        seconds[name].append(time.perf_counter() - began)
    return seconds


def turns(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Yield every name once in each round, in an order that is reversed from round to round."""
    order = list(names)
    for _ in range(rounds):
        yield from order
        order.reverse()


def ratios(seconds: Iterable[float], base: Iterable[float]) -> list[float]:
    """Return the ratio of each round: what slowed both runs of a round cancels."""
    return [one / other for one, other in zip(seconds, base)]


def quartiles(values: Iterable[float]) -> Quartiles:
    """Return the median and the quartiles of at least one value."""
    known = list(values)
    if len(known) == 1:
        return Quartiles(*known * 3)
    return Quartiles(*statistics.quantiles(known, n=4, method="inclusive"))
