"""Find habits of English that are hard to read in docstrings, comments and messages.

Run by ``make lint`` with the folders to check; prints one line for each finding. The names of tests
are sentences, and are checked too. This file and its test, which quote the habits, are not.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
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
}
_ALLOWED = (
    "forget gate",  # of an LSTM
    "What float16 would lose",  # headings of a report
    "What differs by default",  # of a page
)


def findings(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield the number and the text of each line with a habit, and the advice."""
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
        if any(allowed in line for allowed in _ALLOWED):
            continue
        for advice, habit in HABITS.items():
            if habit.search(line.replace('f"', '"')):
                yield number, line.strip(), advice


def main(folders: list[str]) -> int:
    """Print the findings in some folders, and return how many there are."""
    count = 0
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.py")):
            if path.name.endswith("lint_english.py"):
                continue
            for number, line, advice in findings(path.read_text("utf-8")):
                sys.stdout.write(f"{path}:{number}: {advice}: {line}\n")
                count += 1
    return count


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
