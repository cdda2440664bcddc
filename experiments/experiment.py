"""What an experiment, its record and a group of experiments are. Data; nothing is run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

__all__ = ["Experiment", "Group", "Outcome", "Place", "Record", "Section"]


@dataclass(frozen=True)
class Place:
    """Where an experiment finds its images and leaves its files.

    Attributes
    ----------
    data_dir : Path
        With the tree of photographs, for the experiments that need them.
    work_dir : Path
        The experiment's own folder. It holds what an interrupted run of it left there.
    """

    data_dir: Path
    work_dir: Path


@dataclass(frozen=True)
class Outcome:
    """What an experiment found: the same in every repetition, times apart.

    Attributes
    ----------
    figures : mapping of str to number, bool, str or None
    curves : mapping of str to sequence of numbers
        Such as the loss of each step; ``None`` where there is no finite number.
    times : mapping of str to number
        Seconds and what else differs from run to run.
    """

    figures: Mapping[str, Any]
    curves: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """One row of evidence.

    Attributes
    ----------
    name : str
        The group first, with slashes: ``"parity/resnet50_v2/float16/seed-0"``. It is the name of
        the record's file too.
    config : mapping
        All that the outcome depends on besides versions and processor, as JSON has it.
    run : callable
        Takes a :class:`Place`.
    needs_photographs : bool
    categories : int
        How many the tree of photographs must have; those of caltech101-mini are in each.
    needs_quiet : bool
        Whether it measures times: it runs alone, after the others.
    """

    name: str
    config: Mapping[str, Any]
    run: Callable[[Place], Outcome]
    needs_photographs: bool = False
    categories: int = 10
    needs_quiet: bool = False


@dataclass(frozen=True)
class Record:
    """An experiment that was run: what its JSON file holds.

    Attributes
    ----------
    name : str
    config : mapping
    outcome : Outcome
    command : str
        Which makes it.
    threads : int
        Of OpenMP: sums of other lengths have other last bits.
    seconds : float
        The whole experiment, on a machine that may have had other work.
    date : str
        ISO 8601, UTC.
    source, machine, versions : mapping
        Commit when the record was written, processor, packages.
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


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes
    ----------
    text : str
        Markdown, without the heading; pictures as ``![…](results/NAME.png)``.
    figures : mapping of str to callable
        By that NAME; each draws on a Matplotlib figure that it is handed.
    """

    text: str
    figures: Mapping[str, Callable[[Any], None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Experiments that one section of the page is about.

    Attributes
    ----------
    name : str
        The first part of its experiments' names.
    title : str
        The section's heading.
    experiments : callable
        Returns all of them.
    section : callable
        Takes the records that there are, by name, and returns the section. It names those that
        are missing.
    """

    name: str
    title: str
    experiments: Callable[[], list[Experiment]]
    section: Callable[[Mapping[str, Record]], Section]
