"""Loss scales: the rule at its boundaries, against a model of it, and through saved states."""

from __future__ import annotations

import json
import math
from itertools import groupby

from mpgluon.formats.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoLossScale,
    StaticLossScale,
    as_loss_scale,
)

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.filterwarnings("error")

histories = st.lists(st.booleans(), max_size=60)
KINDS = (NoLossScale, lambda: StaticLossScale(128), DynamicLossScale)


def advance(loss_scale, history):
    """Update once per entry and return the scale after each."""
    scales = []
    for grads_finite in history:
        loss_scale.update(grads_finite)
        scales.append(loss_scale.scale)
    return scales


@pytest.mark.parametrize("interval", [1, 2, 3, 2000])
def test_growth_happens_exactly_on_step_growth_interval(interval):
    scales = advance(DynamicLossScale(8, growth_interval=interval), [True] * (3 * interval))
    assert scales == [8] * (interval - 1) + [16] * interval + [32] * interval + [64]


@pytest.mark.parametrize(
    ("options", "history", "scales"),
    [
        ({"init_scale": 2.0**16}, "0", [2.0**15]),
        ({"growth_interval": 3}, "110111", [8, 8, 4, 4, 4, 8]),
        ({"growth_interval": 2}, "10", [8, 4]),
        ({"growth_interval": 2}, "11", [8, 16]),
        ({"init_scale": 4, "growth_interval": 1, "min_scale": 2}, "00001", [2, 2, 2, 2, 4]),
        ({"init_scale": 4, "growth_interval": 1, "max_scale": 16}, "11110", [8, 16, 16, 16, 8]),
        (
            {"growth_factor": 4, "backoff_factor": 2**-4, "growth_interval": 1}
            | {"min_scale": 2, "max_scale": 16},
            "10",
            [16, 2],
        ),
        ({"growth_interval": 1, "min_scale": 8, "max_scale": 8}, "101", [8, 8, 8]),
    ],
    ids=[
        "overflow takes effect on the next loss", "overflow restarts the count",
        "overflow on the step that would have grown", "growth on that step without the overflow",
        "floor", "ceiling", "steps past a bound end on it", "range of one scale",
    ],
)  # fmt: skip
def test_the_scale_follows_its_rule_at_the_boundaries(options, history, scales):
    loss_scale = DynamicLossScale(**{"init_scale": 8, **options})
    assert advance(loss_scale, [step == "1" for step in history]) == scales


def test_a_thousand_overflows_leave_the_smallest_scale_and_not_zero():
    loss_scale = DynamicLossScale()
    assert loss_scale.can_shrink
    assert advance(loss_scale, [False] * 1100)[-1] == loss_scale.min_scale == 1
    assert not loss_scale.can_shrink


exponents = st.integers(1, 4)


@given(histories, st.integers(1, 5), exponents, exponents, st.integers(-3, 0), st.integers(0, 12))
def test_the_scale_is_what_a_count_of_runs_says(history, interval, grow, shrink, floor, ceiling):
    loss_scale = DynamicLossScale(
        1,
        growth_factor=2**grow,
        backoff_factor=2.0**-shrink,
        growth_interval=interval,
        min_scale=2.0**floor,
        max_scale=2**ceiling,
    )
    advance(loss_scale, history)
    # Runs of equal answers decide everything: a run of n finite steps grows n // interval times.
    exponent, remainder = 0, 0
    for grads_finite, run in groupby(history):
        length = len(list(run))
        if grads_finite:
            exponent = min(exponent + grow * (length // interval), ceiling)
            remainder = length % interval
        else:
            exponent = max(exponent - shrink * length, floor)
            remainder = 0
    assert (loss_scale.scale, loss_scale.growth_tracker) == (2.0**exponent, remainder)


@pytest.mark.parametrize("make", [NoLossScale, lambda: StaticLossScale(128)])
@given(histories)
def test_scales_that_are_not_dynamic_never_change(make, history):
    loss_scale = make()
    before = loss_scale.state_dict()
    advance(loss_scale, history)
    assert loss_scale.state_dict() == before


def test_only_the_absence_of_a_loss_scale_lets_overflows_through():
    assert [make().skips_overflow for make in KINDS] == [False, True, True]
    assert NoLossScale().scale == 1


def test_a_loss_scale_is_printed_with_every_field():
    assert repr(StaticLossScale(128)) == "StaticLossScale(scale=128.0)"
    assert repr(NoLossScale()) == "NoLossScale(scale=1.0)"
    assert repr(DynamicLossScale()) == (
        "DynamicLossScale(scale=65536.0, growth_factor=2.0, backoff_factor=0.5, min_scale=1.0, "
        "max_scale=16777216.0, growth_interval=2000, growth_tracker=0)"
    )


@given(histories, histories)
def test_a_restored_loss_scale_continues_like_the_one_that_was_saved(before, after):
    saved = DynamicLossScale(
        2.0**4,
        growth_factor=4,
        backoff_factor=0.25,
        growth_interval=3,
        min_scale=0.5,
        max_scale=2**20,
    )
    advance(saved, before)
    restored = DynamicLossScale()
    restored.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert vars(restored) == vars(saved)
    assert advance(restored, after) == advance(saved, after)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scale", 4.0), ("growth_factor", 8.0), ("backoff_factor", 0.125), ("growth_interval", 7),
        ("growth_tracker", 5), ("min_scale", 0.5), ("max_scale", 2.0**20),
    ],
)  # fmt: skip
def test_every_field_of_a_dynamic_loss_scale_is_restored(field, value):
    state = DynamicLossScale().state_dict()
    assert state[field] != value
    restored = DynamicLossScale()
    restored.load_state_dict({**state, field: value})
    assert vars(restored) == {**vars(DynamicLossScale()), field: value}


def test_the_scale_of_a_static_loss_scale_is_restored():
    restored = StaticLossScale(8)
    restored.load_state_dict(StaticLossScale(1024).state_dict())
    assert restored.scale == 1024


@pytest.mark.parametrize("saved", KINDS, ids=["none", "static", "dynamic"])
@pytest.mark.parametrize("loading", KINDS, ids=["none", "static", "dynamic"])
def test_a_state_goes_into_its_own_kind_only(saved, loading):
    loss_scale, state = loading(), saved().state_dict()
    before = loss_scale.state_dict()
    if saved is loading:
        loss_scale.load_state_dict(state)
    else:
        message = f"belongs to '{state['kind']}' and cannot be loaded into a {before['kind']}"
        with pytest.raises(ValueError, match=message):
            loss_scale.load_state_dict(state)
    assert loss_scale.state_dict() == before


def test_a_state_without_a_kind_is_refused():
    with pytest.raises(ValueError, match="belongs to None"):
        StaticLossScale(8).load_state_dict({"scale": 16.0})


@pytest.mark.parametrize("field", sorted(vars(DynamicLossScale())))
def test_a_state_that_lacks_a_field_is_refused_and_changes_nothing(field):
    loss_scale = DynamicLossScale(2)
    state = DynamicLossScale(4, growth_interval=9).state_dict()
    del state[field]
    with pytest.raises(ValueError, match=rf"missing: \['{field}'\], unknown: \[\]"):
        loss_scale.load_state_dict(state)
    assert loss_scale.state_dict() == DynamicLossScale(2).state_dict()


def test_the_count_towards_growth_restarts_at_the_ceiling_too():
    loss_scale = DynamicLossScale(16, growth_interval=2, max_scale=16)
    advance(loss_scale, [True, True, True])
    assert loss_scale.growth_tracker == 1


# --- what a constructor refuses --------------------------------------------------------------

NUMBERS = ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")
NOT_POWERS_OF_TWO = (3, 0, -2, 0.3, 1000, math.inf, math.nan, 2.0**16 + 1)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", NOT_POWERS_OF_TWO)
def test_a_number_other_than_a_power_of_two_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be a power of two, .*received {value!r}$"):
        DynamicLossScale(**{name: value})


@pytest.mark.parametrize("value", [*NOT_POWERS_OF_TWO, 2**1024])
def test_a_static_scale_other_than_a_power_of_two_is_refused(value):
    with pytest.raises(ValueError, match=r"^a static loss scale must be a power of two, so that"):
        StaticLossScale(value)


@pytest.mark.parametrize("value", [2.0**-1074, 2.0**-1, 1, 2, 2.0**1023], ids=str)
def test_every_power_of_two_is_a_scale_and_becomes_a_float(value):
    scale = StaticLossScale(value).scale
    assert scale == value
    assert type(scale) is float


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["8", True, [2], 1j])
def test_an_argument_that_is_not_a_number_is_refused_by_name(name, value):
    with pytest.raises(TypeError, match=f"^{name} must be a number, received"):
        DynamicLossScale(**{name: value})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        *(
            ({"growth_factor": value}, ValueError, f"must be larger than 1, received {value}")
            for value in (1, 0.5)
        ),
        *(
            ({"backoff_factor": value}, ValueError, f"must be smaller than 1, received {value}")
            for value in (1, 2)
        ),
        *(
            ({"growth_interval": value}, TypeError, f"must be an int, received {value!r}")
            for value in (2000.0, "2000", None, True)
        ),
        *(
            ({"growth_interval": value}, ValueError, f"must be at least 1 step, received {value}")
            for value in (0, -1)
        ),
    ],
)
def test_an_option_that_breaks_the_rule_is_refused_by_name(options, error, message):
    (name,) = options
    with pytest.raises(error, match=f"{name} {message}"):
        DynamicLossScale(**options)


def test_the_first_scale_of_the_talks_is_allowed_and_is_the_largest():
    loss_scale = DynamicLossScale(init_scale=2.0**32, growth_interval=1)
    loss_scale.update(True)
    assert loss_scale.scale == loss_scale.max_scale == 2.0**32
    assert DynamicLossScale().max_scale == DynamicLossScale(1).max_scale == 2.0**24


@pytest.mark.parametrize(
    "arguments",
    [
        {"init_scale": 1, "min_scale": 2},
        {"init_scale": 8, "max_scale": 4},
        {"init_scale": 4, "min_scale": 8, "max_scale": 2},
        {"init_scale": 2.0**25, "max_scale": 2.0**24},
        {"init_scale": 2.0**-1},
    ],
)
def test_a_first_scale_outside_its_range_is_refused(arguments):
    with pytest.raises(ValueError, match=r"init_scale must lie between min_scale .* and max_scale"):
        DynamicLossScale(**arguments)


@pytest.mark.parametrize("max_scale", [2.0**126, 2.0**127, 2.0**200, 2.0**1023])
def test_no_scale_grows_beyond_what_a_step_can_divide_by(max_scale):
    loss_scale = DynamicLossScale(2.0**124, growth_interval=1, max_scale=max_scale)
    assert loss_scale.max_scale == 2.0**126
    assert advance(loss_scale, [True] * 4) == [2.0**125, 2.0**126, 2.0**126, 2.0**126]
    state = loss_scale.state_dict()
    restored = DynamicLossScale()
    restored.load_state_dict({**state, "max_scale": max_scale})  # as written before it was capped
    assert advance(restored, [True] * 2) == [2.0**126] * 2
    restored.max_scale = max_scale
    assert advance(restored, [True] * 2) == [2.0**126] * 2


def test_a_first_scale_beyond_that_is_refused_with_the_limit():
    with pytest.raises(ValueError, match=r"and max_scale 8\.5\d+e\+37, received"):
        DynamicLossScale(2.0**127, max_scale=2.0**130)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("dynamic", DynamicLossScale()), ("none", NoLossScale()), (128, StaticLossScale(128)),
        (0.5, StaticLossScale(0.5)), ("128", StaticLossScale(128)),
        ("65536.0", StaticLossScale(2.0**16)), (1, StaticLossScale(1)),
    ],
)  # fmt: skip
def test_a_short_form_stands_for_a_loss_scale(value, expected):
    assert as_loss_scale(value).state_dict() == expected.state_dict()


@pytest.mark.parametrize("make", KINDS, ids=["none", "static", "dynamic"])
def test_a_loss_scale_is_returned_as_it_is(make):
    loss_scale = make()
    assert as_loss_scale(loss_scale) is loss_scale


def test_each_trainer_gets_a_state_machine_of_its_own():
    assert as_loss_scale("dynamic") is not as_loss_scale("dynamic")


@pytest.mark.parametrize("text", ["Dynamic", "", "static", "2**16", "auto"])
def test_another_text_is_refused_with_the_choice(text):
    words = rf'a loss scale is "dynamic", "measured", "none" or a power of two, received {text!r}'
    message = words.replace("**", r"\*\*")
    with pytest.raises(ValueError, match=message):
        as_loss_scale(text)


@pytest.mark.parametrize("value", [1000, "1000", "nan", "inf", "-8", "0", 0])
def test_a_short_form_other_than_a_power_of_two_is_refused(value):
    with pytest.raises(ValueError, match="scale must be a power of two"):
        as_loss_scale(value)


@pytest.mark.parametrize("value", [None, True, [128], StaticLossScale])
def test_another_kind_of_value_is_refused(value):
    with pytest.raises(TypeError, match="a power of two or a LossScale, received"):
        as_loss_scale(value)


def test_numbers_of_numpy_become_pythons():
    state = DynamicLossScale(np.float32(8), growth_interval=np.int64(100)).state_dict()
    assert state == DynamicLossScale(8.0, growth_interval=100).state_dict()
    DynamicLossScale().load_state_dict(json.loads(json.dumps(state)))


def test_a_loss_scale_without_a_rule_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        LossScale()
