"""The folded checks of a lesson: asserts that hold for its own numbers.

A student changes the numbers. In a student's notebook a check that fails is a note, not an error.
"""

from __future__ import annotations

import ast
import traceback

import mpgluon

from IPython import get_ipython

__all__ = ["checked"]

# Errors that other numbers cause. A NameError is not one of them: an earlier cell was not run.
_OF_OTHER_NUMBERS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, mpgluon.MpgluonError),
    *(RuntimeError, StopIteration, TypeError, ValueError),
)


def checked(_line: str, cell: str) -> None:
    """Run a check, as the cell magic ``%%checked``; print each assert that fails, and go on.

    ``scripts/build_notebooks.py`` writes the magic above each check after it has executed the
    lesson without it, so that a failing assert stops the build.
    """
    for statement in ast.parse(cell).body:
        try:
            exec(compile(ast.Module([statement], []), "checked", "exec"), get_ipython().user_ns)
        except _OF_OTHER_NUMBERS as error:
            _, (_, line), *_ = traceback.walk_tb(error.__traceback__)
            begun = (s for s in ast.walk(statement) if isinstance(s, ast.stmt) and s.lineno <= line)
            words = ast.get_source_segment(cell, max(begun, key=lambda one: one.lineno)) or ""
            print("your numbers differ:", " ".join(words.removeprefix("assert ").split()))
            if not isinstance(error, AssertionError):
                print(f"the rest of this check is left out ({type(error).__name__}: {error})")
                return
