"""The exercises of lesson 09, and its diffs, which must be those of the code that runs."""

from __future__ import annotations

import re
from pathlib import Path

from mpgluon import amp

import pytest
from mxnet import autograd

from teaching import check

SOURCE = (
    Path(__file__).resolve().parents[2] / "notebooks" / "source" / "09_a_loop_of_your_own.py"
).read_text("utf-8")


@pytest.mark.parametrize(
    ("answer", "right", "meaning"),
    [
        (64, True, "the weights move 1 times as far"),
        (
            16,
            False,
            "the weights move 4 times as far. The step divides a sum over all images by 16",
        ),
        (4, False, "the weights move 16 times as far"),
        (1, False, "the weights move 64 times as far"),
        (0, False, "A batch of 0 images is refused"),
    ],
)
def test_a_step_of_four_parts_divides_by_all_images(answer, right, meaning, capsys):
    assert check("09.1", answer) == right
    assert meaning in capsys.readouterr().out


def largest(gradients):
    return max(float(abs(gradient).max().asscalar()) for gradient in gradients)


def raw(net, *_):
    return largest(p.grad() for p in net.collect_params().values())


def divided_in_fp16(net, trainer, batch_size):
    grads = [p.grad() / amp.loss_scale(trainer) / batch_size for p in net.collect_params().values()]
    return largest(grads)


@pytest.mark.parametrize(
    ("answer", "right", "meaning"),
    [
        (
            lambda _, trainer, size: largest(amp.unscaled_gradients(trainer).values()) / size,
            True,
            "the true value, also below the smallest number of FP16",
        ),
        (raw, False, "it is not divided by S, nor by the batch size"),
        (lambda *given: raw(*given) / given[2], False, "it is not divided by S."),
        (
            lambda _, trainer, __: largest(amp.unscaled_gradients(trainer).values()),
            False,
            "it is not divided by the batch size",
        ),
        (divided_in_fp16, False, "FP16 cannot hold it"),
        (
            lambda _, trainer, size: (
                largest(amp.unscaled_gradients(trainer).values()) / size / amp.loss_scale(trainer)
            ),
            False,
            "it is divided by S twice",
        ),
        (lambda *_: 1000.0, False, "times as much"),
    ],
)
def test_a_logged_gradient_is_compared_with_the_true_one(answer, right, meaning, capsys):
    assert check("09.2", answer) == right
    assert meaning in capsys.readouterr().out


def one_after_the_other(net, trainer, losses_of, batch_size):
    with autograd.record():
        for loss in losses_of(net):
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss, retain_graph=True)
    trainer.step(batch_size)


def together(net, trainer, losses_of, batch_size):
    with autograd.record(), amp.scale_loss(losses_of(net), trainer) as scaled_losses:
        autograd.backward(scaled_losses)
    trainer.step(batch_size)


def added(net, trainer, losses_of, batch_size):
    together(net, trainer, lambda net: sum(losses_of(net)), batch_size)


def only_the_first(net, trainer, losses_of, batch_size):
    together(net, trainer, lambda net: losses_of(net)[0], batch_size)


def halved(net, trainer, losses_of, batch_size):
    together(net, trainer, losses_of, 2 * batch_size)


@pytest.mark.parametrize(
    ("answer", "right", "meaning"),
    [
        (together, True, "1 times the gradient of the first loss plus 1 times"),
        (added, True, "1 times the gradient of the first loss plus 1 times"),
        (one_after_the_other, False, "has replaced the gradients of the first"),
        (only_the_first, False, "1 times the gradient of the first loss plus 0 times"),
        (halved, False, "0.5 times the gradient of the first loss plus 0.5 times"),
    ],
)
def test_a_step_of_two_losses_is_judged_by_where_the_weights_go(answer, right, meaning, capsys):
    assert check("09.3", answer) == right
    assert meaning in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "words"), [("09.1", "a number"), ("09.2", "a function"), ("09.3", "a function")]
)
def test_an_answer_of_another_kind_is_refused(number, words):
    with pytest.raises(TypeError, match=f"the answer is {words}"):
        check(number, "64")


def cells_after_diffs():
    """Return each diff's lines, and those of the loop that follows it."""
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
