"""Experiments, their records, and groups of experiments as values. Nothing is run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

__all__ = ["Experiment", "Group", "Outcome", "Place", "Record", "Records", "is_below"]


@dataclass(frozen=True)
class Place:
    """Where an experiment finds its images and leaves its files.

    Attributes
    ----------
    data_dir : Path
        Holds the tree of photographs, for the experiments that need them.
    work_dir : Path
        The experiment's own folder, with the files that an interrupted run left there.
    """

    data_dir: Path
    work_dir: Path


@dataclass(frozen=True)
class Outcome:
    """The result of an experiment: the same in every repetition, times apart.

    Attributes
    ----------
    figures : mapping of str to number, bool, str or None
    curves : mapping of str to sequence
        Such as the loss of each step; ``None`` where there is no finite number.
    times : mapping of str to number
        Seconds and whatever else differs from run to run.
    """

    figures: Mapping[str, Any]
    curves: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One run with a record of its own.

    Attributes
    ----------
    name : str
        The group first, with slashes: ``"parity/resnet50_v2/float16/seed-0"``; the path of the
        record's file too.
    config : mapping
        All that the outcome depends on besides versions and processor, as JSON holds it.
    run : callable
        Takes a :class:`Place`, returns an :class:`Outcome`.
    needs_photographs : bool
    categories : int
        How many categories of photographs it needs; caltech101-mini has 10.
    needs_quiet : bool
        Whether it measures times: it runs alone, after the others.
    block : str, optional
        The experiments that it is compared with, the group by default: all records of a block come
        from one kind of processor.
    """

    name: str
    config: Mapping[str, Any]
    run: Callable[[Place], Outcome]
    needs_photographs: bool = False
    categories: int = 10
    needs_quiet: bool = False
    block: str = ""

    def __post_init__(self) -> None:
        if not self.block:
            object.__setattr__(self, "block", self.name.split("/")[0])


@dataclass(frozen=True)
class Record:
    """An experiment that was run: the content of its JSON file.

    Attributes
    ----------
    name, config, outcome
        As in :class:`Experiment` and :class:`Outcome`.
    command : str
        The command line that makes it.
    threads : int
        Threads of OpenMP; their number decides the last bits of sums.
    seconds : float
        Duration of the whole experiment, on a machine that may have had other work.
    date : str
        ISO 8601, UTC.
    source, machine, versions : mapping
        Commit, processor and packages. ``source`` has ``of_an_earlier_run`` where the training, or
        a part of it, had been done before, perhaps by another commit.
    """

    name: str
    config: Mapping[str, Any]
    outcome: Outcome
    command: str
    threads: int
    seconds: float
    date: str
    source: Mapping[str, Any]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]


Records = Mapping[str, Record]
"""Records by name."""


@dataclass(frozen=True)
class Group:
    """The experiments that one section of the page is about.

    Attributes
    ----------
    name : str
        The first part of its experiments' names, and the name of ``view``'s result in the marked
        places of the pages.
    experiments : sequence of Experiment
    view : callable
        Takes the records that exist, and returns the values on the pages. Anything that needs all
        records of the group is computed only when it is read.
    pictures : mapping of str to callable
        By name; each draws on an empty Matplotlib figure from the records.
    """

    name: str
    experiments: Sequence[Experiment]
    view: Callable[[Records], Any]
    pictures: Mapping[str, Callable[[Any, Records], None]] = field(default_factory=dict)


def is_below(name: str, prefix: str) -> bool:
    """Return whether an experiment's name is ``prefix`` or starts with it and a slash."""
    return name == prefix or name.startswith(f"{prefix}/")
