"""Timing several things in turn, so that a busy machine is as slow for one as for the other.

It knows nothing of networks. A case is a function that does something once and waits for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Callable

__all__ = ["Quartiles", "interleave", "quartiles", "ratios", "turns"]


@dataclass(frozen=True)
class Quartiles:
    """A median with the quartiles around it."""

    lower: float
    median: float
    upper: float


def interleave(
    cases: Mapping[str, Callable[[], object]], *, rounds: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Run every case once in each round, and return the seconds of each.

    The order is reversed from round to round, so that none always follows the same other.

    Parameters
    ----------
    cases : mapping from name to function without arguments
    rounds : int
        How often each is timed.
    warm_up : int
        How often each is run before that.

    Raises
    ------
    ValueError
        If there is nothing to time.
    """
    if not cases or rounds < 1:
        raise ValueError(f"nothing to time: {len(cases)} cases, {rounds} rounds")
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


def ratios(seconds: list[float], base: list[float]) -> list[float]:
    """Return the ratio of each round: what disturbed both runs of a round cancels."""
    return [one / other for one, other in zip(seconds, base)]


def quartiles(values: list[float]) -> Quartiles:
    """Return the median and the quartiles of at least one value."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))
