"""The reviews: seeded, all different, rightly labelled, and no affair of words without order."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import numpy as np
import pytest

from experiments.sentences import LENGTH, VOCABULARY, Review, encode, make_reviews

TRAINING, TEST = make_reviews(3000, 1500, seed=0)
PRAISE = """
    brilliant charming clever elegant fresh funny good great gripping honest lively moving original
    rich sharp subtle tender vivid warm witty
"""
# The first word of each; none of them is ever used in another sense.
NEGATING = {"not", "never", "hardly", "far", "anything"}


def parts_of(text):
    """Return the part that decides and the part that is conceded, or None."""
    if text.startswith("although "):
        conceded, decisive = text[len("although ") :].split(" , ")
        return decisive, conceded
    for turn, decides in ((" , although ", 0), (" , but ", 1)):
        if turn in text:
            parts = text.split(turn)
            return parts[decides], parts[1 - decides]
    return text, None


def predicates_of(part):
    return [re.fullmatch(r"the \w+ was ?(.*)", one)[1].split() for one in part.split(" and ")]


def verdict_of(text):
    """Read a review as a person would, and return whether it praises."""
    decisive, conceded = parts_of(text)
    verdicts = set()
    for words in predicates_of(decisive):
        adjective = words[-1] if words else ""
        if words in ([], ["not"]):  # of what the other part has said
            adjective = predicates_of(conceded)[0][-1]
        verdicts.add((adjective in PRAISE.split()) != bool(NEGATING & set(words)))
    (verdict,) = verdicts  # opinions joined by "and" agree
    return verdict


def pairs_of(review):
    """Return the pairs of adjective and negator that are spelled out."""
    found = set()
    for part in filter(None, parts_of(review.text)):
        for words in predicates_of(part):
            if NEGATING & set(words) and words != ["not"]:
                found.add((words[-1], " ".join(words[:-1])))
    return found


def test_a_seed_decides_all_reviews_and_another_one_gives_others():
    assert make_reviews(3000, 1500, seed=0) == (TRAINING, TEST)
    others = {review.text for part in make_reviews(3000, 1500, seed=1) for review in part}
    ours = {review.text for review in TRAINING + TEST}
    assert len(others & ours) < 0.3 * len(ours)  # the short ones are few, and come again


def test_no_two_reviews_are_the_same_in_training_and_test_together():
    assert len(TRAINING) == 3000
    assert len(TEST) == 1500
    assert len({review.text for review in TRAINING + TEST}) == 4500


def test_each_verdict_is_that_of_a_reader_who_does_not_know_how_the_review_was_made():
    wrong = [one for one in TRAINING + TEST if verdict_of(one.text) != one.is_good]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        ("the plot was hardly funny", False),
        ("the plot was anything but dull", True),
        ("the plot was good , but the end was not", False),
        ("although the plot was far from good , the end was", True),
        ("the end was very weak , although the plot was good", False),
        ("although the plot was funny , the end was not very good", False),
        ("although the end was not very good , the plot was funny", True),
    ],
)
def test_the_reader_of_these_tests_is_right_about_reviews_that_a_person_judged(text, is_good):
    assert verdict_of(text) is is_good


def test_two_negators_of_each_adjective_are_kept_for_the_test():
    trained = defaultdict(set)
    for adjective, negator in set().union(*map(pairs_of, TRAINING)):
        trained[adjective].add(negator)
    tested = set().union(*map(pairs_of, TEST))
    assert len(trained) == 40
    assert all(len(negators) == 5 for negators in trained.values())
    assert (
        len({adjective for adjective, negator in tested if negator not in trained[adjective]}) == 40
    )


def test_the_same_words_in_another_order_can_be_the_opposite_verdict():
    turned = 0
    for review in TRAINING:
        decisive, conceded = parts_of(review.text)
        if review.text.startswith("although ") and decisive.split()[-1] not in ("was", "not"):
            other = f"although {decisive} , {conceded}"
            assert Counter(other.split()) == Counter(review.text.split())
            assert verdict_of(other) is not review.is_good
            turned += 1
    assert turned > 100


def test_counting_words_says_nothing_of_the_verdict():
    def counts(reviews):
        table = np.zeros((len(reviews), len(VOCABULARY)))
        for row, tokens in zip(table, encode(reviews)[0]):
            np.add.at(row, tokens, 1)
        return table

    truth = np.array([review.is_good for review in TRAINING])
    weights, *_ = np.linalg.lstsq(counts(TRAINING), 2.0 * truth - 1, rcond=None)
    guessed = counts(TEST) @ weights > 0
    right = np.mean(guessed == [review.is_good for review in TEST])
    # Five standard deviations of guessing.
    assert abs(right - 0.5) < 5 * 0.5 / np.sqrt(len(TEST))


def test_tokens_are_the_words_at_the_end_of_a_row_and_labels_the_verdicts():
    reviews = [*TEST, Review("the end was good", is_good=True)]
    tokens, labels = encode(reviews)
    assert tokens.shape == (len(reviews), LENGTH)
    assert tokens.dtype == labels.dtype == np.int32
    for row, label, review in zip(tokens, labels, reviews):
        words = [VOCABULARY[place] for place in row]
        assert " ".join(words).strip() == review.text
        assert bool(label) is review.is_good
    assert max(len(review.text.split()) for review in TRAINING) == LENGTH  # no room is wasted
