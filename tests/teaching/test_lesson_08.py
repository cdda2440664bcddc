"""What the exercises of lesson 08 say to right answers, and to the wrong ones that people give."""

from __future__ import annotations

import numpy as np
import pytest

from teaching import check


def clipped_sum(gradients):
    return np.clip(sum(gradients), -65504, 65504)


def finite(gradients):
    return [bool(np.isfinite(gradient).all()) for gradient in gradients]


def ask_everyone(gradients):
    return clipped_sum(gradients), [all(finite(gradients))] * 2


def check_the_clipped_sum(gradients):
    return clipped_sum(gradients), finite([clipped_sum(gradients)]) * 2


def check_own_gradient(gradients):
    return clipped_sum(gradients), finite(gradients)


def check_own_gradient_and_add_infinities(gradients):
    return sum(gradients), finite(gradients)


def never_step(gradients):
    return clipped_sum(gradients), [False, False]


def ask_the_second_only(gradients):
    return clipped_sum(gradients), finite(gradients)[1:] * 2


def test_a_verdict_of_both_replicas_is_right(capsys):
    assert check("08.1", ask_everyone)
    assert "both skipped step 10 and no other" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("agree", "told"),
    [
        (check_the_clipped_sum, "infinity on replica 0 in step 10 both replicas stepped, and a"),
        (check_own_gradient, "replica 0 skipped 1 steps, replica 1 0. Both need the same verdict"),
        (check_own_gradient_and_add_infinities, "weights are infinite or NaN"),
        (never_step, "both replicas skipped 40 of 40 steps, and only one"),
        (ask_the_second_only, "infinity on replica 0 in step 10 both replicas stepped"),
    ],
)
def test_other_verdicts_are_told_what_becomes_of_the_replicas(agree, told, capsys):
    assert not check("08.1", agree)
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("workers", "right", "told"),
    [
        (128, True, "half of FP16's smallest number, which is rounded to 0"),
        (64, False, "each sends 5.96e-08, and the result is 3.81e-06"),
        (2**12, False, "and with 2048 already"),
        (100, False, "100 is not a power of two"),
        (0, False, "0 is not a power of two"),
    ],
)
def test_the_number_of_workers_is_tried(workers, right, told, capsys):
    assert check("08.2", workers) == right
    assert told in capsys.readouterr().out


def one_order_for_all(epoch, rank, world_size, count):
    return np.random.default_rng(epoch).permutation(count)[rank::world_size]


def a_seed_for_each_rank(epoch, rank, world_size, count):
    order = np.random.default_rng([epoch, rank]).permutation(count)
    return order[rank::world_size]


def everything_for_everyone(epoch, _rank, _world_size, count):
    return np.random.default_rng(epoch).permutation(count)


def never_shuffled(_epoch, rank, world_size, count):
    return range(rank, count, world_size)


def all_to_the_first(_epoch, rank, _world_size, count):
    return list(range(count)) if rank == 0 else []


def from_one(epoch, rank, world_size, count):
    return one_order_for_all(epoch, rank, world_size, count) + 1


def test_one_order_for_all_processes_is_right(capsys):
    assert check("08.3", one_order_for_all)
    assert "250 images each and together each of 1000 once" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("share", "told"),
    [
        (a_seed_for_each_rank, "of 1000 images were seen by no process, and"),
        (everything_for_everyone, "0 of 1000 images were seen by no process, and 1000 more than"),
        (never_shuffled, "epoch 1 has the order of an earlier epoch"),
        (all_to_the_first, "The processes get 1000, 0, 0, 0 images"),
        (from_one, "integers from 0 to 999"),
    ],
)
def test_other_shares_are_told_what_is_seen(share, told, capsys):
    assert not check("08.3", share)
    assert told in capsys.readouterr().out


@pytest.mark.parametrize("number", ["08.1", "08.3"])
def test_what_is_no_function_is_refused(number):
    with pytest.raises(TypeError, match=r"the answer is a function .*, received 3"):
        check(number, 3)
