"""Check this machine for mixed precision, and with --network a network before its training.

    python scripts/doctor.py --network train:build

The function takes no arguments and returns a network, or (net, trainer), or (net, trainer, labels).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Sequence
from typing import Any, Callable, Optional


class CommandLineError(Exception):
    """``--network`` does not name a network that can be checked."""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Parse the command line, check, and print; return 1 if a finding is an error."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 without errors, 1 with one, 2 for a wrong command line.",
    )
    parser.add_argument(
        "--network", metavar="MODULE:FUNCTION", help="a function that returns the network"
    )
    network = parser.parse_args(arguments).network
    try:
        if network is not None and not all(network.partition(":")):
            raise CommandLineError(
                f"--network is like package.module:function; received {network!r}"
            )
        import_all_of_mpgluon = _without_mxnet()
        from mpgluon.diagnostics.doctor import check_training, judge_machine, machine

        facts = machine.gather()
        report = judge_machine(facts)
        print(f"This machine\n\n{report}")
        if network is None:
            return int(report.has_errors)
        if facts.mxnet is None:
            print(f"\n{network} was not looked at: that needs MXNet.")
            return 1
        import_all_of_mpgluon()
        made = _call(network)
        try:
            of_network = check_training(*(made if isinstance(made, tuple) else (made,)))
        except (TypeError, ValueError) as error:
            raise CommandLineError(
                f"{network} must return a network, (net, trainer) or (net, trainer, labels): "
                f"{error}"
            ) from error
    except CommandLineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\n{network}\n\n{of_network}")
    return int(report.has_errors or of_network.has_errors)


def _without_mxnet() -> Callable[[], None]:
    """Make modules of mpgluon importable without MXNet; return a function that imports the rest.

    ``import mpgluon`` imports MXNet, which fails on the very machines that need a doctor. So the
    package is empty at first, and only knows the folder of its modules.
    """
    if "mpgluon" in sys.modules:
        return lambda: None
    spec = importlib.util.find_spec("mpgluon")
    if spec is None or spec.loader is None:
        raise CommandLineError(
            "mpgluon is not installed for this Python; run pip install -e . in its checkout"
        )
    loader, package = spec.loader, importlib.util.module_from_spec(spec)
    sys.modules["mpgluon"] = package
    return lambda: loader.exec_module(package)


def _call(network: str) -> Any:
    """Call the function of ``MODULE:FUNCTION``; exceptions from inside it are not caught."""
    module_name, _, function_name = network.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        if f"{module_name}.".startswith(f"{error.name}."):
            raise CommandLineError(
                f"there is no module {error.name!r} in {os.getcwd()} or among what is installed; "
                "give a dotted name without .py, and run from the folder that it begins in"
            ) from error
        raise CommandLineError(f"importing {module_name} failed: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise CommandLineError(
            f"{module.__file__} has no function {function_name!r}; write one that returns the "
            "network, or (net, trainer), or (net, trainer, labels)"
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise CommandLineError(f"{network} must take no arguments: {error}") from error
    return function()


if __name__ == "__main__":
    sys.exit(main())
