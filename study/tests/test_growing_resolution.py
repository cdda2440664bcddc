"""The pages' sentences on the GAN whose images grow, from made-up records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from study.experiments.experiment import Outcome
from study.experiments.growing_resolution import GROUP, RUNS
from study.experiments.players import NAMES

TITLE = "A GAN whose images grow"
PIXELS = (8, 16, 32, 64)
SKIPPED = {"float32": 0, "float16": 5, "static-512": 101, "static-16": 1}


@pytest.fixture
def records(record_of):
    """Return records of gradients that shrink from resolution to resolution, and of scales too."""
    made = {}
    for one in GROUP.experiments:
        run = one.name.split("/")[1]
        figures = {"steps": 800}
        for name in NAMES:
            figures[f"{name}_is_finite"] = True
            for stage, pixels in enumerate(PIXELS):
                figures |= {
                    f"{name}_{pixels}_median_exponent": -4 - 2 * stage,
                    f"{name}_{pixels}_lost": 1e-5 * 4**stage,
                    f"{name}_{pixels}_lost_at_scale": 2e-6 * stage,
                    f"{name}_{pixels}_usual_scale": 512.0 / 2**stage,
                    f"{name}_{pixels}_skipped_steps": min(SKIPPED[run] * (stage + 1), 200),
                    f"{name}_{pixels}_loss": 1.5,
                }
        figures["generator_8_usual_scale"] = 1024.0
        if run == "static-512":
            figures |= {"generator_64_loss": 3e-7, "generator_64_lost": 0.5}
        curves = {f"{name}_scale": [(1, 65536.0), (90, 16.0), (99, 64.0)] for name in NAMES}
        made[one.name] = record_of(one, Outcome(figures, curves))
    return made


def changed(record, **figures):
    outcome = record.outcome
    return replace(record, outcome=replace(outcome, figures={**outcome.figures, **figures}))


def cells_of(page, first):
    """Return the cells of the row that begins with ``first``."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    (found,) = [row for row in rows if row[0] == first]
    return found


def test_the_page_says_how_gradients_and_scales_shift_and_what_a_static_scale_skips(
    records, page_of
):
    page = page_of(records, TITLE, "docs/results.md")
    assert "From 8 to 64 pixels the median of the discriminator's activation gradients" in page
    assert "goes from 2^-4 to 2^-10, and its usual loss scale from 512 to 64." in page
    assert (
        "makes it skip 101 of 200 steps there and all at higher resolutions: it learns nothing "
        "more, the generator's loss falls to 3e-07," in page
    )
    assert "the discriminator skips 4 at 64 pixels, with the dynamic one 20." in page
    expected = ["2^-6, 2^-6", "40, 40", "256, 256", "10, 10", "200, 200", "2, 2"]
    assert cells_of(page, "16 px")[1:] == expected


@pytest.mark.parametrize(
    ("run", "figures"),
    [
        ("float32", {"discriminator_64_median_exponent": -4}),
        ("float32", {"discriminator_32_lost": 0.5}),
        ("float16", {"generator_64_usual_scale": 1024.0}),
        ("float16", {"discriminator_8_usual_scale": 256.0}),  # 512 does not fit the first one
        ("static-512", {"discriminator_32_skipped_steps": 199}),
        ("static-512", {"generator_64_lost": 1e-6}),
        ("static-16", {"discriminator_64_skipped_steps": 100}),
    ],
)
def test_records_that_do_not_show_it_do_not_support_the_conclusion(
    records, supported, run, figures
):
    name = f"growing_resolution/{run}"
    words = "so the loss scale has to fall: a dynamic one does, a static one does not"
    assert supported(records, words)
    assert not supported({**records, name: changed(records[name], **figures)}, words)


def test_the_details_have_a_row_for_each_run(records, page_of):
    cells = cells_of(page_of(records, TITLE), "static-512")
    assert cells[1:5] == ["101, 101", "200, 200", "200, 200", "200, 200"]
    assert cells[5:8] == ["6, 6", "3.00e-07, 1.50", "yes"]


def test_runs_differ_in_format_and_scale_alone():
    configs = [dict(one.config) for one in GROUP.experiments]
    for config, name in zip(configs, RUNS):
        static = float(name.split("-")[1]) if "-" in name else None
        assert config.pop("static_scale") == static
        config.pop("dtype")
    assert all(config == configs[0] for config in configs)
