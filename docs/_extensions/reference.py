"""The reference: names by their docstrings, operators by their table, commands by their parsers.

Nothing is written by hand that the package already says. A public name without a place in the
reference, and a name in a docstring that does not exist, are warnings, and so stop the build.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import pprint
import re
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Optional

from mpgluon.graph import operators

from docutils import nodes
from parsers import ROOT, parser_of, script_of
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

logger = logging.getLogger(__name__)


def public_names(modules: list[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield module, name and value of each name in ``__all__`` of the modules."""
    for module in modules:
        loaded = importlib.import_module(module)
        for name in loaded.__all__:
            yield module, name, getattr(loaded, name)


def homes(modules: list[str]) -> dict[int, str]:
    """Return the full name under which each value is described, by its ``id``: the first one."""
    found: dict[int, str] = {}
    for module, name, value in public_names(modules):
        found.setdefault(id(value), f"{module}.{name}")
    return found


def _described(name: str, value: Any, home: str) -> str:
    if isinstance(value, ModuleType):
        return ""  # has a page of its own
    if not callable(value):
        text = textwrap.indent(pprint.pformat(value, width=88), 6 * " ")
        return f".. py:data:: {name}\n\n   .. code-block:: text\n\n{text}\n"
    kind = "class" if inspect.isclass(value) else "function"
    if home:
        return f".. py:{kind}:: {name}\n   :no-index:\n\n   The same as :py:obj:`{home}`.\n"
    if inspect.isclass(value) and issubclass(value, BaseException):
        kind = "exception"
    return (
        f".. auto{kind}:: {name}\n   :members:\n"
        if kind == "class"
        else f".. auto{kind}:: {name}\n"
    )


class PublicNames(SphinxDirective):
    """``{public-names} MODULE``: the module's docstring, and each name of its ``__all__``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the descriptions."""
        module = self.arguments[0]
        known = homes(self.config.public_modules)
        text = [f".. automodule:: {module}\n   :no-members:\n"]
        for _, name, value in public_names([module]):
            home = known[id(value)]
            text.append(_described(name, value, "" if home == f"{module}.{name}" else home))
        return self.parse_text_to_nodes("````{eval-rst}\n" + "\n".join(text) + "\n````\n")


class OperatorTable(SphinxDirective):
    """``{operator-table}``: every operator of mpgluon/graph/operators.py, by its rule."""

    def run(self) -> list[nodes.Node]:
        """Return a section for each rule."""
        by_rule: dict[operators.Rule, list[str]] = {rule: [] for rule in operators.Rule}
        for name in sorted(operators.listed_operators(), key=str.lower):
            by_rule[operators.rule_of(name)].append(name)
        text = []
        for rule, names in by_rule.items():
            text.append(f"## {rule.name}\n\n{rule.value[0].upper()}{rule.value[1:]}.\n")
            if rule is operators.Rule.FOLLOW:
                text.append("Every operator that has no entry in another section.\n")
            text += _operators(names)
        return self.parse_text_to_nodes("\n".join(text), allow_section_headings=True)


def _operators(names: list[str]) -> Iterator[str]:
    """Yield a table of operators, or their names alone where there is nothing else to say."""
    rows = []
    for name in names:
        operands = operators.excluded_operands(name, (), {})
        kept = ", ".join(f"`{one}`" for one in sorted(o for o in operands if isinstance(o, str)))
        rows.append((f"`{name}`", kept, "possible" if operators.may_be_16_bit(name) else ""))
    if not any(kept or in_16 for _, kept, in_16 in rows):
        yield ", ".join(name for name, _, _ in rows) + ("." if rows else "") + "\n"
        return
    used = [True, any(row[1] for row in rows), any(row[2] for row in rows)]
    titles = ("operator", "operands that are never converted", "`compute_16`")
    for row in (titles, ("---",) * 3, *rows):
        yield f"| {' | '.join(cell for cell, show in zip(row, used) if show)} |"
    yield ""


class CommandLine(SphinxDirective):
    """``{command-line} NAME``: the options of a script, ``NAME.py``, or of ``mpgluon X``."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return the description, the usage and a list of options for each command."""
        name = " ".join(self.arguments[0].split())
        parser = parser_of(name)
        if not name.startswith("mpgluon "):
            parser.prog = f"python {script_of(name).relative_to(ROOT)}"
        return self.parse_text_to_nodes("\n".join(_command(parser)))


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    description = inspect.cleandoc(parser.description or "")
    yield f"{description}\n" if "\n" not in description else f"```text\n{description}\n```\n"
    rows = []
    for action in parser._actions:  # argparse has no public way to its options
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield f"**`{parser.prog} {name}`**\n"
                yield from _command(command)
        elif action.help is not argparse.SUPPRESS and "--help" not in action.option_strings:
            rows.append(_option(action))
    if rows:
        yield "| option | meaning | default |\n|---|---|---|"
        yield from rows
        yield ""


def _option(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.dest}`"
    if action.choices is not None:
        names += " " + " \\| ".join(f"`{choice}`" for choice in action.choices)
    elif action.nargs != 0 and action.option_strings:
        names += f" `{action.metavar or action.dest.upper()}`"
    no_default = action.default in (None, argparse.SUPPRESS, "") or action.nargs == 0
    default = "" if no_default or not action.option_strings else f"`{action.default}`"
    meaning = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    meaning = re.sub(r" *\(default: [^)]*\)", "", meaning)
    return f"| {names} | {meaning.replace('|', chr(92) + '|')} | {default} |"


def check_public_names(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of each public name that no page describes."""
    described = env.get_domain("py").objects  # type: ignore[attr-defined]
    known = homes(app.config.public_modules)
    for module, name, value in public_names(app.config.public_modules):
        home = value.__name__ if isinstance(value, ModuleType) else known[id(value)]
        if home not in described:
            logger.warning("public name without a page: %s.%s", module, name)
    for module in app.config.public_modules:
        if module not in described:
            logger.warning("public module without a page: %s", module)


def name_exists(target: str, module: Optional[str], parent: Optional[str]) -> bool:
    """Return whether a dotted name is that of something, by itself or inside a module or class."""
    inside = [f"{module}.{parent}" if module and parent else "", module or "", "builtins", ""]
    return any(_importable(f"{place}.{target}".strip(".")) for place in inside)


def _importable(dotted: str) -> bool:
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for name in parts[count:]:
            if not hasattr(value, name):
                return False
            value = getattr(value, name)
        return True
    return False


def accept_internal_names(
    _: Sphinx, __: BuildEnvironment, node: pending_xref, text: nodes.TextElement
) -> Optional[nodes.TextElement]:
    """Show a name that has no page as plain code if it exists; Sphinx warns of the others."""
    if node.get("refdomain") != "py":
        return None
    if node.get("refspecific"):
        return text  # the kind of a parameter, in words; what a docstring's author marked is not
    exists = name_exists(node["reftarget"], node.get("py:module"), node.get("py:class"))
    return text if exists else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directives and checks."""
    app.add_config_value("public_modules", [], "env", list)
    app.add_directive("public-names", PublicNames)
    app.add_directive("operator-table", OperatorTable)
    app.add_directive("command-line", CommandLine)
    app.connect("env-check-consistency", check_public_names)
    app.connect("missing-reference", accept_internal_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
