"""The parser of each script's command line, without a run of the script, and of each command."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from mpgluon_tools import commands

ROOT = Path(__file__).resolve().parents[2]


class _ParserReadyError(Exception):
    """Raised where a script would parse its command line; holds the parser."""


def script_of(name: str) -> Path:
    """Return where the script of that name is."""
    (script,) = (*ROOT.glob(f"scripts/{name}.py"), *ROOT.glob(f"study/scripts/{name}.py"))
    return script


@functools.cache
def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of ``mpgluon X``, or the one that a script makes.

    The script, of ``scripts/`` or ``study/scripts/``, does nothing else.
    """
    if name.startswith("mpgluon "):
        return commands.parser_of(name.removeprefix("mpgluon "))
    script = script_of(name)
    spec = importlib.util.spec_from_file_location(f"door_{name}", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    path = list(sys.path)
    try:
        spec.loader.exec_module(module)
        with mock.patch.object(argparse.ArgumentParser, "parse_args", _hand_over):
            module.main()
    except _ParserReadyError as ready:
        parser: argparse.ArgumentParser = ready.args[0]
        return parser
    finally:
        sys.path[:] = path
    raise RuntimeError(f"{script} does not parse its command line in main()")


def _hand_over(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
    raise _ParserReadyError(parser)
