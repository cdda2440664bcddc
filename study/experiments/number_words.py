"""Numbers in English words and in the morphemes of German, which puts units before tens.

"three hundred and forty two" is "drei hundert zwei und vier zig", which is written as one word:
dreihundertzweiundvierzig.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ENGLISH",
    "ENGLISH_LENGTH",
    "GERMAN",
    "GERMAN_LENGTH",
    "draw_numbers",
    "encode",
    "english",
    "german",
    "groups_of",
]

_ENGLISH_SMALL = (
    "", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_ENGLISH_TENS = (
    "", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety",
)  # fmt: skip
_GERMAN_SMALL = (
    "", "ein", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf",
    "zwölf", "drei zehn", "vier zehn", "fünf zehn", "sech zehn", "sieb zehn", "acht zehn",
    "neun zehn",
)  # fmt: skip
_GERMAN_TENS = (
    "", "", "zwan zig", "drei ßig", "vier zig", "fünf zig", "sech zig", "sieb zig", "acht zig",
    "neun zig",
)  # fmt: skip

# The first one of each ends a text, and fills the rest of its line.
ENGLISH = ("", *_ENGLISH_SMALL[1:], *_ENGLISH_TENS[2:], "hundred", "thousand", "and")
_MORPHEMES = {part for text in (*_GERMAN_SMALL, *_GERMAN_TENS) for part in text.split()}
GERMAN = ("", *sorted({*_MORPHEMES, "s", "und", "hundert", "tausend"}))
ENGLISH_LENGTH = 11  # words of the longest number below a million
GERMAN_LENGTH = 14  # morphemes of the longest, and the end

_ZERO_SHARE = 0.25  # of the digits
_KEPT_BACK = 100  # groups of three digits that occur in the test only


def english(number: int) -> list[str]:
    """Return the words of a number from 1 to 999,999."""
    thousands, rest = divmod(number, 1000)
    words = [*_english_group(thousands), "thousand"] if thousands else []
    if thousands and 0 < rest < 100:
        words.append("and")
    return words + _english_group(rest)


def _english_group(number: int) -> list[str]:
    hundreds, rest = divmod(number, 100)
    words = [_ENGLISH_SMALL[hundreds], "hundred"] if hundreds else []
    if hundreds and rest:
        words.append("and")
    if rest < 20:
        return words + _ENGLISH_SMALL[rest].split()
    tens, units = divmod(rest, 10)
    return [*words, _ENGLISH_TENS[tens], *_ENGLISH_SMALL[units].split()]


def german(number: int) -> list[str]:
    """Return the morphemes of a number from 1 to 999,999; joined, they are its word."""
    thousands, rest = divmod(number, 1000)
    parts = [*_german_group(thousands), "tausend"] if thousands else []
    parts += _german_group(rest)
    return [*parts, "s"] if rest % 100 == 1 else parts  # "eins" at the end, "ein" elsewhere


def _german_group(number: int) -> list[str]:
    hundreds, rest = divmod(number, 100)
    tens, units = divmod(rest, 10)
    parts = [_GERMAN_SMALL[hundreds], "hundert"] if hundreds else []
    if rest < 20:
        return parts + _GERMAN_SMALL[rest].split()
    joint = [_GERMAN_SMALL[units], "und"] if units else []
    return parts + joint + _GERMAN_TENS[tens].split()


def groups_of(number: int) -> set[int]:
    """Return the groups of three digits that a number is written with, without zero."""
    return {*divmod(number, 1000)} - {0}


def draw_numbers(training: int, test: int, *, seed: int) -> tuple[list[int], list[int]]:
    """Return that many numbers below a million for training and for testing, all different.

    A hundred groups of three digits, such as the 342 of 342,007, occur in the test only, and each
    number of the test has one of them.
    """
    rng = np.random.default_rng(seed)
    kept_back = {int(one) for one in rng.choice(np.arange(1, 1000), _KEPT_BACK, replace=False)}
    drawn: tuple[dict[int, None], dict[int, None]] = ({}, {})  # dicts keep their order
    wanted = (training, test)
    while any(len(one) < count for one, count in zip(drawn, wanted)):
        digits = rng.integers(1, 10, 6) * (rng.random(6) >= _ZERO_SHARE)
        number = int("".join(map(str, digits)))
        place = bool(groups_of(number) & kept_back)
        if number and len(drawn[place]) < wanted[place]:
            drawn[place].setdefault(number)
    return list(drawn[False]), list(drawn[True])


def encode(
    texts: Sequence[Sequence[str]], vocabulary: Sequence[str], length: int
) -> NDArray[np.int32]:
    """Return words as indices of a vocabulary, shape (N, length); zeros follow the last."""
    number = {word: place for place, word in enumerate(vocabulary)}
    tokens = np.zeros((len(texts), length), dtype=np.int32)
    for row, text in zip(tokens, texts):
        row[: len(text)] = [number[word] for word in text]
    return tokens
