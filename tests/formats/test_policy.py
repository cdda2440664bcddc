"""Policies: names, the written form, and every refusal."""

from __future__ import annotations

import doctest
from dataclasses import FrozenInstanceError
from itertools import permutations, product

from mpgluon.formats import policy
from mpgluon.formats.float_format import FLOAT8_E4M3, FLOAT8_E5M2, SMALL, TFLOAT32, FloatFormat
from mpgluon.formats.policy import Policy
from mpgluon.formats.scaling import ScaledOperands
from mpgluon.formats.tensor_core import TensorCoreSums

import pytest

NAMES = ("float32", "float16", "bfloat16", "mixed_float16", "mixed_bfloat16")
FORMATS = ("float32", "float16", "bfloat16")


def is_possible(param_dtype, compute_dtype, output_dtype):
    """Whether the documentation allows the combination, in its own words."""
    rounded_for_nothing = param_dtype not in ("float32", compute_dtype)
    return output_dtype != "bfloat16" and not rounded_for_nothing


POSSIBLE = [formats for formats in product(FORMATS, repeat=3) if is_possible(*formats)]


@pytest.mark.parametrize(
    ("text", "formats"),
    [
        ("float32", ("float32", "float32", "float32")),
        ("float16", ("float16", "float16", "float32")),
        ("bfloat16", ("bfloat16", "bfloat16", "float32")),
        ("mixed_float16", ("float32", "float16", "float32")),
        ("mixed_bfloat16", ("float32", "bfloat16", "float32")),
        ("compute=bfloat16", ("float32", "bfloat16", "float32")),
        ("output=float16", ("float32", "float32", "float16")),
        ("params=float32", ("float32", "float32", "float32")),
    ],
)
def test_a_text_stands_for_three_formats(text, formats):
    assert Policy.parse(text) == Policy(*formats)


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
    with pytest.raises(ValueError, match=rf"^{field} must be one of float32, .*{value!r}"):
        Policy(**{**formats, field: value})


def test_bfloat16_is_refused_as_the_output_format():
    with pytest.raises(ValueError, match=r"^output_dtype must be one of float32, float16; "):
        Policy("float32", "bfloat16", "bfloat16")


@pytest.mark.parametrize("value", ["turing", "Hopper", "", None, 16])
def test_an_unknown_accumulation_is_refused_with_the_choice(value):
    with pytest.raises(ValueError, match=rf"one of float32, volta, ampere, hopper; .*{value!r}$"):
        TensorCoreSums(value)


def test_sums_of_products_that_no_tensor_core_computes_are_refused():
    with pytest.raises(
        ValueError, match=r"float16 or bfloat16 numbers .* received compute_dtype='float32'"
    ):
        Policy("float32", "float32", "float32", TensorCoreSums("hopper"))
    with pytest.raises(ValueError, match=r"'volta' sums products of float16 numbers .*'bfloat16'"):
        Policy.parse("compute=bfloat16,accumulation=volta")


def test_accumulation_is_parsed_and_is_fp32_unless_chosen():
    assert Policy.parse("mixed_float16").accumulation == "float32"
    chosen = Policy.parse("compute=float16,accumulation=hopper")
    assert chosen == Policy("float32", "float16", "float32", TensorCoreSums("hopper"))


@pytest.mark.parametrize(
    ("params", "compute"),
    [
        ("float16", "float32"),
        ("float16", "bfloat16"),
        ("bfloat16", "float32"),
        ("bfloat16", "float16"),
    ],
)
def test_16_bit_parameters_for_another_computation_are_refused_with_advice(params, compute):
    message = f"{params} parameters with {compute} computation .* use param_dtype='float32'"
    with pytest.raises(ValueError, match=message):
        Policy(params, compute, "float32")


@pytest.mark.parametrize(
    "text",
    [
        *("", "half", "O1", "Float16", "float16 ", "mixed_float32", "param=float16", "=float16"),
        *("compute=float16,", "compute=float16,compute=float16"),
    ],
)
def test_other_texts_are_refused_with_both_forms(text):
    with pytest.raises(
        ValueError, match=r"[.?] A policy is one of float32, float16, .*params="
    ) as error:
        Policy.parse(text)
    assert str(error.value).startswith(f"received {text!r}, ")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        *(("float12", "'float16'"), ("Float16", "'float16'"), ("fp61", "'fp16'")),
        ("fp16", "'float16'"),
        *(("mixed_float17", "'mixed_float16'"), ("float8_e4m3", "'compute=float8_e4m3'")),
        ("params=float32,comput=float16", "'compute'"),
        ("params=float32,compute=float12", "'float16'"),
    ],
)
def test_a_misspelt_policy_is_refused_with_the_closest_name(text, meant):
    with pytest.raises(ValueError, match=f"did you mean .*{meant}"):
        Policy.parse(text)


def test_the_refusal_names_every_policy_that_there_is():
    with pytest.raises(ValueError, match="A policy is one of") as error:
        Policy.parse("?")
    assert all(name in str(error.value) for name in NAMES)


def test_a_written_policy_with_an_impossible_format_is_refused_like_a_constructed_one():
    with pytest.raises(ValueError, match="output_dtype must be one of"):
        Policy.parse("output=bfloat16")
    with pytest.raises(ValueError, match=r"output_dtype must be one of .*received ''"):
        Policy.parse("compute=float16,output")
    with pytest.raises(ValueError, match="param_dtype='float32'"):
        Policy.parse("params=float16")


@pytest.mark.parametrize(
    ("text", "written"),
    [
        *((name, name) for name in ("float32", "float16", "mixed_bfloat16", "mixed_float8")),
        ("compute=float16", "mixed_float16"),
        ("params=bfloat16,compute=bfloat16,output=float16,emulate=true", None),
        ("compute=e3m2,between=float16,scaling=mx", "compute=e3m2,scaling=mx,between=float16"),
        ("compute=float8_e4m3,between=bfloat16,scaling=tensor,amax_history=16", None),
        ("compute=float16,accumulation=volta", None),
    ],
)
def test_a_policy_is_written_as_text_that_is_parsed(text, written):
    policy = Policy.parse(text)
    assert Policy.parse(str(policy)) == policy
    assert written is None or str(policy) == written


def test_mixed_float8_is_e4m3_forward_e5m2_backward_and_bfloat16_between():
    mixed = Policy.parse("mixed_float8")
    written = "compute=float8_e4m3,gradient=float8_e5m2,scaling=tensor,between=bfloat16"
    assert mixed == Policy.parse(written)
    assert (mixed.param_dtype, mixed.output_dtype) == ("float32", "float32")
    assert (mixed.compute_dtype, mixed.product_dtype) == ("bfloat16", "float8_e4m3")
    assert mixed.products == ScaledOperands(FLOAT8_E4M3, FLOAT8_E5M2, "tensor")


def test_a_gradient_format_that_is_left_out_is_the_compute_format():
    scaled = Policy.parse("compute=float8_e5m2,between=float16").products
    assert scaled == ScaledOperands(FLOAT8_E5M2, FLOAT8_E5M2, "none")


def test_a_format_may_be_given_by_its_widths():
    assert Policy.parse("compute=e5m10").compute_dtype == "e5m10"
    scaled = Policy.parse("compute=e3m4,gradient=e4m2,between=bfloat16").products
    assert scaled == ScaledOperands(FloatFormat("e3m4", 5, 3), FloatFormat("e4m2", 3, 4))


@pytest.mark.parametrize("fmt", [*SMALL, TFLOAT32], ids=str)
def test_without_a_format_between_all_values_have_the_compute_format(fmt):
    policy = Policy.parse(f"compute={fmt}")
    assert (policy.compute_dtype, policy.products) == (fmt.name, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("compute=float8_e4m3,gradient=float8_e5m2", "name that too: between=bfloat16"),
        ("compute=float8_e4m3,scaling=mx", "name that too: between=bfloat16"),
        ("compute=float16,between=bfloat16", "is for operands of 8 bits or fewer"),
        ("compute=tfloat32,between=bfloat16,scaling=mx", "is for operands of 8 bits or fewer"),
        ("compute=float8_e4m3,between=float32",
            "values are bfloat16 or float16, received 'float32'"),
        ("compute=float8_e4m3,between=bfloat16,scaling=row", "scaling must be one of none, tensor"),
        ("compute=e4m3,between=bfloat16,gradient=float16",
            "is for operands of 8 bits or fewer, .* received 'float16'"),
        ("compute=e4m3,between=bfloat16,gradient=x", "gradient must be one of float32"),
        ("compute=e6m1,between=bfloat16", "is for operands of 8 bits or fewer"),
        ("compute=e4m3,between=bfloat16,amax_history=2", "received 2 with scaling='none'"),
        ("compute=e4m3,between=float16,accumulation=hopper", "leave it or between out"),
        ("compute=e9m2", "compute_dtype must be one of .* e2m1 to e8m23; received 'e9m2'"),
        ("params=float8_e4m3", "param_dtype must be one of float32, float16"),
        ("params=float16,compute=float8_e4m3", "float8_e4m3 computation round the weights"),
        ("output=float8_e4m3", "output_dtype must be one of float32, float16"),
    ],
)  # fmt: skip
def test_contradicting_parts_of_a_policy_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Policy.parse(text)
