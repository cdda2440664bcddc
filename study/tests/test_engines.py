"""The fine-tuned network in four engines."""

from __future__ import annotations

from mpgluon.errors import DataError

import pytest
from matplotlib.figure import Figure

from study.experiments import engines
from study.experiments.experiment import Outcome, Place

(RUN,) = engines.GROUP.experiments
NAMES = list(engines.ENGINES)


def outcome():
    """Return an outcome: each engine is faster than the one before, and the last differs."""
    figures = {"images": 1000}
    times = {"threads": 2}
    for number, name in enumerate(NAMES, 1):
        figures[f"{name}/correct"] = 900 + number
        figures[f"{name}/same"] = 1000 - (number == len(NAMES))
        for batch in (1, 8):
            times[f"{name}/{batch}/seconds"] = batch / 100 / number
            times[f"{name}/{batch}/relative"] = 1 / number
            times[f"{name}/{batch}/peak_memory_mib"] = 500.4 - number
    return Outcome(figures, times=times)


def test_without_openvino_a_run_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "_OPENVINO", tmp_path / "python")
    with pytest.raises(DataError, match="make test WITH=peers"):
        RUN.run(Place(tmp_path, tmp_path / "engines" / "network"))


def test_each_engine_has_its_answers_times_and_memory(record_of):
    records = {RUN.name: record_of(RUN, outcome())}
    view = engines.GROUP.view(records)
    rows = view.table()
    assert [row[0] for row in rows] == list(engines.ENGINES.values())
    assert rows[0] == [
        "MXNet, FP32",
        "90.1",
        "1,000 of 1,000",
        "10.0",
        "80.0",
        "1.00",
        "1.00",
        "499",
    ]
    assert rows[-1][1:4] == ["90.7", "999 of 1,000", "1.4"]
    assert view.fewest_same == 0.999
    assert view.fastest(8) == "OpenVINO, BF16"
    assert engines.GROUP.view({}).table() == []
    figure = Figure(layout="constrained")
    engines.GROUP.pictures["engines"](figure, records)
    (axes,) = figure.axes
    assert [len(line.get_xdata()) for line in axes.lines[1:]] == [len(NAMES)] * 2
