"""Timing several functions in turn, so that a busy machine slows all of them alike."""

from __future__ import annotations

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
    cases: Mapping[str, Callable[[], object]], *, rounds: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Call every function once in each round, and return the seconds of each by name.

    The order is reversed from round to round, so that none always follows the same other. Each
    must wait for the device itself; ``warm_up`` calls of each are not timed.

    Raises
    ------
    ValueError
        If there is nothing to time.
    """
    if not cases or rounds < 1:
        raise ValueError(f"nothing to time: received {len(cases)} cases and {rounds} rounds")
    for _ in range(warm_up):
        for case in cases.values():
            case()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for name in turns(cases, rounds):
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
