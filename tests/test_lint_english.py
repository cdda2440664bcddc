"""The lint of English finds each habit where text stands, and nothing else."""

import pytest
from lint_english import HABITS, RATCHETS, english_lines, findings, main

BAD = [
    '"""Set an attribute meanwhile."""',
    'ERROR = "its decay was 1, this one\'s is 2"',
    "# 2**-26 is no float16 number",
    'def f():\n    """Forget the latest step."""',
    '"""Return it.\n\n    scale : float\n        Of the latest step.\n"""',
    '"""Let a Trainer step."""',
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
    assert [found for _, _, found in findings(english_lines(source))] == [advice]


@pytest.mark.parametrize("source", GOOD)
def test_names_and_good_sentences_are_not(source):
    assert list(findings(english_lines(source))) == []


def test_the_name_of_a_test_is_a_sentence_that_is_checked_too():
    (finding,) = findings(english_lines("def test_what_is_no_number_is_refused():\n    pass"))
    assert finding[0] == 1
    assert "write 'is not an X'" in finding[2]


def test_the_command_prints_file_line_and_advice(tmp_path, capsys):
    (tmp_path / "bad.py").write_text("x = 1\n" + BAD[0])
    assert main([str(tmp_path)]) == 1
    assert "bad.py:2: a vague adverb" in capsys.readouterr().out


def test_more_lines_with_a_phrase_than_its_ratchet_are_a_finding(tmp_path, capsys):
    most = RATCHETS["'that of'; repeat the noun"][1]
    (tmp_path / "some.py").write_text("# as that of the net\n" * most)
    assert main([str(tmp_path)]) == 0
    (tmp_path / "more.py").write_text("def test_its_norm_is_that_of_the_net():\n    pass\n")
    assert main([str(tmp_path)]) == 0  # names of tests are not counted
    (tmp_path / "more.py").write_text('"""Its norm is that of the net."""\n')
    assert main([str(tmp_path)]) == 1
    assert f"{most + 1} lines; at most {most} may have it" in capsys.readouterr().out
