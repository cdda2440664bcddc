"""The log of tuning: each measure has the settings of those above it, and states its gain."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.data.shapes import render_shapes
from study.benchmarks.cases import CaseOptions
from study.benchmarks.contestant import Contestant, Process
from study.benchmarks.figures import draw_tuning
from study.benchmarks.race import CaseResult, Result
from study.benchmarks.tuning import MEASURES, gains, tuning, tuning_table

SETTINGS = {"model": "alexnet", "batch_size": 4, "image_size": 64, "images": "rendered"}


def result(name: str, *seconds: float) -> Result:
    return Result(name, seconds, None, None, 0.0, {"images": 12})


def log() -> CaseResult:
    return CaseResult(
        "tuning",
        "a log",
        SETTINGS,
        "plain, float32",
        [
            result("plain, float32", 4.0, 3.0, 4.0),
            result("faster", 2.0, 1.5, 2.0),
            result("as fast", 1.9, 1.6, 2.0),
            result("float16, slower", 3.8, 3.2, 4.0),
        ],
    )


def test_each_measure_has_the_settings_of_those_above_it():
    (case,) = tuning(CaseOptions(workers=3))
    assert case.settings["model"] == "alexnet"
    by_name = {one.name: one for one in case.contestants}
    assert list(by_name) == list(MEASURES)
    plain, *_, native, last = case.contestants
    assert (plain.threads, plain.environment) == (1, {})
    assert (plain.options["hybridize"], plain.options["workers"]) == (None, 0)
    assert (last.threads, last.options["dtype"]) == (None, "bfloat16")
    bound = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
    assert native.environment == last.environment == bound
    assert by_name["float16, MXNet's operators"].environment == {**bound, "MPGLUON_NATIVE": "0"}
    from_workers = [one.options["workers"] for one in case.contestants]
    assert from_workers == sorted(from_workers)
    assert set(from_workers) == {0, 3}
    different = [
        sum(
            getattr(one, field) != getattr(before, field)
            for field in ("options", "threads", "environment")
        )
        for before, one in zip(case.contestants, case.contestants[1:])
    ]
    assert min(different) == 1


def test_a_case_is_made_for_each_network_and_batch_size_of_a_list():
    cases = tuning(CaseOptions(models=["a", "b"], batch_sizes=[1, 2], image_size=32))
    found = [(one.settings["model"], one.settings["batch_size"]) for one in cases]
    assert found == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert {one.settings["image_size"] for one in cases} == {32}


def test_a_gain_is_the_ratio_to_the_row_above_and_nothing_if_its_quartiles_include_1():
    found = gains(log())
    assert [one.images_per_second.median for one in found] == [3.0, 6.0, 12 / 1.9, 12 / 3.8]
    assert [one.words for one in found] == ["-", "2.00 times", "nothing", "0.50 times, slower"]
    rows = tuning_table(log()).rows
    assert rows[1] == ["faster", "6.0", "6.0 to 7.0", "2.00 times", "2.00"]


def test_the_picture_has_each_measure_with_its_speed_in_the_colour_of_its_format():
    from matplotlib.figure import Figure

    (axes,) = draw_tuning(Figure(layout="constrained"), [log()])
    assert [one.get_text() for one in axes.get_yticklabels()] == [one.name for one in gains(log())]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx(
        [3.0, 6.0, 6.316, 3.158], 1e-3
    )
    colors = [bar.get_facecolor() for bar in axes.patches]
    assert colors[0] == colors[1] == colors[2] != colors[3]
    words = [text.get_text() for text in axes.texts]
    assert {"3.00", "6.00", "2.00", "nothing", "0.50"} < set(words)


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["plain Gluon, float32, 1 thread", "float16, native operators"])
def test_a_pass_trains_on_files_in_a_process_with_the_settings_of_its_measure(measure, tmp_path):
    images = str(render_shapes(tmp_path, images_per_class=2))
    options = CaseOptions(
        models=["cifar_resnet20_v1"], batch_sizes=[4], image_size=32, images=images, workers=1
    )
    (case,) = tuning(options)
    (one,) = (one for one in case.contestants if one.name == measure)
    with Process(one, threads=1, limit_s=200) as process:
        process.wait_until_ready()
        assert process.facts["images"] == 16
        assert 0 < process.run()["seconds"] < 200


def test_too_few_files_for_a_pass_are_refused(tmp_path):
    from study.benchmarks.loading import file_loader

    images = str(render_shapes(tmp_path, images_per_class=2, classes=10))
    with pytest.raises(ValueError, match="3 batches of 8 need 24 images, and there are 20"):
        file_loader(images, batch_size=8, image_size=32, workers=0, batches=3)


def test_a_contestant_has_variables_of_its_own():
    tiny = str(Path(__file__).with_name("tiny_contestants.py"))
    given = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    with Process(
        Contestant("own", f"{tiny}:tells", environment=given), threads=1, limit_s=60
    ) as process:
        process.wait_until_ready()
        assert given.items() <= process.facts["environment"].items()
