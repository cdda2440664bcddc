"""Policies: names, the written form, and every refusal."""

from __future__ import annotations

import doctest
from dataclasses import FrozenInstanceError
from itertools import permutations, product

import pytest

from mpgluon.numerics import policy
from mpgluon.numerics.policy import Policy

NAMES = ("float32", "float16", "mixed_float16", "mixed_bfloat16")
FORMATS = ("float32", "float16", "bfloat16")


def is_possible(param_dtype, compute_dtype, output_dtype):
    """Whether the documentation allows the combination, in its own words."""
    bfloat16_inside_only = "bfloat16" not in (param_dtype, output_dtype)
    rounded_for_nothing = param_dtype == "float16" and compute_dtype != "float16"
    return bfloat16_inside_only and not rounded_for_nothing


POSSIBLE = [formats for formats in product(FORMATS, repeat=3) if is_possible(*formats)]


def test_float32_is_one_format_everywhere():
    assert Policy.parse("float32") == Policy("float32", "float32", "float32")


def test_float16_is_the_cast_network_with_fp32_logits():
    assert Policy.parse("float16") == Policy("float16", "float16", "float32")


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
def test_a_mixed_policy_computes_in_its_format_and_keeps_the_rest_in_fp32(compute):
    assert Policy.parse(f"mixed_{compute}") == Policy("float32", compute, "float32")


@pytest.mark.parametrize("formats", POSSIBLE, ids="-".join)
def test_every_possible_policy_survives_being_written_out_in_any_order(formats):
    pairs = [f"{key}={value}" for key, value in zip(("params", "compute", "output"), formats)]
    for emulate in ([], ["emulate=true"]):
        for order in permutations(pairs + emulate):
            expected = Policy(*formats, emulate=bool(emulate))
            assert Policy.parse(",".join(order)) == expected
            assert Policy.parse(" , ".join(order).replace("=", " = ")) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_named_policy_equals_the_same_policy_written_out(name):
    named = Policy.parse(name)
    written = (
        f"params={named.param_dtype},compute={named.compute_dtype},output={named.output_dtype},"
        f"emulate={str(named.emulate).lower()}"
    )
    assert Policy.parse(written) == named
    assert hash(Policy.parse(written)) == hash(named)


def test_what_is_left_out_is_float32():
    assert Policy.parse("compute=bfloat16") == Policy.parse("mixed_bfloat16")
    assert Policy.parse("output=float16") == Policy("float32", "float32", "float16")
    assert Policy.parse("params=float32") == Policy.parse("float32")


def test_a_policy_reads_back_from_its_own_representation():
    for formats in POSSIBLE:
        assert eval(repr(Policy(*formats)), {"Policy": Policy}) == Policy(*formats)


def test_a_policy_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        Policy.parse("float16").param_dtype = "float32"


def test_the_example_in_the_documentation_is_true():
    results = doctest.testmod(policy)
    assert results.attempted > 0
    assert results.failed == 0


IMPOSSIBLE = [f for f in product(FORMATS, repeat=3) if not is_possible(*f)]


@pytest.mark.parametrize("formats", IMPOSSIBLE, ids="-".join)
def test_every_other_combination_of_formats_is_refused(formats):
    with pytest.raises(ValueError, match=r"must be one of|round the weights"):
        Policy(*formats)


@pytest.mark.parametrize("field", ["param_dtype", "compute_dtype", "output_dtype"])
@pytest.mark.parametrize("value", ["half", "float64", "", None, 16])
def test_an_unknown_format_is_refused_with_the_place_and_the_choice(field, value):
    formats = {"param_dtype": "float32", "compute_dtype": "float32", "output_dtype": "float32"}
    with pytest.raises(ValueError, match=rf"^{field} must be one of float32, .*{value!r}$"):
        Policy(**{**formats, field: value})


@pytest.mark.parametrize("field", ["param_dtype", "output_dtype"])
def test_bfloat16_exists_inside_a_computation_only(field):
    formats = {"param_dtype": "float32", "compute_dtype": "bfloat16", "output_dtype": "float32"}
    with pytest.raises(ValueError, match=f"^{field} must be one of float32, float16; received"):
        Policy(**{**formats, field: "bfloat16"})


@pytest.mark.parametrize("value", ["turing", "Hopper", "", None, 16])
def test_an_unknown_accumulation_is_refused_with_the_choice(value):
    with pytest.raises(ValueError, match=rf"one of float32, volta, ampere, hopper; .*{value!r}$"):
        Policy("float32", "float16", "float32", accumulation=value)


def test_sums_of_products_that_no_tensor_core_computes_are_refused():
    with pytest.raises(
        ValueError, match=r"float16 or bfloat16 numbers .* received compute_dtype='float32'"
    ):
        Policy("float32", "float32", "float32", accumulation="hopper")
    with pytest.raises(ValueError, match=r"'volta' sums products of float16 numbers .*'bfloat16'"):
        Policy.parse("compute=bfloat16,accumulation=volta")


def test_accumulation_is_parsed_and_is_fp32_unless_chosen():
    assert Policy.parse("mixed_float16").accumulation == "float32"
    chosen = Policy.parse("compute=float16,accumulation=hopper")
    assert chosen == Policy("float32", "float16", "float32", accumulation="hopper")


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_float16_parameters_for_another_computation_are_refused_with_advice(compute):
    with pytest.raises(ValueError, match=f"{compute} computation .* use param_dtype='float32'"):
        Policy("float16", compute, "float32")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "half",
        "O1",
        "Float16",
        "float16 ",
        "mixed_float32",
        "bfloat16",
        "param=float16",
        "compute=float16,",
        "compute=float16,compute=float16",
        "=float16",
    ],
)
def test_a_text_that_is_no_policy_is_refused_with_both_forms(text):
    with pytest.raises(
        ValueError, match=r"a policy is one of float32, float16, .*params="
    ) as error:
        Policy.parse(text)
    assert str(error.value).endswith(f"received {text!r}")


def test_the_refusal_names_every_policy_that_there_is():
    with pytest.raises(ValueError, match="a policy is one of") as error:
        Policy.parse("?")
    assert all(name in str(error.value) for name in NAMES)


def test_a_written_policy_with_an_impossible_format_is_refused_like_a_constructed_one():
    with pytest.raises(ValueError, match="output_dtype must be one of"):
        Policy.parse("output=bfloat16")
    with pytest.raises(ValueError, match=r"output_dtype must be one of .*received ''"):
        Policy.parse("compute=float16,output")
    with pytest.raises(ValueError, match="param_dtype='float32'"):
        Policy.parse("params=float16")
