"""The diffs of lesson 09 agree with the code that runs."""

import re
from pathlib import Path

SOURCE = (
    Path(__file__).resolve().parents[2] / "notebooks" / "source" / "09_a_loop_of_your_own.py"
).read_text("utf-8")


def cells_after_diffs():
    """Return each diff's lines, and the lines of the loop that follows it."""
    cells = re.split(r"^# %%", SOURCE, flags=re.M)
    for number, cell in enumerate(cells):
        if "```diff" not in cell:
            continue
        text = re.sub(r"^# ?", "", cell, flags=re.M)
        diff = re.search(r"```diff\n(.*?)```", text, re.S)
        code = next(c for c in cells[number + 1 :] if c.startswith("\n") and "for " in c)
        yield diff[1].splitlines(), code.splitlines()


def in_order(lines, others):
    """Return whether the lines are among others, in this order and with one common indentation."""
    found = iter(line.strip() for line in others)
    return all(line.strip() in found for line in lines)


def test_each_diff_is_that_of_the_cell_below_it():
    pairs = list(cells_after_diffs())
    assert len(pairs) == 7
    for diff, code in pairs:
        assert in_order([line[1:] for line in diff if line[0] in "+ " and line.strip()], code), diff


def test_each_diff_begins_with_a_loop_that_was_shown_before():
    shown = []
    for diff, code in cells_after_diffs():
        before = [line[1:] for line in diff if line[0] in "- " and line.strip()]
        frame = SOURCE[SOURCE.index("net, trainer = new_run()") :].split("# %%")[0].splitlines()
        frame = [line.replace("batches * EPOCHS", "batches") for line in frame]
        assert any(in_order(before, loop) for loop in (frame, *shown)), diff
        shown.append([line.replace("batches * EPOCHS", "batches") for line in code])
