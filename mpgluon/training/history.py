"""The history of a run: one JSON object per line, appended as things happen.

Events are ``start`` (config, versions, machine), ``step``, ``epoch`` and ``end``.
"""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import mxnet as mx

__all__ = ["History", "describe_machine", "installed_versions"]

Event = dict[str, Any]


class History:
    """The events of a run, in memory and in a file.

    Parameters
    ----------
    path : Path
        The JSON-lines file.
    steps_done : int
        Of a continued run: events of later steps are dropped, since they will happen again.
        Zero starts a new file.
    """

    def __init__(self, path: Path, steps_done: int = 0) -> None:
        self.events: list[Event] = []
        if steps_done and path.exists():
            lines = path.read_text().splitlines()
            complete = (_parse(line) for line in lines)
            self.events = [e for e in complete if e and e.get("step", 0) <= steps_done]
        part = path.with_name(f".{path.name}.part")
        part.write_text("".join(json.dumps(event) + "\n" for event in self.events))
        os.replace(part, path)  # whoever kills this run now leaves the old file or the new one
        self._path = path

    def add(self, event: str, **values: Any) -> None:
        """Append an event to the list and to the file."""
        self.events.append({"event": event, **values})
        with open(self._path, "a") as file:
            file.write(json.dumps(self.events[-1]) + "\n")

    def of(self, event: str) -> list[Event]:
        """Return the events of one kind, oldest first."""
        return [e for e in self.events if e["event"] == event]


def _parse(line: str) -> Event:
    try:
        event: Event = json.loads(line)
    except ValueError:  # the last line of a run that was killed while writing it
        return {}
    return event


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide results."""
    packages = ("mpgluon", "numpy", "pillow", "gluoncv")
    found = {name: metadata.version(name) for name in packages}
    return {"python": platform.python_version(), "mxnet": mx.__version__, **found}


def describe_machine() -> dict[str, Any]:
    """Return what a reader needs to judge a speed: processor, cores, GPUs."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        model = names[0] if names else model
    return {
        "system": platform.platform(),
        "processor": model,
        "cores": os.cpu_count(),
        "gpus": mx.context.num_gpus(),
    }
