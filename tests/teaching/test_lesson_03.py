"""What the exercises of lesson 03 say to the right answer and to the usual wrong ones."""

from __future__ import annotations

import numpy as np
import pytest
from mxnet import autograd

from teaching import check


@pytest.mark.parametrize(
    ("answer", "right", "meaning"),
    [
        (64, True, "The largest gradient is now 37504; half of 64 overflows"),
        (32, False, "60000 x 40 / 32 is 75000, in FP16 infinity: each step overflows"),
        (1, False, "is skipped"),
        (40, False, "mpgluon refuses 2^19 / 40 as a scale: a static loss scale must be a power"),
        (128, False, "But 64 would do"),
        (0, False, "not a positive number"),
    ],
)
def test_the_sum_of_forty_losses_needs_a_scale_sixty_four_times_smaller(
    answer, right, meaning, capsys
):
    assert check("03.1", answer) == right
    assert meaning in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "right", "meaning"),
    [
        (250, True, "S gets there in step 1000"),
        (2000, False, "After 1,000 steps S is 2^16; it never gets there, and ends at 2^17"),
        (251, False, "it gets there in step 1004"),
        (100, False, "S gets there in step 400, and then"),
    ],
)
def test_a_short_run_needs_a_short_growth_interval(answer, right, meaning, capsys):
    assert check("03.2", answer) == right
    assert meaning in capsys.readouterr().out


def test_a_shorter_interval_skips_more_steps(capsys):
    check("03.2", 250)
    check("03.2", 100)
    skips = [
        int(line.split("then ")[1].split()[0]) for line in capsys.readouterr().out.splitlines()
    ]
    assert 0 < skips[0] < skips[1]


@pytest.mark.parametrize("answer", [250.5, 0])
def test_an_interval_is_a_whole_number_of_steps(answer):
    with pytest.raises(TypeError, match="a whole number of steps"):
        check("03.2", answer)


def finite(net):
    gradients = [p.grad() for p in net.collect_params().values()]
    return all(np.isfinite(gradient.asnumpy()).all() for gradient in gradients)


def step_of(*, scales=True, divides=True, skips=True, factor=0.5):
    def step(net, loss_of, trainer, scale):
        with autograd.record():
            loss = loss_of(net) * (scale if scales else 1)
        loss.backward()
        if skips and not finite(net):
            return scale * factor
        trainer.step(scale if divides else 1)
        return scale

    return step


@pytest.mark.parametrize(
    ("changes", "right", "meaning"),
    [
        ({}, True, "the weights move as far as in FP32"),
        ({"scales": False, "divides": False}, False, "The weights do not move"),
        ({"divides": False}, False, "the weights move 6.55e+04 times as far"),
        ({"skips": False}, False, "the step was not skipped"),
        ({"factor": 0.25}, False, "S = 2^45 has to become 2^44. Here: 8796093022208.0"),
        ({"factor": 1}, False, "S stays as it is, and overflows again"),
    ],
)
def test_a_step_by_hand_is_judged_by_the_weights_that_it_leaves(changes, right, meaning, capsys):
    assert check("03.3", step_of(**changes)) == right
    assert meaning in capsys.readouterr().out


def test_a_scale_that_changes_without_an_overflow_is_noticed(capsys):
    right = step_of()
    assert not check("03.3", lambda *arguments: right(*arguments) / 2)
    assert "changes S from 65536 to 32768.0" in capsys.readouterr().out


def test_a_step_that_is_no_function_is_refused():
    with pytest.raises(TypeError, match="the answer is a function"):
        check("03.3", 65536)
