"""The exercises of lesson 04: what right and wrong answers are told."""

from __future__ import annotations

import numpy as np
import pytest

from teaching import check
from teaching.lesson_04 import make_images


def with_fp16_sums(inputs, weight, bias):
    products = inputs[:, None, :] * weight[None, :, :]
    return np.cumsum(products, axis=-1, dtype="float16")[..., -1] + bias


def with_sums_of_numpy(inputs, weight, bias):
    return (inputs[:, None, :] * weight[None, :, :]).sum(axis=-1, dtype="float16") + bias


def with_a_product_of_numpy(inputs, weight, bias):
    return inputs @ weight.T + bias


def with_half_of_the_terms(inputs, weight, bias):
    return with_fp16_sums(inputs[:, ::2], weight[:, ::2], bias)


def in_fp32(inputs, weight, bias):
    return inputs.astype("float32") @ weight.T.astype("float32") + bias


def test_one_quarter_of_each_picture_is_brighter():
    images, quarters = make_images(50, seed=3)
    pixels = images.asnumpy()
    assert pixels.min() >= 0
    assert pixels.max() <= 255
    assert (pixels == pixels.round()).all()
    means = pixels.reshape(50, 3, 2, 4, 2, 4).mean(axis=(1, 3, 5)).reshape(50, 4)
    assert (means.argmax(axis=1) == quarters.asnumpy()).mean() > 0.95


@pytest.mark.parametrize(
    ("number", "answer", "right", "words"),
    [
        ("04.1", 11.09375, True, "the largest exponential that FP16 holds"),
        ("04.1", np.log(65520), True, "the largest exponential that FP16 holds"),
        ("04.1", np.float16(11.0859375), False, "which is still finite"),
        ("04.1", 11.2, False, "and that is a smaller FP16 number"),
        ("04.1", 16, False, "so is e^15.9922"),  # of those who think of 2^16
        ("04.1", 65504, False, "e^65504 is infinite in FP16, but so is e^65472"),
        ("04.1", 1e6, False, "is not an FP16 number: rounded to FP16 it is inf"),
        ("04.2", with_fp16_sums, True, "times with 4,096. The longer an FP16 sum"),
        ("04.2", with_sums_of_numpy, False, "these sums are not FP16"),
        ("04.2", with_a_product_of_numpy, False, "NumPy adds FP16 numbers in FP32"),
        ("04.2", with_half_of_the_terms, False, "is the result right?"),
        ("04.2", in_fp32, False, "it returns float32 of shape (16, 32)"),
        ("04.3", "broadcast_mul", True, "all other operators are cast as before"),
        ("04.3", "net_rootmeansquare0:broadcast_mul", True, "are cast as before"),
        ("04.3", "mean", False, "all pictures still get the same logits"),
        ("04.3", "broadcast_div", False, "all pictures still get the same logits"),
        ("04.3", "Convolution", False, "that operator does not overflow"),
    ],
)
def test_an_answer_is_told_what_it_does(number, answer, right, words, capsys):
    assert check(number, answer) == right
    assert words in capsys.readouterr().out


def test_an_answer_of_another_kind_is_refused():
    with pytest.raises(TypeError, match=r"a number \(no unit\)"):
        check("04.1", "11.09")
    with pytest.raises(TypeError, match="a function of inputs, weight and bias"):
        check("04.2", 3.5)
    with pytest.raises(TypeError, match="the name of an operator, as text"):
        check("04.3", ("broadcast_mul",))


def test_an_operator_that_mxnet_does_not_have_is_refused_by_the_cast():
    with pytest.raises(ValueError, match="squared"):
        check("04.3", "squared")
