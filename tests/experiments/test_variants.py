"""Networks in several ways beside a base: what their runs have in common, and the pages on them."""

from __future__ import annotations

import re
import warnings
from typing import Union

from mpgluon import Policy

import pytest
from matplotlib.figure import Figure

from experiments import bfloat16_weights, eight_bits, parity, tensor_core_sums
from experiments.experiment import Outcome
from experiments.groups import GROUPS
from recipes.training import TrainingConfig

ALL = {one.name: one for group in GROUPS for one in group.experiments}
MEMBERS = (bfloat16_weights.GROUP, eight_bits.GROUP, tensor_core_sums.GROUP)
TITLES = {  # on the page of findings, and in the details
    "bfloat16_weights": ("bfloat16 weights without masters", "bfloat16 weights without masters"),
    "eight_bits": ("Products in eight bits", "Eight bits"),
    "tensor_core_sums": ("Sums as Tensor Cores add them", "Sums of Tensor Cores"),
}


def rows_of(group):
    return list(dict.fromkeys(one.name.rsplit("/", 1)[0] for one in group.experiments))


@pytest.mark.parametrize("group", MEMBERS, ids=lambda one: one.name)
def test_each_row_has_five_seeds_and_differs_from_float32_in_its_arithmetic_alone(group):
    assert len(group.experiments) == 5 * len(rows_of(group))
    for one in group.experiments:
        name, network, _, seed = one.name.split("/")
        others = tensor_core_sums.GROUP.name if name == tensor_core_sums.GROUP.name else "parity"
        base, config = dict(ALL[f"{others}/{network}/float32/{seed}"].config), dict(one.config)
        config.pop("update_rounding", None)
        del config["dtype"], base["dtype"]
        assert config == base
        assert one.needs_photographs


@pytest.mark.parametrize(
    ("row", "policy"),
    [
        ("bfloat16_weights/alexnet/kahan", "params=bfloat16,compute=bfloat16"),
        ("eight_bits/resnet50_v2/tensor", "mixed_float8"),
        ("tensor_core_sums/cifar_resnet20_v1/float16", "mixed_float16"),
        ("tensor_core_sums/cifar_resnet20_v1/volta", "compute=float16,accumulation=volta"),
    ],
)
def test_the_rows_have_the_policies_of_the_docs(row, policy):
    config = ALL[f"{row}/seed-0"].config
    known = {name: config[name] for name in ("dtype", "amp", "model", "epochs")}
    assert TrainingConfig(**known).policy == Policy.parse(policy)


def test_updates_are_rounded_as_the_row_says():
    for one in bfloat16_weights.GROUP.experiments:
        assert one.config["update_rounding"] == one.name.split("/")[2]


def test_scales_are_what_the_rows_in_eight_bits_differ_in():
    policies = {
        row.rsplit("/", 1)[1]: Policy.parse(ALL[f"{row}/seed-0"].config["dtype"])
        for row in rows_of(eight_bits.GROUP)
    }
    scaled = {name: one.products for name, one in policies.items()}
    assert {name: one.shared_by for name, one in scaled.items()} == {n: n for n in policies}
    assert policies.keys() == {"tensor", "mx", "none"}
    assert {(one.value.name, one.gradient.name) for one in scaled.values()} == {
        ("float8_e4m3", "float8_e5m2")
    }


@pytest.fixture
def records(record_of):
    """Return what makes records of parity and these groups, with other points for some ways.

    A way's points, or its points and its training loss, are added to what the base has.
    """

    def make(**others: Union[float, tuple[float, float]]):
        points = {way: one[0] if isinstance(one, tuple) else one for way, one in others.items()}
        losses = {way: one[1] for way, one in others.items() if isinstance(one, tuple)}
        made = {}
        for one in (
            *parity.GROUP.experiments,
            *(e for group in MEMBERS for e in group.experiments),
        ):
            group, _, way, seed = one.name.split("/")
            noise = 0 if group == "parity" or way == "float16" else 0.01 * (int(seed[-1]) - 2)
            accuracy = (60 + int(seed[-1]) % 3 + points.get(way, 0) + noise) / 100
            loss = 0.5 + losses.get(way, 0) + noise / 10
            figures = {"test_accuracy": accuracy, "train_loss": loss, "skipped_steps": 3,
                       "steps": 240, "final_loss_scale": 1.0, "test_images": 200}  # fmt: skip
            curves = {"loss": [1.0], "loss_scale": [], "test_accuracy": [accuracy]}
            made[one.name] = record_of(one, Outcome(figures, curves, {"training_seconds": 1.0}))
        return made

    return make


SUPPORTED = {"nearest": (0.0, 0.25)}  # what the conclusions of all three groups say
WORSE = {"nearest": -20.0, "none": -20.0}


@pytest.mark.parametrize("group", MEMBERS, ids=lambda one: one.name)
def test_the_pages_show_each_way_beside_its_base(group, records, page_of):
    short, long = TITLES[group.name]
    ways = list(dict.fromkeys(row.split("/")[2] for row in rows_of(group)))
    compared = [way for way in ways if way != group.view({}).base]
    findings = page_of(records(**SUPPORTED), short, template="results")
    found = re.findall(r"\| (\w+) +\| +(\d+) \| ([-+.\d]+) .* \| ([-+.\d]+) \(", findings)
    pairs = str(5 * len({row.split("/")[1] for row in rows_of(group)}))
    losses = {"nearest": "+0.25"}
    assert found == [(way, pairs, "+0.00", losses.get(way, "+0.00")) for way in compared]
    assert findings.count("**") == 2
    assert "no longer support" not in findings
    details = page_of(records(**SUPPORTED), long)
    for row in rows_of(group):
        assert f"`python scripts/evidence.py run {row}`" in details
    assert "Not run yet" not in findings + details
    assert "3 of 240" in details


@pytest.mark.parametrize(
    ("group", "points"),
    [
        (bfloat16_weights.GROUP, {}),
        (bfloat16_weights.GROUP, {**SUPPORTED, "kahan": (0.0, 0.3)}),
        (bfloat16_weights.GROUP, {"nearest": (-5.0, 0.25)}),
        (eight_bits.GROUP, {"none": -5.0}),
        (eight_bits.GROUP, {"mx": -5.0}),
        (tensor_core_sums.GROUP, {"volta": -5.0}),
    ],
)
def test_a_conclusion_is_withdrawn_if_the_records_say_otherwise(group, points, records, page_of):
    text = page_of(records(**points), TITLES[group.name][0], template="results")
    assert "no longer support the conclusion" in text


def test_p_values_are_corrected_for_the_number_of_ways(records):
    view = eight_bits.GROUP.view(records(none=-20.0, tensor=0.004))
    tests = sorted(one.t_test for one in view.pooled.values())
    assert sorted(view.corrected.values()) == pytest.approx(
        [3 * tests[0], 2 * tests[1], max(tests[2], 2 * tests[1])]
    )
    assert view.different == ["none"]


@pytest.mark.parametrize("group", MEMBERS, ids=lambda one: one.name)
def test_some_of_the_runs_are_shown_and_the_rest_named(group, records, page_of):
    lost = rows_of(group)[-1]
    some = {name: one for name, one in records().items() if not name.startswith(f"{lost}/")}
    short, long = TITLES[group.name]
    details = page_of(some, long)
    assert f"Not run yet: {lost}." in details
    assert details.count("scripts/evidence.py run") == len(rows_of(group)) - 1
    findings = page_of(some, short, template="results")
    assert "| pairs |" not in findings
    assert "](results/" not in findings


@pytest.mark.parametrize("group", MEMBERS, ids=lambda one: one.name)
def test_the_picture_has_a_mark_for_each_run_and_its_base(group, records):
    figure = Figure(layout="constrained")
    (draw,) = group.pictures.values()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(figure, records(**WORSE))
        figure.draw_without_rendering()
    (axes,) = figure.axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    view = group.view({})
    assert set(labels[1:]) == {view.base, *view.ways}
    marks = [line for line in axes.lines if len(line.get_xdata()) == 5]
    assert len(marks) == len(labels[1:]) * len(view.networks)
