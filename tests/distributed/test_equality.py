"""Several processes compute what one does.

Two references, neither of which uses `mpgluon.distributed`: one process with the whole batch, and
one process that takes the ranks' parts of the batch one after the other, adds their gradients with
NumPy and rounds the sum. The second does the same arithmetic, so it must agree in every bit.
"""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest
from helpers import assert_same_bits
from mxnet import autograd, gluon
from references import numbers_of, part_of, train_part_after_part
from small_training import BAD_STEP, FIRST_SCALE, STEPS, batches, make_net, train

pytestmark = pytest.mark.multiprocess

DTYPES = ["float32", "float16", "bfloat16"]
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11}


def test_float32_weights_are_those_of_one_process_with_the_whole_batch(scenarios):
    several, one = part_of(scenarios[1], "float32"), train("float32")
    for name, value in numbers_of(one).items():
        # Per step, a gradient is a sum of 8 terms in another order: 8 roundings of less than
        # 2**-24 of terms below 1. Ten steps at 0.1, ten times that with momentum: 5e-6 at the
        # worst; roundings that go both ways stay below the 1e-6 that is promised.
        np.testing.assert_allclose(several[name], value, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_bit_for_bit_those_of_one_process_that_adds_the_parts_in_float32(
    scenarios, dtype
):
    ranks, _ = scenarios
    if ranks > 2 and dtype != "float16":
        # Two numbers have one float32 sum. For four, MPI chooses the order, which matters
        # unless float32 holds all partial sums exactly, as it does for float16 numbers of
        # similar size.
        pytest.skip("the order of a sum of four float32 numbers is MPI's")
    assert_same_bits(numbers_of(part_of(scenarios[1], dtype)), train_part_after_part(dtype, ranks))


def test_the_first_float16_step_differs_from_the_whole_batch_by_the_rounding_of_gradients(
    scenarios,
):
    ranks, results = scenarios
    net = make_net("float16")
    images, labels = batches()[0]
    gradients = []
    for rows in (slice(None), *(slice(rank, None, ranks) for rank in range(ranks))):
        with autograd.record():
            outputs = net(mx.nd.array(images[rows], dtype="float16"))
            loss = gluon.loss.SoftmaxCrossEntropyLoss()(
                outputs, mx.nd.array(labels[rows], dtype="int32")
            )
            scaled = loss * FIRST_SCALE
        scaled.backward()
        gradients.append(net[2].weight.grad().asnumpy().astype(np.float64))
    whole, *parts = gradients
    # One rounding of each part, one of their sum, one of the whole: u of each; and the float32
    # sums inside, a thousand times smaller, doubled to be safe by the factor 1 + 2**-10.
    u = UNIT_ROUNDOFF["float16"]
    bound = u * (sum(map(np.abs, parts)) + abs(sum(parts)) + abs(whole)) * (1 + 2**-10)
    assert np.all(abs(results["first-sum"] - whole) <= bound + 2.0**-24)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_messages_and_one_per_parameter_give_the_same_bits(scenarios, dtype):
    assert_same_bits(part_of(scenarios[1], dtype), part_of(scenarios[1], f"{dtype}-one-by-one"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_lowers_the_scale_once(scenarios, dtype):
    # That all ranks have the same results was checked where they were gathered.
    poisoned = part_of(scenarios[1], f"{dtype}-poisoned")
    assert poisoned["skipped"].tolist() == [step == BAD_STEP for step in range(STEPS)]
    expected = [FIRST_SCALE if step <= BAD_STEP else FIRST_SCALE / 2 for step in range(STEPS)]
    assert poisoned["scales"].tolist() == expected
    without_that_step = part_of(scenarios[1], f"{dtype}-control")
    assert_same_bits(numbers_of(poisoned), numbers_of(without_that_step))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_network_of_the_numpy_interface_has_the_same_bits(scenarios, dtype):
    results = scenarios[1]
    assert_same_bits(part_of(results, f"{dtype}-in-numpy"), part_of(results, f"{dtype}-poisoned"))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_processes_that_begin_with_other_weights_take_those_of_rank_0(scenarios, dtype):
    # float16 weights and their masters by share_state.
    _, results = scenarios
    assert_same_bits(part_of(results, f"{dtype}-other-seeds"), part_of(results, dtype))


def test_masters_that_differ_between_ranks_are_refused(scenarios):
    _, results = scenarios
    message = str(results["other-masters"])
    assert message.startswith("rank 1 has other weights than rank 0: ")
    assert "All processes must begin with share_state" in message


def test_a_step_with_other_numbers_on_one_rank_is_refused_on_all_with_the_numbers(scenarios):
    ranks, results = scenarios
    values = {
        "rescale_grad": (1.0, 0.5),
        "lr": (0.0, 0.5),
        "wd": (0.0, 0.5),
        "lr_mult": (None, (2.0, 1.0)),
        # 16 weights, each with the gradient 1 on each rank: a norm of 4 times their number.
        "clip factor": (1 / (4 * ranks), 2 / (4 * ranks)),
        "loss scale": (1.0, 2.0),
        "schedule": (0.5 * (1 - 1 / 2) ** 2, 0.5 * (1 - 1 / 4) ** 2),
    }
    for name, (first, second) in values.items():  # on ranks 0 and 1
        message = str(part_of(results, "refused")[name])
        assert name in message, message
        assert f" is {first} on rank 0, {second} on rank 1" in message


@pytest.mark.usefixtures("native_operators")  # which raise flags
@pytest.mark.parametrize("how", ["", "/scaled", "/attached later", "/overflow"])
def test_a_gradient_that_is_new_on_one_rank_updates_all_and_an_old_one_is_not_sent_again(
    scenarios, how
):
    world_size, results = scenarios
    weights, expected = np.ones(2), []
    for share in (1.0, 1 / world_size, 1 / world_size):
        if share == 1 or how != "/overflow":  # which is skipped
            first, second = weights
            weights = weights - [(share * second + 1 - share) / 64, share * first / 64]
        expected.append(weights)
    found = results[f"layer-on-one-rank{how}"]
    assert np.allclose(found, expected, rtol=1e-6, atol=0)


def test_an_overflow_is_named_on_all_ranks_with_its_layer_and_rank_or_as_that_of_the_sum(scenarios):
    ranks, results = scenarios
    flags = part_of(results, "flags")
    assert f"dense (Dense, cpu(0), rank {ranks - 1}) forward: overflow" in str(flags["layer"])
    # 2**15 on each rank, which float16 holds.
    assert str(flags["sum"]) == "sum over processes (MpiKVStore, cpu(0)) backward: overflow"


def test_float16_gradients_are_summed_in_float32(scenarios):
    ranks, results = scenarios
    if ranks < 4:
        pytest.skip("two numbers have one sum in any format")
    # +60000, +60000, -60000, -60000 on the ranks in three arrangements: whichever two are added
    # first in float16, in one of them their sum would be infinite, and the sum of all NaN.
    assert results["cancelling"].tolist() == [0, 0, 0]


def test_a_sum_beyond_float16_is_infinite_and_float64_gradients_are_summed_in_float64(scenarios):
    ranks, results = scenarios
    assert results["beyond"].tolist() == [np.inf]
    assert results["float64"].tolist() == [ranks + sum(range(ranks)) * 2.0**-40]
