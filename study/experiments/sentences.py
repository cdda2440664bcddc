"""Short film reviews from a small grammar, in which the order of the words decides the verdict.

"although the end was dull , the plot was funny" praises a film; "although the plot was funny , the
end was dull" has the same words and does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["LENGTH", "VOCABULARY", "Review", "encode", "make_reviews"]

_SUBJECTS = (
    "acting", "beginning", "camera", "cast", "dialogue", "end", "hero", "humour", "light",
    "music", "pace", "plot", "script", "sound", "story", "villain",
)  # fmt: skip
_GOOD = (
    "brilliant", "charming", "clever", "elegant", "fresh", "funny", "good", "great", "gripping",
    "honest", "lively", "moving", "original", "rich", "sharp", "subtle", "tender", "vivid",
    "warm", "witty",
)  # fmt: skip
_BAD = (
    "awful", "bad", "bland", "boring", "clumsy", "cold", "crude", "dull", "fake", "flat",
    "harsh", "messy", "murky", "poor", "silly", "slow", "stale", "tedious", "trite", "weak",
)  # fmt: skip
_STRENGTHS = ("", "very", "really", "quite")
# "but" is half of a negator as well as a turn.
_NEGATORS = ("not", "never", "hardly", "not very", "not really", "far from", "anything but")
# How opinions are joined: {0} decides, {1} agrees with it, {2} says the opposite.
_JOINTS = (
    "{0}",
    "{1} and {0}",
    "{2} , but {0}",
    "although {2} , {0}",
    "{0} , although {2}",
    "{1} and {0} , although {2}",
    "although {2} , {1} and {0}",
)
# Here {0} has no adjective of its own: "the plot was good , but the end was not".
_SHORT_JOINTS = ("{2} , but {0}", "although {2} , {0}")
_SHORT_SHARE = 0.3

_TEXTS = (*_SUBJECTS, *_GOOD, *_BAD, *_STRENGTHS, *_NEGATORS, "the was , and but although")
# The first one pads short reviews.
VOCABULARY = ("", *sorted({word for text in _TEXTS for word in text.split()}))
LENGTH = 21  # words and commas of the longest review


@dataclass(frozen=True)
class Review:
    """A review, words and commas with one space between any two, and whether it praises."""

    text: str
    is_good: bool


@dataclass(frozen=True)
class _Opinion:
    """Such as "the plot was hardly funny"; the negator may be empty."""

    words: str
    adjective: str
    negator: str


def make_reviews(training: int, test: int, *, seed: int) -> tuple[list[Review], list[Review]]:
    """Return that many reviews for training and for testing, no two of the same text.

    Each adjective occurs with two of the seven negators in the test only: the effect of "hardly" on
    "tender" must be learned from its effect on other adjectives.
    """
    rng = np.random.default_rng(seed)
    kept_back = {
        (adjective, str(negator))
        for adjective in (*_GOOD, *_BAD)
        for negator in rng.choice(_NEGATORS, 2, replace=False)
    }
    reviews: dict[str, Review] = {}
    while len(reviews) < training + test:
        review, opinions = _draw_review(rng)
        pairs = {(opinion.adjective, opinion.negator) for opinion in opinions}
        if len(reviews) >= training or not pairs & kept_back:
            reviews.setdefault(review.text, review)
    drawn = list(reviews.values())
    return drawn[:training], drawn[training:]


def _draw_review(rng: np.random.Generator) -> tuple[Review, list[_Opinion]]:
    is_good = bool(rng.integers(2))
    subjects = rng.permutation(_SUBJECTS)[:3]
    opinions = [
        _draw_opinion(rng, subject, praises)
        for subject, praises in zip(subjects, (is_good, is_good, not is_good))
    ]
    words = [opinion.words for opinion in opinions]
    if rng.random() < _SHORT_SHARE:
        words[0] = f"the {subjects[0]} was" + ("" if opinions[2].negator else " not")
        joint, opinions[0] = str(rng.choice(_SHORT_JOINTS)), opinions[2]
    else:
        joint = str(rng.choice(_JOINTS))
    used = [opinion for place, opinion in enumerate(opinions) if f"{{{place}}}" in joint]
    return Review(joint.format(*words), is_good), used


def _draw_opinion(rng: np.random.Generator, subject: str, praises: bool) -> _Opinion:
    negated = bool(rng.integers(2))
    adjective = str(rng.choice(_GOOD if praises != negated else _BAD))
    negator = str(rng.choice(_NEGATORS)) if negated else ""
    before = negator or str(rng.choice(_STRENGTHS))
    return _Opinion(" ".join(f"the {subject} was {before} {adjective}".split()), adjective, negator)


def encode(reviews: Sequence[Review]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the reviews' words as indices of ``VOCABULARY``, and their verdicts.

    Returns
    -------
    tokens : ndarray, shape (N, LENGTH), int32
        Each ends with its last word; shorter ones begin with zeros.
    labels : ndarray, shape (N,), int32
        1 for a review that praises.
    """
    number = {word: place for place, word in enumerate(VOCABULARY)}
    tokens = np.zeros((len(reviews), LENGTH), dtype=np.int32)
    for row, review in zip(tokens, reviews):
        words = [number[word] for word in review.text.split()]
        row[LENGTH - len(words) :] = words
    return tokens, np.array([review.is_good for review in reviews], dtype=np.int32)
