"""The exceptions that mpgluon raises for a call at the wrong time, and for bad devices and files.

A bad value is a ``ValueError`` and a bad kind of argument a ``TypeError``, as everywhere in
Python. Each message says what is wrong, what was received and what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "CheckpointError",
    "DataError",
    "DistributedError",
    "LossScaleCollapseError",
    "MpgluonError",
    "PrecisionError",
    "TrainerStateError",
    "did_you_mean",
]


class MpgluonError(Exception):
    """The base class of mpgluon's exceptions."""


class PrecisionError(MpgluonError):
    """A network, or a part of it, cannot compute in the requested format."""


class TrainerStateError(MpgluonError):
    """A method or function was called at the wrong time for its Trainer."""


class LossScaleCollapseError(MpgluonError):
    """Every step overflows, with a loss scale that cannot shrink any further."""


class DataError(MpgluonError):
    """A file or a data set is missing, damaged or of the wrong kind."""


class DistributedError(MpgluonError):
    """A process of the job is missing, late, or at another step than the others."""


class CheckpointError(MpgluonError):
    """A checkpoint is damaged or belongs to something else; nothing was changed."""


def did_you_mean(name: str, possible: Iterable[str], *, count: int = 3) -> str:
    """Return the end of a message, with the names closest to one that does not exist, or ``""``."""
    matches = get_close_matches(name, list(possible), n=count)
    return f"; did you mean {' or '.join(map(repr, matches))}?" if matches else ""
