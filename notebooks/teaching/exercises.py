"""Exercises that check themselves: an answer is run, and the verdict explains it.

The exercises of lesson NN are functions of the module ``teaching.lesson_NN``, one for each, marked
with :func:`exercise`. Each takes an answer and returns a :class:`Verdict`.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from numbers import Real
from typing import Any, NamedTuple

__all__ = ["Verdict", "check", "exercise", "number_of"]


class Verdict(NamedTuple):
    """Whether an answer is right, and its consequence: found by running it."""

    right: bool
    meaning: str


class Judged(int):
    """True or false, as a number that Jupyter does not show below the cell."""

    def _ipython_display_(self) -> None:
        pass


_EXERCISES: dict[str, Callable[[Any], Verdict]] = {}


def exercise(number: str) -> Callable[[Callable[[Any], Verdict]], Callable[[Any], Verdict]]:
    """Mark the function that judges the answers to an exercise, such as "03.1"."""

    def mark(judge: Callable[[Any], Verdict]) -> Callable[[Any], Verdict]:
        _EXERCISES[number] = judge
        return judge

    return mark


def check(number: str, answer: Any = ...) -> Judged:
    """Print whether an answer is right, and its consequence; return whether it is right.

    Parameters
    ----------
    number : str
        Lesson and exercise, such as "03.1".
    answer : object
        The answer to the exercise; ``...`` stands for no answer yet.

    Raises
    ------
    ValueError
        If there is no such exercise.
    TypeError
        If the exercise asks for another kind of answer.
    """
    module = f"teaching.lesson_{number.partition('.')[0]}"
    if importlib.util.find_spec(module):
        importlib.import_module(module)
    if number not in _EXERCISES:
        known = ", ".join(sorted(_EXERCISES))
        raise ValueError(f"there is no exercise {number!r}; there are {known or 'none'}")
    if answer is ...:
        print(f"{number}: replace ... by your answer and run this cell again.")
        return Judged(False)
    verdict = _EXERCISES[number](answer)
    print(f"{number}: {'right' if verdict.right else 'not yet'}. {verdict.meaning}")
    return Judged(verdict.right)


def number_of(answer: Any, unit: str) -> float:
    """Return an answer as a finite number.

    Raises
    ------
    TypeError
        If it is none; the message says which unit is asked for.
    """
    if isinstance(answer, bool) or not isinstance(answer, Real) or not math.isfinite(answer):
        raise TypeError(f"the answer is a number ({unit}), received {answer!r}")
    return float(answer)
