"""Check this machine for mixed precision, and a network before its training if one is named.

    mpgluon doctor train:build

The function takes no arguments and returns a network, or (net, trainer), or (net, trainer, labels).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from mpgluon.base.findings import DoctorReport, ok, warning
from mpgluon_tools.commands.arguments import width
from mpgluon_tools.named_code import call_named, split_name
from mpgluon_tools.progress import progress_line
from mpgluon_tools.tables import counted

__all__ = ["EPILOG", "add_arguments", "run"]

EPILOG = "Exit status: 0 without errors, 1 with one, 2 for a wrong command line.\n"
_RETURNS = "a network, or (net, trainer), or (net, trainer, labels)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "network",
        nargs="?",
        default=argparse.SUPPRESS,  # the option's, which was the only way once
        metavar="module:function",
        help="a function that returns the network",
    )
    parser.add_argument("--network", help=argparse.SUPPRESS)
    parser.add_argument(
        "--recording",
        metavar="FOLDER",
        help="of mpgluon.diagnostics.NumericsRecorder or train_caltech.py --record-numerics: "
        "whether that run is about to fail",
    )


def run(options: argparse.Namespace, import_all_of_mpgluon: Callable[[], None]) -> int:
    """Check, and print; return 1 if a finding is an error."""
    # They need no MXNet, which may itself be broken.
    from mpgluon_tools.diagnostics.doctor import check_training, judge_machine, machine

    network = options.network
    if network is not None:
        split_name(network)
    with progress_line() as show:
        show("looking at this machine: MXNet is imported, a second to a minute")
        facts = machine.gather()
    report = judge_machine(facts)
    print(f"This machine\n\n{report.text(width())}")
    if options.recording is not None and facts.mxnet is not None:
        import_all_of_mpgluon()
        print(f"\n{options.recording}\n\n{_of_recording(options.recording).text(width())}")
    if network is None:
        return int(report.has_errors)
    if facts.mxnet is None:
        print(f"\n{network} was not looked at: that needs MXNet.")
        return 1
    import_all_of_mpgluon()
    made = call_named(network, _RETURNS)
    try:
        of_network = check_training(*(made if isinstance(made, tuple) else (made,)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{network} must return {_RETURNS}: {error}") from error
    print(f"\n{network}\n\n{of_network.text(width())}")
    return int(report.has_errors or of_network.has_errors)


def _of_recording(folder: str) -> DoctorReport:
    """Return the warnings of the recorded numbers of a run."""
    from mpgluon_tools.recorder.numerics.files import folder_of, read_numerics
    from mpgluon_tools.recorder.numerics.trends import WHY, trends_of

    recording = read_numerics(folder_of(folder))
    found = [
        warning(one.kind, f"since step {one.step}: {one.sentence}", WHY[one.kind], one.fix)
        for one in trends_of(recording)
    ]
    steps = f"{counted(len(recording.numbers), 'recorded step')} to step {recording.numbers[-1]}"
    return DoctorReport(tuple(found) or (ok("recording", f"{steps}: nothing is about to fail"),))
