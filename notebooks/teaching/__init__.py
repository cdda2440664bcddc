"""Shared code of the lessons: exercises that check an answer, and drawings to play with."""

from teaching.exercises import check
from teaching.widgets import widget

__all__ = ["check", "widget"]
