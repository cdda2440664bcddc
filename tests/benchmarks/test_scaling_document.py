"""docs/scaling.md says what the model says."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from benchmarks.scaling import (
    A100,
    ETHERNETS,
    HDR,
    NDR,
    NVLINK,
    Workload,
    clusters_of,
    predict,
)
from benchmarks.scaling_document import (
    document_tables,
    draw_efficiency,
    fill_tables,
    save_efficiency,
)
from mpgluon.tables import Table

DOCUMENT = Path(__file__).parents[2] / "docs" / "scaling.md"
UPDATE = "python scripts/plan_scaling.py --document docs/scaling.md"


def test_the_documents_tables_are_those_that_the_model_makes():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert fill_tables(text, document_tables()) == text, f"run {UPDATE}"


def test_the_documents_sources_are_those_of_the_models_numbers():
    # What is typed into prose, against what the model computes with.
    text = DOCUMENT.read_text(encoding="utf-8")
    assert f"| {NVLINK.gbit_per_s / 8:g} GB/s one way" in text
    assert f"| {HDR.gbit_per_s} and {NDR.gbit_per_s} Gbit/s" in text
    assert " and ".join(str(link.gbit_per_s) for link in ETHERNETS) + " Gbit Ethernet" in text
    assert f"{NVLINK.latency_us} us over NVLink, {HDR.latency_us} us over a network" in text
    speeds = {dtype: rate / 3 / 4.089e9 for dtype, rate in A100.multiply_adds_per_s.items()}
    assert f"{speeds['float16']:,.0f} images/s in float16, {speeds['float32']:,.0f} with" in text


def test_tables_go_where_their_names_are_and_may_be_replaced():
    text = "a\n<!-- table: one -->\n<!-- end of table -->\nb\n"
    first = fill_tables(text, {"one": Table(["x"], [["1"]])})
    assert first.startswith("a\n<!-- table: one -->\n|  x |\n")
    second = fill_tables(first, {"one": Table(["y"], [["2"]])})
    assert "|  y |" in second
    assert "|  x |" not in second
    assert second.endswith("<!-- end of table -->\nb\n")


@pytest.mark.parametrize("text", ["", "<!-- table: two -->\n<!-- end of table -->"])
def test_a_document_without_the_right_places_is_refused(text):
    with pytest.raises(ValueError, match=r"has places for (no tables|two), and the tables are one"):
        fill_tables(text, {"one": Table(["x"], [["1"]])})


def test_the_figure_is_drawn_with_labels_and_units(tmp_path):
    save_efficiency(tmp_path / "figure.png")
    with Image.open(tmp_path / "figure.png") as image:
        assert image.width == 1320


def test_lines_of_a_figure_differ_without_colour():
    work = Workload("test", 10**7, 10**9)
    clusters = clusters_of([64], [*ETHERNETS, HDR])
    axes = draw_efficiency(Figure().add_subplot(), work, clusters)
    lines = [line for line in axes.get_lines() if line.get_marker() != "None"]
    looks = {(line.get_linestyle(), line.get_marker()) for line in lines}
    assert len(looks) == len(lines) == 3
    assert axes.get_xlabel() == "images per GPU and step"
    assert axes.get_ylabel() == "efficiency (%)"
    at_32 = dict(zip(lines[0].get_xdata(), lines[0].get_ydata()))[32]
    assert at_32 == 100 * predict(work, clusters[0]).efficiency
