"""The lessons' exercises, and their drawings with sliders."""

import importlib
import re
from pathlib import Path

import pytest

from teaching import check, widget
from teaching.exercises import Verdict, exercise, number_of
from teaching.widgets import NAMES

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SOURCES = sorted((NOTEBOOKS / "source").glob("*.py"))


@exercise("00.99")
def double_of_two(answer):
    value = number_of(answer, "no unit")
    return Verdict(value == 4, f"2 + 2 is 4, and {value:g} is {value - 4:g} more.")


@pytest.mark.parametrize(("answer", "right"), [(4, True), (5.5, False)])
def test_an_answer_is_judged_and_its_meaning_printed(answer, right, capsys):
    assert check("00.99", answer) == right
    verdict = "right" if right else "not yet"
    assert capsys.readouterr().out == f"00.99: {verdict}. {double_of_two(answer).meaning}\n"


def test_an_exercise_without_an_answer_asks_for_one(capsys):
    assert not check("00.99")
    assert "replace ..." in capsys.readouterr().out


def test_an_unknown_exercise_is_an_error_that_names_the_others():
    with pytest.raises(ValueError, match=r"there is no exercise '00\.98'; there are .*00\.99"):
        check("00.98", 1)


@pytest.mark.parametrize("answer", ["4", None, True, float("nan"), float("inf")])
def test_an_answer_that_is_not_a_number_is_refused_with_the_unit(answer):
    with pytest.raises(TypeError, match=r"the answer is a number \(steps\), received"):
        number_of(answer, "steps")


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_each_exercise_of_a_lesson_is_asked_and_solved_there(source):
    text = source.read_text("utf-8")
    number = source.stem[:2]
    asked = re.findall(r"^check\(\"(\d\d\.\d)\", (?:\.\.\.|answer)\)$", text, re.M)
    solved = re.findall(r"^assert check\(\"(\d\d\.\d)\", ", text, re.M)
    judged = []
    if (NOTEBOOKS / "teaching" / f"lesson_{number}.py").exists():
        module = importlib.import_module(f"teaching.lesson_{number}")
        judged = re.findall(
            r"^@exercise\(\"([\d.]+)\"\)", Path(module.__file__).read_text("utf-8"), re.M
        )
    assert asked == solved == judged
    assert judged == [f"{number}.{exercise + 1}" for exercise in range(len(judged))]


@pytest.mark.parametrize("name", NAMES)
def test_a_drawing_is_one_piece_and_needs_no_network(name):
    page = widget(name, counts={-30: 5, -10: 2}).data
    assert "__DATA__" not in page
    assert not re.search(r"(src|href)\s*=|https?://(?!www\.w3\.org/2000/svg)", page)
    assert "aria-label" in page
    assert 'aria-live="polite"' in page


def test_an_unknown_drawing_is_an_error_that_names_the_others():
    with pytest.raises(ValueError, match="there is no drawing 'x'; there are loss_scale, rounding"):
        widget("x")
