"""The commands of ``mpgluon``, a module each. What MXNet and the extras bring is imported at a run.

A command's module has a docstring for ``--help``, ``add_arguments(parser)`` and
``run(options, import_all_of_mpgluon)``, which calls the function before what needs MXNet.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Callable, Optional

from mpgluon.errors import MpgluonError

__all__ = ["COMMANDS", "exit_status", "main", "parser_of"]

COMMANDS = {
    "finetune": "train a classifier on your own photographs (extra recipes)",
    "doctor": "check this machine, and a network before its training",
    "diagnose": "examine a network on one batch; write an HTML page (extra report)",
    "replay": "run a training step again that was skipped",
    "numerics": "show the recorded numbers of a run, or where two runs part",
    "export": "write a network as an ONNX file (extra onnx) or a PyTorch program",
    "parity": "compare a port to PyTorch with a network, layer by layer",
    "predict": "name photographs with a trained network (extra serve)",
    "serve": "serve a page on which to try a network on photographs (extra serve)",
    "bench": "time a training step in FP32, FP16 and BF16, and its memory",
}
_WIDTH = "Tables fit into the terminal, or into 80 columns; COLUMNS=120 widens them."


def main(
    arguments: Optional[Sequence[str]] = None,
    import_all_of_mpgluon: Callable[[], None] = lambda: None,
) -> int:
    """Run a command line, by default this process's, and return the exit status.

    Parameters
    ----------
    arguments : sequence of str, optional
    import_all_of_mpgluon : callable
        Called before anything that needs MXNet.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in COMMANDS:
        return _run(given[0], given[1:], import_all_of_mpgluon)
    listed = "\n".join(f"  {name:<10}{meaning}" for name, meaning in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="mpgluon",
        usage="mpgluon COMMAND ...",
        description="Tools for mixed-precision training with MXNet Gluon.",
        epilog=f"commands:\n{listed}\n\nmpgluon COMMAND --help shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("command", nargs="?", choices=COMMANDS, metavar="COMMAND")
    if parser.parse_args(given).version:
        from importlib.metadata import version

        print(version("mpgluon"))
        return 0
    parser.print_help(sys.stderr)
    return 2


def _run(name: str, arguments: Sequence[str], import_all_of_mpgluon: Callable[[], None]) -> int:
    """Run one command and return its exit status; 2 with one line on stderr for bad input."""
    options = parser_of(name).parse_args(arguments)
    bad_input = (ValueError, TypeError, ImportError, OSError, MpgluonError)
    try:
        command = _module(name)
        return exit_status(lambda: command.run(options, import_all_of_mpgluon), errors=bad_input)
    except RuntimeError as error:
        if type(error).__name__ != "MXNetError":
            raise
        # MXNet's messages end with the reason, after a trace of its own functions.
        print(f"error: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
        return 2


def exit_status(
    work: Callable[[], Optional[int]],
    stopped: str = "stopped",
    errors: tuple[type[Exception], ...] = (ValueError, MpgluonError),
) -> int:
    """Run a command or script and return its exit status, by default 0.

    It is 2 after one of ``errors`` and 130 after Ctrl-C, with a line on stderr: the error, or
    ``stopped``.
    """
    try:
        status = work() or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # such as of `| head`: unflushed output is dropped
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr)
        return 130
    except errors as error:
        said = str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:
            said = f"{error.filename}: {error.strerror}"
        print(f"error: {said}", file=sys.stderr)
        return 2


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"mpgluon_tools.commands.{name}")


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command; its options have a function ``default_of(name)`` too."""
    command = _module(name)
    parser = argparse.ArgumentParser(
        prog=f"mpgluon {name}",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"{command.EPILOG}{_WIDTH}",
    )
    command.add_arguments(parser)
    parser.set_defaults(default_of=parser.get_default)
    return parser
