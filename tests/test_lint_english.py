"""The lint of English finds each habit where text stands, and nothing else."""

import pytest
from lint_english import HABITS, findings, main

BAD = [
    '"""Set an attribute meanwhile."""',
    'ERROR = "its decay was 1, this one\'s is 2"',
    "# 2**-26 is no float16 number",
    'def f():\n    """Forget the latest step."""',
    '"""Return it.\n\n    scale : float\n        Of the latest step.\n"""',
]
GOOD = [
    "meanwhile = beside = 1",
    "def test_a_loss_is_scaled():\n    pass",
    '"""There is no gradient, and nothing is no longer watched."""',
    "# What is an overflow?",
    '"""Sums as those of a Tensor Core."""',
]


@pytest.mark.parametrize(("source", "advice"), list(zip(BAD, HABITS)))
def test_each_habit_is_found(source, advice):
    assert [found for _, _, found in findings(source)] == [advice]


@pytest.mark.parametrize("source", GOOD)
def test_names_and_good_sentences_are_not(source):
    assert list(findings(source)) == []


def test_the_name_of_a_test_is_a_sentence_that_is_checked_too():
    (finding,) = findings("def test_what_is_no_number_is_refused():\n    pass")
    assert finding[0] == 1
    assert "write 'is not an X'" in finding[2]


def test_the_command_prints_file_line_and_advice(tmp_path, capsys):
    (tmp_path / "bad.py").write_text("x = 1\n" + BAD[0])
    assert main([str(tmp_path)]) == 1
    assert "bad.py:2: a vague adverb" in capsys.readouterr().out
