"""The page on parity follows from the records: tables, conclusions, pictures, what is missing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import parity, step_times
from experiments.experiment import Outcome
from experiments.parity import Parity
from experiments.statistics import compare

TITLE = "The same accuracy in every format"

SPREAD = {0: -2, 1: -2, 2: 0, 3: 2, 4: 2}  # right answers more or less, by seed
NOISE = {0: -2, 1: 0, 2: 2, 3: -1, 4: 1}  # the same; none on the average, of the first ones too
CURVES = {"loss": [2.0, 1.0, None], "loss_scale": [[1, 8.0], [3, 4.0]], "test_accuracy": [0.5, 0.7]}


def outcome_of(right: int) -> Outcome:
    figures = {
        "test_accuracy": right / 200, "test_images": 200, "train_loss": 0.25, "steps": 3,
        "skipped_steps": 1, "final_loss_scale": 4.0, "steps_per_point": 1,
    }  # fmt: skip
    return Outcome(figures, CURVES, {"training_seconds": 1800.0})


@pytest.fixture
def records(record_of):
    """Return what makes records in which formats differ from FP32 by so many right answers."""

    def make(noise: int = 0, **shifts: int):
        made = {}
        for one in parity.GROUP.experiments:
            _, _, name, seed = one.name.split("/")
            right = 150 + SPREAD[int(seed[-1])] + shifts.get(name, 0)
            right += noise * NOISE[int(seed[-1])] * (name != parity.BASE)
            made[one.name] = record_of(one, outcome_of(right))
        for one in step_times.GROUP.experiments:
            # The control has no times of its own.
            values = {
                f"{name}/{what}": first + n
                for n, name in enumerate(parity.FORMATS)
                for what, first in (
                    ("seconds", 0.5), ("relative", 1.0), ("relative_lower", 1.0),
                    ("relative_upper", 1.0),
                )
            }  # fmt: skip
            made[one.name] = record_of(one, Outcome({}, {}, values))
        return made

    return make


def rows_with(text: str, words: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.startswith("|") and words in line
    ]


def test_a_row_has_mean_and_spread_steps_times_and_its_command(records, page_of):
    text = page_of(records(float16=10), TITLE)
    (row,) = rows_with(text, "run parity/resnet50_v2/float16`")
    # 158, 160, 162 of 200: 79, 80 and 81 points.
    assert row == [
        "resnet50_v2, 64 px, 0.001, 12 epochs", "float16", "80.0 ± 1.0", "0.250 ± 0.000", "1", "3",
        "4", "1.500", "2.00", "`python scripts/evidence.py run parity/resnet50_v2/float16`",
    ]  # fmt: skip


def test_formats_that_do_not_differ_are_said_not_to(records, page_of):
    text = page_of(records(noise=1), TITLE)
    assert "**No format differs from float32 by more than chance**" in text
    assert "float32 alone varies between seeds with a standard deviation of 1.00 points" in text
    assert "One test image is worth 0.5 points (1 of 200)" in text
    assert "The 138 runs took 69.0 hours" in text
    assert "Not run yet" not in text


def test_the_conclusion_is_withdrawn_if_a_format_differs(records, page_of):
    found = records(noise=1, bfloat16=-8)
    text = page_of(found, TITLE)
    assert "No format differs" not in text
    assert "No format differs" not in page_of(found, template="readme")
    parity_of = Parity(found)
    assert parity_of.different == ["bfloat16"]
    assert parity_of.corrected["bfloat16"] < 0.05 < parity_of.corrected["float16"]
    (row,) = [row for row in rows_with(text, "bfloat16") if row[0] == "bfloat16"]
    assert row[1:3] == ["30", f"{parity_of.pooled['bfloat16'].mean:+.2f}"]


def test_differences_are_paired_by_network_and_seed(records):
    found = records()
    lost = "parity/vgg16_bn/float32/seed-1"
    del found[lost]
    # Every format has the same right answers as FP32, seed by seed, and not on the average.
    comparison = compare(Parity(found).differences("float16"))
    assert (comparison.pairs, comparison.mean, comparison.spread) == (29, 0, 0)


def test_equal_runs_of_the_two_ways_to_float16_are_said_to_be_equal(records, page_of):
    assert "to the last bit" in page_of(records())
    # As many right answers, and another loss in one of 30 runs.
    found = records()
    name = "parity/googlenet/mixed_float16/seed-1"
    outcome = found[name].outcome
    curves = {**outcome.curves, "loss": [2.0, 1.0, 0.5]}
    found[name] = replace(found[name], outcome=replace(outcome, curves=curves))
    assert "to the last bit" not in page_of(found)


def test_a_seed_counts_with_its_mean_over_all_networks(records, page_of):
    found = records(noise=1)
    by_seed = Parity(found).by_seed("bfloat16")
    # NOISE, in points of half a percent each.
    assert (by_seed.pairs, by_seed.mean) == (5, 0)
    assert by_seed.spread == pytest.approx(np.std([-1, 0, 1, -0.5, 0.5], ddof=1))
    reach = f"{by_seed.upper:.2f}"
    words = f"each of 5 seeds, the interval is -{reach} to +{reach} for float16"
    assert words in page_of(found)


def test_equal_rows_are_one_comparison(records, page_of):
    found = Parity(records(noise=1, bfloat16=-1))
    assert found.tests == 3
    assert found.corrected["mixed_float16"] == found.corrected["float16"]
    smallest = found.pooled["bfloat16"].t_test
    assert found.corrected["bfloat16"] == pytest.approx(3 * smallest)
    assert "corrected for 3 comparisons after Holm" in page_of(records(noise=1), TITLE)


@pytest.mark.parametrize(
    ("shift", "skipped", "words"),
    [
        (0, 0, "differs from `float16` by +0.00 points (+0.00 to +0.00; p = 1), no more than"),
        (4, 0, "no longer support the conclusion"),
        (0, 1, "no longer support the conclusion"),
    ],
)
def test_the_control_says_what_skipped_steps_cost(shift, skipped, words, records, page_of):
    found = records(noise=1, float16=-2, static_float16=shift - 2)
    for name, one in found.items():
        if "/static_float16/" in name:
            figures = {**one.outcome.figures, "skipped_steps": skipped}
            found[name] = replace(one, outcome=replace(one.outcome, figures=figures))
    text = page_of(found, TITLE).split("**Do skipped steps cost accuracy?**")[1]
    assert words in text
    assert "In runs as short as these, 33.3 % of the steps are skipped" in text
    assert "the seeds 3 and 4, were added after" in text
    assert "had left `float16` at -1.00 points" in text  # 2 of 200


def test_what_is_missing_is_named_by_the_shortest_name(records, page_of):
    found = {
        name: record
        for name, record in records().items()
        if not name.startswith(("parity/alexnet", "parity/googlenet/float16", "step_times"))
    }
    text = page_of(found, TITLE)
    assert "Not run yet: parity/alexnet, parity/googlenet/float16." in text
    assert "more than chance" not in text
    assert rows_with(text, "run parity/vgg16_bn/float16`")[0][-3:-1] == ["-", "-"]  # no times


def test_a_loss_that_is_not_finite_is_said(records, page_of):
    found = records()
    one = found["parity/alexnet/float16/seed-1"]
    figures = {**one.outcome.figures, "train_loss": None}
    found[one.name] = replace(one, outcome=replace(one.outcome, figures=figures))
    (row,) = rows_with(page_of(found, TITLE), "run parity/alexnet/float16`")
    assert row[3] == "not finite in 1 of 5"


def test_pictures_show_every_run(records):
    drawn = {}
    for name, draw in parity.GROUP.pictures.items():
        drawn[name] = Figure()
        draw(drawn[name], records())
    (axes,) = drawn["parity-accuracy"].axes
    marks = [line for line in axes.lines if line.get_marker() not in ("None", None)]
    assert sum(len(line.get_ydata()) for line in marks) == 138
    assert {line.get_marker() for line in marks} == {"s", "o", "D", "^", "v"}
    assert axes.get_ylabel() == "test accuracy (points)"
    above, below = drawn["parity-curves"].axes
    assert [len(axes.lines) for axes in (above, below)] == [4, 4]
    assert list(below.lines[0].get_xdata()) == [1.5, 3]
    for axes in drawn["parity-loss-scale"].axes:
        assert len(axes.lines) == 5
        assert list(axes.lines[0].get_xdata()) == [1, 3, 4]
        assert list(axes.lines[0].get_ydata()) == [8, 4, 4]
