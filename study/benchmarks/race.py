"""Contestants in turn: each in its own process, one computing while the others wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import mean
from typing import Any, Optional

from mpgluon_tools.timing import Quartiles, quartiles, ratios, turns

from tqdm import tqdm

from study.benchmarks.contestant import Contestant, ContestantError, Process

__all__ = ["Case", "CaseResult", "Conditions", "Failure", "Result", "race"]

_logger = logging.getLogger(__name__)
# Until the OpenMP threads of the contestant that has just run sleep, which takes up to 8 ms.
_PAUSE_S = 0.02


@dataclass(frozen=True)
class Case:
    """A race: the work that is timed, and its contestants.

    Attributes
    ----------
    name : str
        Such as ``"training"``.
    title : str
        For readers: network, batch, pixels.
    contestants : sequence of Contestant
        The first is the baseline.
    settings : mapping
        The settings that all contestants share, as JSON can hold them.
    """

    name: str
    title: str
    contestants: Sequence[Contestant]
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Conditions:
    """How it is timed.

    Attributes
    ----------
    threads : int
        The number of threads of each contestant.
    rounds, warm_up : int
        Runs of each contestant, and runs before these that are not counted.
    limit_s : float
        Seconds for a contestant to start, and for each run.
    """

    threads: int
    rounds: int = 11
    warm_up: int = 2
    limit_s: float = 300.0

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.threads < 1 or self.warm_up < 0 or not self.limit_s > 0:
            raise ValueError(
                "rounds, threads and limit_s must be positive and warm_up not negative; received "
                f"{self.rounds}, {self.threads}, {self.limit_s:g} and {self.warm_up}"
            )


@dataclass(frozen=True)
class Result:
    """The times and the memory of one contestant.

    Attributes
    ----------
    name : str
    seconds : sequence of float
        Seconds of each round.
    peak_memory_mib : float or None
        Peak memory of its process, without child processes; ``None`` where it is not known.
    imported_mib : float or None
        The peak after its imports, before anything was prepared.
    idle_cpu_s : float
        Mean processor time that it used between two of its runs.
    facts : dict
        From the contestant: ``images`` of a run, ``parameters``, ``note``, …
    """

    name: str
    seconds: Sequence[float]
    peak_memory_mib: Optional[float]
    imported_mib: Optional[float]
    idle_cpu_s: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def time(self) -> Quartiles:
        """The seconds of a run."""
        return quartiles(self.seconds)

    @property
    def images_per_second(self) -> Optional[float]:
        """From the median; ``None`` if a run has no images."""
        images = self.facts.get("images")
        return None if images is None else images / self.time.median


@dataclass(frozen=True)
class Failure:
    """A contestant without a result: why, and the last lines that it printed."""

    name: str
    reason: str
    output: str = ""


@dataclass(frozen=True)
class CaseResult:
    """The results of a case; its baseline may be among the failures."""

    name: str
    title: str
    settings: Mapping[str, Any]
    baseline: str
    results: list[Result]
    failures: list[Failure] = field(default_factory=list)

    def relative(self, result: Result) -> Optional[Quartiles]:
        """Return the time of a run over the baseline's in the same round; ``None`` without it."""
        for base in self.results:
            if base.name == self.baseline:
                return quartiles(ratios(result.seconds, base.seconds))
        return None


def race(case: Case, conditions: Conditions, *, progress: bool = False) -> CaseResult:
    """Run the contestants in turn, in an order that is reversed from round to round.

    All are started first. While one computes the others wait for their turn in a read, which
    takes no processor time. One that dies or takes too long is left out from then on.
    ``progress`` shows a bar on the standard error stream.

    Raises
    ------
    ValueError
        If there is no contestant, or two have one name.
    """
    names = [contestant.name for contestant in case.contestants]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"contestants need a name each; received {names} for {case.title!r}")
    running: dict[str, Process] = {}
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    failures: list[Failure] = []
    runs = conditions.warm_up + conditions.rounds
    with ExitStack() as stack:
        bar = stack.enter_context(
            tqdm(
                total=len(names) * (1 + runs),
                desc=case.title,
                leave=False,
                disable=None if progress else True,
            )
        )

        @contextmanager
        def reported(name: str) -> Iterator[None]:
            try:
                yield
            except ContestantError as error:
                _logger.warning("%s: %s %s; it is left out", case.title, name, error)
                failures.append(Failure(name, str(error), error.output))
                if name in running:
                    running.pop(name).close()
            bar.update()

        for one in case.contestants:
            with reported(one.name):
                running[one.name] = stack.enter_context(
                    Process(one, threads=conditions.threads, limit_s=conditions.limit_s)
                )
                running[one.name].wait_until_ready()
        for name in turns(names, runs):
            if name in running:
                time.sleep(_PAUSE_S)
                with reported(name):
                    answers[name].append(running[name].run())
    results = [
        Result(
            name,
            seconds=[answer["seconds"] for answer in answers[name][conditions.warm_up :]],
            peak_memory_mib=answers[name][-1]["peak_memory_mib"],
            imported_mib=process.imported_mib,
            idle_cpu_s=mean(answer["idle_cpu_s"] for answer in answers[name]),
            facts=process.facts,
        )
        for name, process in running.items()
    ]
    return CaseResult(case.name, case.title, dict(case.settings), names[0], results, failures)
