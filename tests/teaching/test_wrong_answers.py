"""Wrong answers to the exercises get their explanation; right ones stand in the lessons."""

import mpgluon
from mpgluon import BFLOAT16, FLOAT6_E2M3, amp

import numpy as np
import pytest
from mxnet import autograd, gluon

from teaching import check


def adam(net, **more):
    return gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.0001, **more})


def not_cast(net):
    trainer = adam(net, multi_precision=True)
    amp.init_trainer(trainer)
    return trainer


def without_masters(net):
    mpgluon.cast_block(net)
    trainer = adam(net)
    amp.init_trainer(trainer)
    return trainer


def without_loss_scale(net):
    mpgluon.cast_block(net)
    return adam(net, multi_precision=True)


def too_slow(net):
    trainer = without_loss_scale(net)
    trainer.set_learning_rate(1e-7)
    amp.init_trainer(trainer)
    return trainer


def fp32_matrix_product(inputs, weight, _bias):
    return inputs.astype("float32") @ weight.T.astype("float32")


def cast_then_load_rounded(net, path):
    mpgluon.cast_block(net)
    net.load_parameters(path, cast_dtype=True)


def energy_of_a_quarter(F, x):
    small = x / 4
    return F.log(16 * F.mean(F.broadcast_mul(small, small), axis=2) + 1)


def clipped_sum_and_own_flags(gradients):
    total = np.clip(sum(gradients), -65504, 65504)
    return total, [bool(np.isfinite(gradient).all()) for gradient in gradients]


def step_without_skip(net, loss_of, trainer, scale):
    with autograd.record():
        loss = loss_of(net) * scale
    loss.backward()
    trainer.step(scale)
    return scale


def largest(gradients):
    return max(float(abs(gradient).max().asscalar()) for gradient in gradients)


def raw_gradient(net, *_):
    return largest(parameter.grad() for parameter in net.collect_params().values())


def one_loss_after_the_other(net, trainer, losses_of, batch_size):
    with autograd.record():
        for loss in losses_of(net):
            with amp.scale_loss(loss, trainer) as scaled_loss:
                autograd.backward(scaled_loss, retain_graph=True)
    trainer.step(batch_size)


def seed_of_each_rank(epoch, rank, world_size, count):
    return np.random.default_rng([epoch, rank]).permutation(count)[rank::world_size]


WRONG = [
    ("00.1", 1, "S is 32768, and the largest gradient is 98304: that still overflows"),
    ("00.1", 3, "But with S = 16384 it fits already"),
    ("00.1", 1.5, "1.5 is not a number of steps"),
    ("00.2", not_cast, "Change 1 is missing: the weights are still float32"),
    ("00.2", without_masters, "2 is missing: Adam updates 4 float16 weights without FP32 masters"),
    ("00.2", without_loss_scale, "Change 3 is missing: this Trainer has no loss scale yet"),
    ("00.2", mpgluon.cast_block, "and not a gluon.Trainer with Adam"),
    ("00.2", too_slow, "0% of the weights have left 1: FP16's next number is 0.00049 away"),
    ("01.1", 2, "At 2 the sum goes on: half the spacing there is 0.00098, less than 0.001"),
    ("01.2", BFLOAT16, "half the spacing above 1 is 0.00390625, and 1.002 is rounded to 1"),
    ("01.3", 3.999, "3.999 is not an FP16 number from 1 up to 4"),
    ("02.1", 8, "8 bytes hold the weight, the gradient, the master, but not the averages"),
    ("02.2", 0.0005, "stays at 1 for ever. The first update is 0.000125; half the spacing"),
    ("02.3", 1 / 256, "the others survive"),
    ("03.1", 32, "60000 x 40 / 32 is 75000, in FP16 infinity: each step overflows"),
    ("03.2", 251, "it gets there in step 1004"),
    ("03.3", step_without_skip, "the step was not skipped"),
    ("04.1", 65504, "e^65504 is infinite in FP16, but so is e^65472"),
    ("04.2", fp32_matrix_product, "it returns float32 of shape (16, 32)"),
    ("04.3", "Convolution", "that operator does not overflow"),
    ("05.1", 20_000, "fewer images are enough"),
    ("05.2", 2000, "never in this run"),  # the default
    ("05.3", cast_then_load_rounded, "rounded to FP16 first: load, then cast"),
    ("06.1", energy_of_a_quarter, "Cast to FP16, it breaks: forward"),
    ("06.2", 300, "300 is not a power of two"),
    ("06.3", 65536, "is not finite: the step is skipped"),
    ("06.4", "output", "those of another layer from step 13 on"),
    ("06.4", "energy", "energy has no weights, and is the same code in both runs"),
    ("06.4", "2.weight", "'2.weight' is not one of the layers filters, energy, hidden, output"),
    ("07.2", 139, "would be busy 82 % of the time"),  # as many as operations per byte
    ("07.3", 1000, "more than 8,192"),
    ("08.1", clipped_sum_and_own_flags, "Skipped steps: 1 of replica 0, 0 of replica 1"),
    ("08.2", 64, "each sends 5.96e-08, and the result is 3.81e-06"),
    ("08.3", seed_of_each_rank, "of 1000 images were seen by no process, and"),
    ("09.1", 16, "the weights move 4 times as far. The step divides a sum over all images by 16"),
    ("09.2", raw_gradient, "it is not divided by S, nor by the batch size"),
    ("09.3", one_loss_after_the_other, "has replaced the gradients of the first"),
    ("10.1", lambda weight, bias, *_: (weight, bias), "The weight is not W with its columns"),
    ("10.2", 0.25, "The logits 0.375 and 0 may become 0.125 and 0.25: the decision changes"),
    ("10.3", 10, "is another result"),
    ("11.1", 2**25, "2^25 is 100,663, and the largest E5M2 number is 57,344"),
    ("11.2", FLOAT6_E2M3, "become zero"),
    ("11.3", 16, "had moved after 16 steps; the first move came after 32"),
]


@pytest.mark.parametrize(("number", "answer", "words"), WRONG)
def test_a_wrong_answer_is_explained(number, answer, words, capsys):
    assert not check(number, answer)
    assert words in capsys.readouterr().out


OF_ANOTHER_KIND = [
    *(("00.1", "2"), ("00.2", 3)),
    *(("01.2", 16), ("03.2", 250.5), ("03.3", 65536), ("04.1", "11.09"), ("04.2", 3.5)),
    *(("04.3", ("broadcast_mul",)), ("05.3", "load"), ("06.1", 3), ("06.2", "256")),
    *(("06.4", 2), ("07.1", 1.5), ("08.1", 3), ("08.3", 3), ("09.1", "64"), ("09.2", "64")),
    *(("10.1", 1), ("11.1", "2**24"), ("11.2", "e4m1")),
]


@pytest.mark.parametrize(("number", "answer"), OF_ANOTHER_KIND)
def test_an_answer_of_another_kind_is_refused(number, answer):
    with pytest.raises(TypeError, match=r"the answer is|number of steps"):
        check(number, answer)
