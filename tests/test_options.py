"""Options of a dataclass: documentation and least values; test_train_caltech has the parser.

Their types are texts, as in every module of recipes.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import pytest

from recipes.options import at_least, document_options, option, positive


@document_options
@dataclass(frozen=True)
class Example:
    """Some options."""

    share: float = option(0.5, "of the whole", within="(0, 1]", metavar="SHARE")
    kind: str = option("a", "which one", choices=("a", "b"))
    long_name: bool = option(False, "a flag")


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
