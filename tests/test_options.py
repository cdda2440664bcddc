"""Options of a dataclass: one declaration gives the parser, the checks and the documentation."""

import argparse
import math
import re
from dataclasses import dataclass
from typing import Optional

import pytest

from recipes.options import add_options, at_least, check_options, document_options, option, positive


def check_even(text: str) -> None:
    if len(text) % 2:
        raise ValueError(f"name must have an even length, received {text!r}")


@document_options
@dataclass(frozen=True)
class Example:
    """Some options."""

    name: str = option("even", "what it is called", check=check_even)
    share: float = option(0.5, "of the whole", within="(0, 1]", metavar="SHARE")
    steps: Optional[int] = option(None, "to do", within="[2, inf)")
    rate: float = option(1.0, "of learning", within="(0, inf)")
    kind: str = option("a", "which one", choices=("a", "b"))
    long_name: bool = option(False, "a flag")

    def __post_init__(self) -> None:
        check_options(self)


def parse(*arguments: str) -> Example:
    parser = argparse.ArgumentParser()
    add_options(parser, Example)
    return Example(**vars(parser.parse_args(arguments)))


def test_a_command_line_gives_the_values_in_their_types():
    assert parse() == Example()
    given = parse("--share=1", "--steps", "2", "--kind=b", "--long-name", "--name=ab", "--rate=3")
    assert given == Example("ab", 1.0, 2, 3.0, "b", long_name=True)
    assert isinstance(given.share, float)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name=odd"], "argument --name: name must have an even length, received 'odd'"),
        (["--kind=c"], "argument --kind: invalid choice: 'c'"),
        (["--steps=two"], "argument --steps: invalid int value: 'two'"),
    ],
)
def test_a_parser_refuses_values_that_an_option_does_not_allow(capsys, arguments, message):
    with pytest.raises(SystemExit):
        parse(*arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "odd"}, "name must have an even length"),
        ({"share": 0.0}, "share must be in (0, 1], received 0.0"),
        ({"share": math.nan}, "share must be in (0, 1], received nan"),
        ({"steps": 1}, "steps must be at least 2, received 1"),
        ({"rate": math.inf}, "rate must be positive and finite, received inf"),
        ({"kind": "c"}, "kind must be one of a, b; received 'c'"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_its_name(values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Example(**values)


def test_the_documentation_has_every_option_with_its_bounds_and_default():
    assert Example.__doc__.startswith("Some options.\n\nAttributes\n----------\n")
    assert "\nshare : float, in (0, 1], default 0.5\n    of the whole\n" in Example.__doc__
    assert "\nkind : {'a', 'b'}, default 'a'\n    which one\n" in Example.__doc__


def test_the_first_value_below_a_least_one_is_named():
    at_least(1, size=1, attempts=2.5)
    with pytest.raises(ValueError, match="attempts must be at least 1, received nan"):
        at_least(1, size=1, attempts=math.nan)


def test_a_positive_integer_of_a_command_line():
    assert positive("1") == 1
    with pytest.raises(argparse.ArgumentTypeError, match="must be at least 1, received 0"):
        positive("0")
