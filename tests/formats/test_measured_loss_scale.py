"""The loss scale that follows the largest numbers of backward passes: its rule, without arrays."""

import json
import math

from mpgluon import MeasuredLossScale
from mpgluon.formats.loss_scale import as_loss_scale

import pytest
from hypothesis import given
from hypothesis import strategies as st

LIMIT = 65504.0


def train(scale, sizes, limit=LIMIT):
    """Take a step for the largest true gradient of each; return the scales and which overflowed."""
    scales, skipped = [], []
    for size in sizes:
        scaled = size * scale.scale
        scales.append(scale.scale)
        skipped.append(scaled > limit)
        scale.advance(scaled <= limit, scaled)
    return scales, skipped


@pytest.mark.parametrize("margin", [1, 3])
@pytest.mark.parametrize("size", [2.0**-30, 3e-4, 1.0, 100.0, 65504.0, 70000.0, 1e9])
def test_after_one_step_the_scale_leaves_its_margin(size, margin):
    scale = MeasuredLossScale(margin=margin, max_scale=2.0**60)
    scales, skipped = train(scale, [size] * 3)
    assert skipped == [size > LIMIT, False, False]
    assert scales[2] == scales[1]
    assert scales[1] * size <= LIMIT / 2**margin < 2 * scales[1] * size


def test_a_scale_shrinks_before_growing_gradients_overflow_and_grows_when_they_are_past():
    scale = MeasuredLossScale(interval=4)
    sizes = [1.0, 2.0, 6.0, 40.0, 200.0, 1.0, *[1.0] * 12]
    scales, skipped = train(scale, sizes)
    assert not any(skipped)
    assert scales[1:6] == [2.0**n for n in (12, 11, 10, 7, 5)]  # 8188 over each, rounded down
    assert scales[6:12] == [2.0**5] * 6  # 200 is recent for 4 to 8 steps
    assert scales[-1] == 2.0**12


def test_an_overflow_costs_one_step_however_far_off_the_scale_is():
    scales, skipped = train(MeasuredLossScale(init_scale=2.0**24), [1.0] * 4)
    assert skipped == [True, False, False, False]
    assert scales == [2.0**24, 2.0**12, 2.0**12, 2.0**12]


def test_an_overflow_that_was_not_measured_halves_the_scale_for_a_while():
    scale = MeasuredLossScale(interval=10)
    train(scale, [1.0])
    before = scale.scale
    for halvings in (1, 2):
        scale.advance(False, scale.scale)  # such as in a sum over devices: each was 1
        assert scale.scale == before / 2**halvings
    found = train(scale, [1.0] * 20)[0]
    assert found == [before / 4] * 7 + [before / 2] * 10 + [before] * 3  # after steps 10 and 20


@pytest.mark.parametrize(("size", "floor"), [(2.0**-20, 1.0), (1.0, 1.0), (2.0**17, 2.0**-5)])
def test_bad_batches_alone_do_not_take_the_scale_below_one(size, floor):
    scale = MeasuredLossScale(interval=100)
    train(scale, [size] * 2)
    for _ in range(40):
        scale.advance(False, size * scale.scale)
    assert scale.scale == floor
    assert not scale.can_shrink
    train(scale, [size] * 4_000)
    assert scale.scale == min(2.0 ** (12 - math.log2(size)), 2.0**24)


@pytest.mark.parametrize("largest", [None, 0.0])
def test_bad_batches_before_anything_is_measured_do_not_either(largest):
    scale = MeasuredLossScale(init_scale=4.0)
    found = [scale.advance(False, largest) or scale.scale for _ in range(4)]
    assert found == [2, 1, 1, 1]
    assert not scale.can_shrink
    below = MeasuredLossScale(init_scale=0.25)
    below.advance(False, largest)
    assert below.scale == 0.25


def test_where_nothing_is_measured_it_doubles_until_one_step_overflows():
    scale, scales, skips = MeasuredLossScale(interval=3), [], 0
    for _ in range(14):
        scales.append(scale.scale)
        skips += scale.scale > 128
        scale.update(scale.scale <= 128)
    assert scales == [2.0**n for n in range(9)] + [128, 128, 128, 256, 128]
    assert skips == 2


def test_zeros_say_nothing():
    scale = MeasuredLossScale()
    scale.advance(True, 0.0)
    assert scale.scale == 1


@given(st.lists(st.floats(2.0**-60, 2.0**40), max_size=40))
def test_it_stays_a_power_of_two_in_its_range(sizes):
    scale = MeasuredLossScale(interval=5, min_scale=2.0**-8, max_scale=2.0**20)
    for one in train(scale, sizes)[0]:
        assert 2.0**-8 <= one <= 2.0**20
        assert one.hex().startswith("0x1.0000000000000p")


def test_a_state_in_json_continues():
    one = as_loss_scale("measured")
    train(one, [1.0, 300.0, 0.5])
    other = MeasuredLossScale()
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert train(one, [2.0] * 999) == train(other, [2.0] * 999)
    assert one.state_dict() == other.state_dict()


@pytest.mark.parametrize(
    "wrong",
    [
        {"largest": -1.0},
        {"largest_before": "1"},
        *({"margin": margin} for margin in (True, 0, 31)),
        *({"growth_interval": 0}, {"searches": "x"}, {"backoff": -1}),
    ],
)
def test_a_state_that_is_none_is_refused(wrong):
    scale = MeasuredLossScale()
    before = scale.state_dict()
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        scale.load_state_dict({**before, **wrong})
    assert scale.state_dict() == before


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"margin": 0}, ValueError, "margin must be at least 1, received 0"),
        ({"margin": 1100}, ValueError, "margin must be at most 30, received 1100"),
        ({"interval": 2.0}, TypeError, "interval must be an int, received 2.0"),
        ({"init_scale": 3}, ValueError, "init_scale must be a power of two"),
        ({"max_scale": 0.5}, ValueError, "init_scale must lie between"),
    ],
)
def test_wrong_numbers_are_named(options, error, message):
    with pytest.raises(error, match=message):
        MeasuredLossScale(**options)
