"""The table of networks outside MXNet, and the picture of a run that goes on in PyTorch."""

import json

import pytest
from matplotlib.figure import Figure

from study.experiments.ports import NETWORKS, Ports, draw_continued

CONTINUED = {
    "before": [[2.0, 65536.0], [1.5, 32768.0]],
    "mxnet": [[1.0, 32768.0], [0.5, 32768.0]],
    "torch": [[1.01, 32768.0], [0.7, 32768.0]],
}


@pytest.fixture
def ports(tmp_path):
    errors = {name: {"part": 1e-7, "torch": 2e-6, "onnxruntime": 3e-6} for name in NETWORKS}
    errors["alexnet"]["torch"], errors["vgg16"]["openvino"] = 8e-6, 4e-6
    (tmp_path / "ports.json").write_text(json.dumps(errors))
    (tmp_path / "continued.json").write_text(json.dumps(CONTINUED))
    return Ports(tmp_path)


def test_a_row_has_the_largest_errors_and_how_many_networks_have_one(ports):
    first, second, *_ = ports.table()
    assert first == ["AlexNet, VGG", "5", "1e-7", "8e-6", "3e-6", "4e-6 (1 of 5)"]
    assert second[-1] == "-"
    assert sum(int(row[1]) for row in ports.table()) == len(NETWORKS) == 65
    assert ports.largest == 8e-6


def test_both_runs_begin_where_the_first_one_ended(ports):
    assert ports.first_difference() == pytest.approx(0.01)
    assert ports.loss("torch", 1) == 0.7
    figure = Figure()
    draw_continued(figure, CONTINUED)
    before, in_mxnet, in_pytorch, _ = figure.axes[0].lines
    assert before.get_xdata()[-1] == 2
    assert list(in_mxnet.get_xdata()) == list(in_pytorch.get_xdata()) == [3, 4]
