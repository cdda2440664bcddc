"""Records of trials on this machine: texts by name, in the user's cache folder."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Optional

from mpgluon.base import files

__all__ = ["cache_folder", "read_record", "write_record"]

_logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return where records and compiled libraries are kept."""
    parent = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(parent or Path.home() / ".cache") / "mpgluon"
    except RuntimeError:  # a user without a home folder: a place that cannot be written
        return Path(os.devnull) / "mpgluon"


def read_record(name: str, field: str) -> Optional[str]:
    """Return the text of a record; ``None`` if there is none that can be read."""
    try:
        text = json.loads((cache_folder() / f"{name}.json").read_text())[field]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return text if isinstance(text, str) else None


def write_record(name: str, **text: str) -> None:
    """Write a record at once; where that is impossible, the next process tries again."""
    path = cache_folder() / f"{name}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic_write(path) as file:
            file.write(json.dumps(text).encode())
    except OSError as error:
        _logger.info("%s cannot be written: %s", path, error)
