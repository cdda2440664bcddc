"""The page's words on parity follow from the records: table, verdict, pictures, what is missing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import parity, parity_figures, step_times
from experiments.experiment import Outcome
from experiments.parity_page import section
from experiments.parity_results import Parity
from experiments.readme_block import readme_block

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
        for one in parity.experiments():
            _, _, name, seed = one.name.split("/")
            right = 150 + SPREAD[int(seed[-1])] + shifts.get(name, 0)
            right += noise * NOISE[int(seed[-1])] * (name != parity.BASE)
            made[one.name] = record_of(one, outcome_of(right))
        for one in step_times.experiments():
            # The control has no times of its own.
            values = {f"{name}/seconds": 0.5 + n for n, name in enumerate(parity.FORMATS)}
            values.update(
                {f"{name}/relative": 1.0 + 2 * n for n, name in enumerate(parity.FORMATS)}
            )
            made[one.name] = record_of(one, Outcome({}, {}, values))
        return made

    return make


def rows_with(text: str, words: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.startswith("|") and words in line
    ]


def test_a_row_has_mean_and_spread_steps_times_and_its_command(records):
    (row,) = rows_with(section(records(float16=10)).text, "run parity/resnet50_v2/float16`")
    # 158, 160, 162 of 200: 79, 80 and 81 points.
    assert row == [
        "resnet50_v2, 64 px, 0.001, 12 epochs", "float16", "80.0 ± 1.0", "0.250 ± 0.000", "1", "3",
        "4", "1.500", "3.00", "`python scripts/evidence.py run parity/resnet50_v2/float16`",
    ]  # fmt: skip


def test_formats_that_do_not_differ_are_said_not_to(records):
    text = section(records(noise=1)).text
    assert "**No format differs from float32 by more than chance**" in text
    assert "float32 alone varies between seeds with a standard deviation of 1.00 points" in text
    assert "One test image is worth 0.5 points (1 of 200)" in text
    assert "The 138 runs took 69.0 hours" in text
    assert "Not run yet" not in text


def test_a_format_that_differs_is_named_with_its_difference(records):
    found = records(noise=1, bfloat16=-8)
    text = section(found).text
    assert "No format differs" not in text
    assert "**bfloat16 differs from float32 by -4." in text
    assert "bfloat16 differs from it by more than chance" in readme_block(found)
    parity_of = Parity(found)
    assert parity_of.corrected["bfloat16"] < 0.05 < parity_of.corrected["float16"]
    (row,) = [row for row in rows_with(text, "bfloat16") if row[0] == "bfloat16"]
    assert row[1:3] == ["30", f"{parity_of.pooled['bfloat16'].mean:+.2f}"]


def test_differences_are_paired_by_network_and_seed(records):
    found = records()
    lost = "parity/vgg16_bn/float32/seed-1"
    del found[lost]
    # Every format has the same right answers as FP32, seed by seed, and not on the average.
    comparison = Parity(found).pooled["float16"]
    assert (comparison.pairs, comparison.mean, comparison.spread) == (29, 0, 0)
    assert Parity(found).missing == [lost]


def test_equal_runs_of_the_two_ways_to_float16_are_said_to_be_equal(records):
    assert "to the last bit" in section(records()).text
    # As many right answers, and another loss in one of 30 runs.
    found = records()
    name = "parity/googlenet/mixed_float16/seed-1"
    outcome = found[name].outcome
    curves = {**outcome.curves, "loss": [2.0, 1.0, 0.5]}
    found[name] = replace(found[name], outcome=replace(outcome, curves=curves))
    assert "to the last bit" not in section(found).text
    only_one_way = {name: one for name, one in records().items() if "/mixed_float16/" not in name}
    assert "to the last bit" not in section(only_one_way).text


def test_a_seed_counts_with_its_mean_over_all_networks_or_not_at_all(records):
    found = records(noise=1)
    by_seed = Parity(found).by_seed("bfloat16")
    # NOISE, in points of half a percent each.
    assert (by_seed.pairs, by_seed.mean) == (5, 0)
    assert by_seed.spread == pytest.approx(np.std([-1, 0, 1, -0.5, 0.5], ddof=1))
    text = " ".join(section(found).text.split())
    reach = f"{by_seed.upper:.2f}"
    assert f"each of 5 seeds, the interval is float16's -{reach} to +{reach} and bfloat16's" in text
    del found["parity/vgg16_bn/bfloat16/seed-1"]
    assert Parity(found).by_seed("bfloat16").pairs == 4


def test_equal_rows_are_one_comparison(records):
    found = Parity(records(noise=1, bfloat16=-1))
    assert found.tests == 3
    assert found.corrected["mixed_float16"] == found.corrected["float16"]
    smallest = found.pooled["bfloat16"].t_test
    assert found.corrected["bfloat16"] == pytest.approx(3 * smallest)
    assert "for 3 comparisons after Holm" in section(found.records).text
    assert "corrected for 3 comparisons" in section(records(noise=1)).text


@pytest.mark.parametrize(
    ("shift", "words"),
    [
        (0, "differs from `float16` by +0.00 points (+0.00 to +0.00; p = 1), no more than chance"),
        (4, "more than chance, so they cost accuracy in runs as short as these"),
        (-4, "more than chance, and not in the direction of a loss"),
    ],
)
def test_the_control_says_what_skipped_steps_cost(shift, words, records):
    text = " ".join(section(records(noise=1, float16=-2, static_float16=shift - 2)).text.split())
    assert words in text
    assert "costs runs as short as these 33.3 % of their steps" in text
    assert "the seeds 3 and 4, were added after" in text
    assert "had left `float16` at -1.00 points" in text  # 2 of 200


def test_what_is_missing_is_named_by_the_shortest_name(records):
    found = {
        name: record
        for name, record in records().items()
        if not name.startswith(("parity/alexnet", "parity/googlenet/float16", "step_times"))
    }
    text = section(found).text
    assert "Not run yet: parity/alexnet, parity/googlenet/float16." in text
    assert rows_with(text, "run parity/vgg16_bn/float16`")[0][-3:-1] == ["-", "-"]  # no times
    # Four formats of one network and one of another, five seeds each, and a control of three.
    assert readme_block(found).endswith(
        "28 of 138 runs are not done yet; docs/results.md names them."
    )


def test_without_records_the_page_says_so():
    found = section({})
    everything = ", ".join(f"parity/{network.name}" for network in parity.NETWORKS)
    assert found.text.endswith(f"Not run yet: {everything}.")
    assert not found.figures
    assert readme_block({}) == "138 of 138 runs are not done yet; docs/results.md names them."


@pytest.mark.parametrize("seeds", [1, 2])
def test_one_seed_or_two_make_a_page_too(seeds, records):
    beyond = tuple(f"seed-{seed}" for seed in parity.SEEDS[seeds:])
    found = {name: record for name, record in records().items() if not name.endswith(beyond)}
    text = section(found).text
    assert ("(one seed)" in text) == (seeds == 1)
    assert "nan" not in text
    (row,) = [row for row in rows_with(text, "float16") if row[0] == "float16"]
    assert row[1] == str(6 * seeds)


def test_one_pair_alone_is_no_evidence(records):
    names = [f"parity/alexnet/{name}/seed-0" for name in ("float32", "float16")]
    text = section({name: records()[name] for name in names}).text
    assert "A single pair says nothing of chance." in text
    assert "nan" not in text
    assert "inf" not in text


def test_a_loss_that_is_not_finite_is_said(records, record_of):
    found = records()
    (one,) = (one for one in parity.experiments() if one.name == "parity/alexnet/float16/seed-1")
    lost = outcome_of(20)
    found[one.name] = record_of(
        one, Outcome({**lost.figures, "train_loss": None}, CURVES, lost.times)
    )
    (row,) = rows_with(section(found).text, "run parity/alexnet/float16`")
    assert row[3] == "not finite in 1 of 5"


def test_the_readme_has_one_networks_rows_and_a_sentence_on_all(records):
    text = readme_block(records())
    assert [row[0] for row in rows_with(text, " of 3 ")] == list(parity.FORMATS)
    (row,) = rows_with(text, "mixed_float16")
    assert row == ["mixed_float16", "75.0 ± 1.0", "1 of 3", "5.00"]
    assert "Over 6 networks and 5 seeds (30 pairs, taken as independent)" in text
    assert "float16 +0.00 (+0.00 to +0.00)" in text


def test_pictures_show_every_run(records):
    found = section(records())
    assert list(found.figures) == ["parity-accuracy", "parity-curves", "parity-loss-scale"]
    for name in found.figures:
        assert f"(results/{name}.png)" in found.text
    figure = Figure()
    found.figures["parity-accuracy"](figure)
    (axes,) = figure.axes
    marks = [line for line in axes.lines if line.get_marker() not in ("None", None)]
    assert sum(len(line.get_ydata()) for line in marks) == 138
    assert {line.get_marker() for line in marks} == {"s", "o", "D", "^", "v"}
    assert axes.get_ylabel() == "test accuracy (points)"
    figure = Figure()
    above, below = parity_figures.draw_curves(figure, Parity(records()), "alexnet")
    assert [len(axes.lines) for axes in (above, below)] == [4, 4]
    assert list(below.lines[0].get_xdata()) == [1.5, 3]
    figure = Figure()
    found.figures["parity-loss-scale"](figure)
    for axes in figure.axes:
        assert len(axes.lines) == 5
        assert list(axes.lines[0].get_xdata()) == [1, 3, 4]
        assert list(axes.lines[0].get_ydata()) == [8, 4, 4]
