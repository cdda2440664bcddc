"""The program of a contestant: prepares a function, then calls it once for each line that it reads.

It imports neither MXNet nor the rest of this package, because other interpreters run it too. The
arguments are the place of a factory (``module:function`` or ``file.py:function``) and its options
as JSON. The factory returns a function without arguments, which does its work once and waits for
it, and a dictionary of facts about it. With a number as the fact ``calls`` a run is as many calls,
and its seconds are the seconds of one call.

Each answer is one line of JSON on the original standard output; everything else that is printed
goes to the standard error stream. First comes ``{"facts": ..., "imported_mib": ...}``, then for
each line read ``{"seconds": ..., "peak_memory_mib": ..., "idle_cpu_s": ...}``, the last of which
is the processor time used while it waited for the line. At the end of its input it ends.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import sys
import time
from pathlib import Path
from typing import Any, Optional

_STATUS = Path("/proc/self/status")
_OUT_OF_MEMORY_SCORE = Path("/proc/self/oom_score_adj")


def main() -> None:
    """Prepare, then run at each line of input until there is none."""
    # Libraries print too; standard output is kept for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if _OUT_OF_MEMORY_SCORE.exists():
        # Where memory runs out, the system ends a contestant, which is reported, and nothing else.
        _OUT_OF_MEMORY_SCORE.write_text("1000")

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    factory = _find(sys.argv[1])
    imported = _peak_memory_mib()
    run, facts = factory(**json.loads(sys.argv[2]))
    calls = facts.get("calls", 1)
    answer(facts=facts, imported_mib=imported)
    waiting_since = time.process_time()
    while sys.stdin.readline():
        idle_cpu_s = time.process_time() - waiting_since
        began = time.perf_counter()
        for _ in range(calls):
            run()
        seconds = (time.perf_counter() - began) / calls
        answer(seconds=seconds, peak_memory_mib=_peak_memory_mib(), idle_cpu_s=idle_cpu_s)
        waiting_since = time.process_time()


def _find(place: str) -> Any:
    """Return the function that ``module:function`` or ``file.py:function`` names."""
    source, _, name = place.rpartition(":")
    if not source.endswith(".py"):
        return pkgutil.resolve_name(place)
    spec = importlib.util.spec_from_file_location(Path(source).stem, source)
    assert spec is not None
    assert spec.loader is not None  # since it ends in .py
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def _peak_memory_mib() -> Optional[float]:
    """Return the largest memory of this process so far; ``None`` on other systems than Linux.

    ``getrusage`` would include the parent's, from which this process was forked.
    """
    if not _STATUS.exists():
        return None
    lines = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 2**10  # from KiB


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    # The modules in this folder have common names: nothing may be imported from there by them.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]
    main()
