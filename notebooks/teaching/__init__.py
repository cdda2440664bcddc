"""Shared code of the lessons: exercises that check an answer, and drawings to play with."""

from IPython import get_ipython

from teaching.checked import checked
from teaching.exercises import check
from teaching.widgets import widget

__all__ = ["check", "widget"]

if shell := get_ipython():
    shell.register_magic_function(checked, "cell")
