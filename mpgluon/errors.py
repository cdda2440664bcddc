"""The exceptions that mpgluon raises for a bad moment, device or file.

A bad value is a ``ValueError`` and a bad kind of argument a ``TypeError``, as everywhere in
Python. Each message says what is wrong, what was received and what to do instead.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "DataError",
    "DistributedError",
    "LossScaleCollapseError",
    "MpgluonError",
    "PrecisionError",
    "TrainerStateError",
]


class MpgluonError(Exception):
    """The base of all exceptions that are mpgluon's own."""


class PrecisionError(MpgluonError):
    """A network, or a place in one, cannot compute in the format that was asked for."""


class TrainerStateError(MpgluonError):
    """A call came at the wrong moment in the life of a Trainer."""


class LossScaleCollapseError(MpgluonError):
    """Step after step overflows with a loss scale that can shrink no further."""


class DataError(MpgluonError):
    """A file or a data set is missing, damaged or not what it should be."""


class DistributedError(MpgluonError):
    """A process of the job is missing, late, or at another place than the rest."""


class CheckpointError(MpgluonError):
    """A checkpoint is damaged or belongs to something else; nothing was changed."""
