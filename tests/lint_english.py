"""Find habits of English that are hard to read in docstrings, comments and messages.

Run by ``make lint`` with the folders to check; prints one line for each finding. The names of tests
are sentences, and are checked too. This file and its test, which quote the habits, are not.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

HABITS = {
    "a vague adverb; name the time, the place or the difference": re.compile(
        r"\b(meanwhile|anew|beside|likewise|in vain|the other way round)\b", re.IGNORECASE
    ),
    "a pronoun without a noun; repeat the noun": re.compile(
        r"\b(that one's|this one's|that of one)\b", re.IGNORECASE
    ),
    "'is no X'; write 'is not an X'": re.compile(
        r"(?<!there )\b(is|are) no (?!longer\b|more\b|larger\b|smaller\b|way\b)[a-z]", re.IGNORECASE
    ),
    "software that is told, hears or forgets; say what it does": re.compile(
        r"\b(is|are|was|were|be) told\b|\bhears?\b|\bforg(et|ets|ot|otten)\b", re.IGNORECASE
    ),
    "a line without a subject; begin with its noun": re.compile(
        r"^\W*(Of|What|Those of|To those of) [a-z](?!.*\?$)"
    ),
    "a vague verb; write Make, Record, Return or another exact one": re.compile(
        r'^\s*[rf]?"""(Let|Note|Say)s? '
    ),
}
# Lines that may have a phrase, in all folders together; a number that must grow is changed in the
# same commit, whose message says why.
RATCHETS = {
    "'that of'; repeat the noun": (re.compile(r"\b(those|that) of\b", re.IGNORECASE), 18),
    "a clause with 'what' in place of a noun": (
        re.compile(r"\bwhat (is|was|are|were|it|they|a|an|the)\b", re.IGNORECASE),
        48,
    ),
}
_ALLOWED = (
    "forget gate",  # of an LSTM
    "What float16 would lose",  # headings of a report
    "What differs by default",  # of a page
    "Let a convolution take",  # in mpgluon/graph/bfloat16.py, and the next one
    "Let everything but",
)


def english_lines(source: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line with a string, a comment or a test's name."""
    lines = source.splitlines()
    texts, names = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            names.add(node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            texts.add(token.start[0])
    for number in sorted(texts | names):
        line = lines[number - 1]
        if number in names:
            line = line.replace("_", " ")
        yield number, line


def findings(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str, str]]:
    """Yield the number and the text of each line with a habit, and the advice."""
    for number, line in lines:
        if any(allowed in line for allowed in _ALLOWED):
            continue
        for advice, habit in HABITS.items():
            if habit.search(line.replace('f"', '"')):
                yield number, line.strip(), advice


def main(folders: list[str]) -> int:
    """Print the findings in some folders, and return how many there are."""
    count, found = 0, Counter[str]()
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.py")):
            if path.name.endswith("lint_english.py"):
                continue
            lines = list(english_lines(path.read_text("utf-8")))
            for number, line, advice in findings(lines):
                sys.stdout.write(f"{path}:{number}: {advice}: {line}\n")
                count += 1
            for _, line in lines:
                if not line.startswith("def "):  # names of tests are not counted
                    found.update(a for a, (phrase, _) in RATCHETS.items() if phrase.search(line))
    for advice, (_, most) in RATCHETS.items():
        if found[advice] > most:
            sys.stdout.write(f"{advice}: {found[advice]} lines; at most {most} may have it\n")
            count += 1
    return count


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
