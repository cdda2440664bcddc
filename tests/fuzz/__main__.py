"""Try random networks until the time is over, and print what fails as a program to paste.

`make fuzz`, or `PYTHONPATH=.:tests python -m fuzz --minutes 4 --seed 0`. The status is 1 if a
network has failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from fuzz.checking import COUNTERPART, Case, Failure, case_of, check
from fuzz.programs import Program
from fuzz.random_networks import random_program
from fuzz.reducing import reduced
from fuzz.workers import SETTINGS, Workers

_MOST_FAILURES = 5
_STEPS_OF_A_RUN = 3


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=10**9, help="at most so many networks")
    parser.add_argument("--reduce-seconds", type=float, default=120, help="for each failure")
    options = parser.parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes
    seed, failures, counts, ways = options.seed, 0, Counter(), Counter()
    with Workers() as workers:
        while time.monotonic() < end and counts["networks"] < options.count:
            program, case = random_program(seed), case_of(seed)
            failure = check(workers, program, case)
            counts["networks"] += 1
            counts["lines"] += len(program.nodes)
            counts["layers"] += len(program.layers)
            counts["of mx.np"] += program.interface == "np"
            counts["plain"] += program.is_plain
            counts["steps"] += 3 * _STEPS_OF_A_RUN * len(case.settings)
            ways[case.way] += 1
            if failure is not None and failure.is_mxnets_own:
                counts["own"] += 1
            elif failure is not None:
                failures += 1
                _report(workers, seed, program, case, failure, options.reduce_seconds)
            if failures == _MOST_FAILURES:
                print(f"{failures} networks have failed, the rest is not tried")
                break
            seed += 1
    print(
        f"from seed {options.seed} on: {counts['networks']} networks ({counts['of mx.np']} of the "
        f"NumPy interface, {counts['plain']} plain Blocks) of {counts['lines']} lines and "
        f"{counts['layers']} layers, {counts['steps']} steps; {failures} failed, "
        f"{counts['own']} do in plain FP32 too"
    )
    print(", ".join(f"{way}: {number}" for way, number in sorted(ways.items())))
    return int(failures > 0)


def _report(
    workers: Workers, seed: int, program: Program, case: Case, failure: Failure, seconds: float
) -> None:
    print(f"seed {seed}, {case.way}: {failure.sentence}", flush=True)
    end = time.monotonic() + seconds
    latest = [failure]

    def fails(candidate: Program) -> bool:
        if time.monotonic() > end:
            return False
        now = check(workers, candidate, case)
        if now is None or now.is_mxnets_own or now.kind != failure.kind:
            return False
        latest[0] = now
        return True

    small = reduced(program, fails)
    print(f"reduced from {len(program.nodes)} lines to {len(small.nodes)}: {latest[0].sentence}")
    for name in case.settings:
        print(f"# {name}: {' '.join(f'{k}={v}' for k, v in SETTINGS[name].items()) or 'as it is'}")
    print(small.source() + footer(case), flush=True)
    if COUNTERPART in latest[0].sentence:
        print(f"# its counterpart\n{small.counterpart.source()}", flush=True)


def footer(case: Case) -> str:
    """Return lines that run a program in each mode, and print what differs."""
    return f"""
if __name__ == "__main__":  # with PYTHONPATH=.:tests
    import sys

    from fuzz.properties import PROPERTIES, differences, run

    program = sys.modules["__main__"]
    one = run(program, {case.way!r}, "imperative")
    for mode in ("hybridized", "static"):
        print(mode, differences(one, run(program, {case.way!r}, mode)))
"""


if __name__ == "__main__":
    sys.exit(main())
