"""Scores of predicted sequences: corpus BLEU, edit distance.

References
----------
Papineni, Roukos, Ward, Zhu, "BLEU: a Method for Automatic Evaluation of Machine Translation", ACL
2002, section 2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

__all__ = ["bleu", "edit_distance"]

_ORDERS = (1, 2, 3, 4)

Sentence = Sequence[Hashable]


def bleu(references: Sequence[Sentence], translations: Sequence[Sentence]) -> float:
    """Return the BLEU of translations, in [0, 1]; one reference for each, no smoothing."""
    lengths = [sum(map(len, texts)) for texts in (references, translations)]
    logs = []
    for order in _ORDERS:
        right = total = 0
        for reference, translation in zip(references, translations):
            ours, theirs = _grams(translation, order), _grams(reference, order)
            right += sum((ours & theirs).values())
            total += sum(ours.values())
        if not right:
            return 0.0
        logs.append(math.log(right / total))
    brevity = min(0.0, 1 - lengths[0] / lengths[1])
    return math.exp(brevity + sum(logs) / len(logs))


def _grams(sentence: Sentence, order: int) -> Counter[tuple[Hashable, ...]]:
    return Counter(
        tuple(sentence[first : first + order]) for first in range(len(sentence) - order + 1)
    )


def edit_distance(one: Sentence, other: Sentence) -> int:
    """Return how few insertions, deletions and substitutions make one sequence the other."""
    distances = list(range(len(other) + 1))  # of the empty beginning of `one`
    for row, ours in enumerate(one, 1):
        diagonal, distances[0] = distances[0], row
        for column, theirs in enumerate(other, 1):
            best = min(
                diagonal + (ours != theirs), distances[column] + 1, distances[column - 1] + 1
            )
            diagonal, distances[column] = distances[column], best
    return distances[-1]
