"""Tools to use alongside training: recorder and replay, report, ONNX, plots.

Each tool needs packages that an extra installs, and says which one where they are missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["extra"]


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Name the extra that installs a package, where importing the package fails.

    Raises
    ------
    ImportError
        If a package that is imported within is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{error.name} is not installed; install it with pip install 'mpgluon[{name}]'",
            name=error.name,
        ) from error
