"""What the exercises of lesson 10 say to right answers, and to the wrong ones that people give."""

from __future__ import annotations

import numpy as np
import pytest

from teaching import check
from teaching.lesson_10 import _bfloat16_errors


def fold(weight, bias, gamma, beta, mean, variance, epsilon):
    factor = gamma / np.sqrt(variance + epsilon)
    return weight * factor, bias + weight @ (beta - mean * factor)


def without_epsilon(weight, bias, gamma, beta, mean, variance, _epsilon):
    return fold(weight, bias, gamma, beta, mean, variance, 0)


def without_the_summand(weight, bias, *norm):
    return fold(weight, bias, *norm)[0], bias


def nothing_done(weight, bias, *_norm):
    return weight, bias


def rows_instead_of_columns(weight, bias, *norm):
    return fold(weight, bias, *norm)[0].T, bias


def test_one_dense_layer_that_computes_both_is_right(capsys):
    assert check("10.1", fold)
    assert "one dense layer gives the numbers of both" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (without_epsilon, "there epsilon doubles what is under the root"),
        (without_the_summand, "The weight is right, and the bias is not"),
        (nothing_done, "The weight is not W with its columns multiplied by"),
        (rows_instead_of_columns, r"received (8, 4) and (4,)"),
    ],
)
def test_other_layers_are_told_what_is_wrong(answer, told, capsys):
    assert not check("10.1", answer)
    assert told in capsys.readouterr().out


def test_a_fold_that_is_no_function_is_refused():
    with pytest.raises(TypeError, match=r"the answer is a function fold\(.*\), received 1"):
        check("10.1", 1)


@pytest.mark.parametrize(
    ("lead", "right", "told"),
    [
        (0.5, True, "may both become 0.25, a tie"),
        (0.25, False, "The logits 0.375 and 0 may become 0.125 and 0.25: the decision changes"),
        (1, False, "not the smallest such number. At a lead of 0.75 the logits 0.75 and 0 become"),
        (-1, False, "A lead is not negative"),
    ],
)
def test_a_lead_is_tried(lead, right, told, capsys):
    assert check("10.2", lead) == right
    assert told in capsys.readouterr().out


def test_the_weights_have_more_than_half_of_the_error(capsys):
    by_weights, by_everything = _bfloat16_errors()
    assert 0.5 < by_weights / by_everything < 1
    assert check("10.3", 100 * by_weights / by_everything + 5)
    assert "the rounding between the layers has" in capsys.readouterr().out


@pytest.mark.parametrize("share", [0.7, 10, 200])
def test_other_shares_are_told_the_errors(share, capsys):
    assert not check("10.3", share)
    assert "is another result" in capsys.readouterr().out
