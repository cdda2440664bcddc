"""Code by its name, ``module:function``: imported from the current folder too, and called.

Each error says whether the module, the function or the call failed. Nothing here needs MXNet.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
import traceback
from pathlib import Path
from typing import Any, Callable, Optional

__all__ = ["call_named", "file_of", "function_named", "split_name"]


def split_name(name: str) -> tuple[str, str]:
    """Return module and function of ``module:function``; imports nothing.

    Raises
    ------
    ValueError
        If the name has another form. For a module without a function, it names the functions that
        the module has.
    """
    module, _, function = name.partition(":")
    is_file = module.endswith(".py")
    if is_file or not all(part.isidentifier() for part in (*module.split("."), function)):
        dotted = module.removesuffix(".py").removeprefix("./").replace("/", ".")
        path, advice = file_of(dotted), ""
        functions = _functions_in(path) if path and not function else []
        if functions:
            advice = f"; choose a function of this module: {_listed(dotted, functions)}"
        elif is_file:
            advice = f"; for this file, {dotted}:{function or 'function'}"
        raise ValueError(
            "code is named like package.module:function, without .py and without arguments; "
            f"received {name!r}{advice}"
        )
    return module, function


def file_of(module: str) -> Optional[Path]:
    """Return the source file of a module, looked for in the current folder first, if it has one."""
    parts = module.split(".")
    if not all(parts):  # such as the folder ".."
        return None
    for folder in (os.getcwd(), *sys.path):
        for path in (Path(folder, *parts).with_suffix(".py"), Path(folder, *parts, "__init__.py")):
            if path.is_file():
                return path
    return None


def _functions_in(path: Path) -> list[str]:
    """Return the public functions of a source file that need no arguments; runs nothing."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:  # which importing it explains
        return []
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return [
        node.name
        for node in functions
        if node.name[0] != "_"
        and len(node.args.posonlyargs + node.args.args) == len(node.args.defaults)
        and None not in node.args.kw_defaults
    ]


def _listed(module: str, functions: list[str]) -> str:
    return ", ".join(f"{module}:{name}" for name in functions[:5]) + ", …" * (len(functions) > 5)


def function_named(name: str, returns: str = "a network") -> Callable[..., Any]:
    """Import the function that ``module:function`` names; the current folder is searched first.

    Parameters
    ----------
    name : str
        Such as ``"package.module:function"``.
    returns : str
        In words, for the advice in an error.

    Raises
    ------
    ValueError
        If the name has another form, or there is no such module or function.
    """
    module_name, function_name = split_name(name)
    folder = os.getcwd()
    if "" not in sys.path and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        if f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"there is no module {error.name!r} in {folder} or among the installed ones; run "
                "from the folder that it begins in"
            ) from error
        raise ValueError(f"importing {module_name} failed: {error}") from error
    except Exception as error:
        raise ValueError(f"importing {module_name} failed: {_in_words(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        path = getattr(module, "__file__", None)
        others = _functions_in(Path(path)) if path and path.endswith(".py") else []
        has = f"; it has {_listed(module_name, others)}" if others else ""
        raise ValueError(
            f"{path or module_name} has no function {function_name!r}; write one that returns "
            f"{returns}{has}"
        )
    result: Callable[..., Any] = function
    return result


def call_named(name: str, returns: str = "a network") -> Any:
    """Return the result of the function that ``module:function`` names.

    Parameters
    ----------
    name, returns : str
        As for :func:`function_named`.

    Raises
    ------
    ValueError
        As :func:`function_named`; or if the function needs arguments, or raises an exception, which
        is the cause, and whose file and line are named.
    """
    function = function_named(name, returns)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(f"{name} must take no arguments: {error}") from error
    try:
        return function()
    except Exception as error:
        raise ValueError(f"{name} was called and failed: {_in_words(error)}") from error


def _in_words(error: Exception) -> str:
    """Return an exception in one line: its kind, message and place."""
    (last,) = traceback.extract_tb(error.__traceback__)[-1:]
    message = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {message} ({last.filename}, line {last.lineno})"
