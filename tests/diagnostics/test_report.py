"""The page about a network: complete, self-contained, and made by the command for runs."""

from __future__ import annotations

import base64
import html
import html.parser
import re
from pathlib import Path

import mpgluon
from mpgluon_tools import commands
from mpgluon_tools.report import diagnose

import mxnet as mx
import pytest
from diagnostics_helpers import Times, make_batch, make_net
from helpers import initialized
from mxnet import gluon
from mxnet.gluon import nn

from recipes.training import TrainingConfig, train

TITLES = [
    *("Verdict", "Gradients at the recommended loss scale", "What was looked at"),
    *("Which part of float16's range is used", "What float16 would lose"),
    *("float16 against FP32, layer by layer", "Operators by format"),
    *("Shapes for Tensor Cores", "This machine"),
]


class Outline(html.parser.HTMLParser):
    """The parts that a browser reads: headings, cells, pictures, and every address."""

    def __init__(self, text):
        super().__init__()
        self.headings, self.cells, self.pictures, self.addresses = [], [], [], []
        self._stack, self._text = [], ""
        self.feed(text)
        assert self._stack == []  # every element is closed

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.addresses += [values[name] for name in ("src", "href") if name in values]
        if tag == "img":
            assert values["alt"]
            self.pictures.append(base64.b64decode(values["src"].split(",")[1]))
        if tag not in ("img", "input", "meta"):
            self._stack.append(tag)
            self._text = ""

    def handle_data(self, data):
        self._text += data

    def handle_endtag(self, tag):
        assert self._stack.pop() == tag
        if tag == "h2":
            self.headings.append(self._text)
        elif tag in ("td", "th"):
            self.cells.append(self._text)


@pytest.fixture(scope="module")
def page():
    net = make_net(Times(2.0**20, "large_"), Times(2.0**-20, "small_"))
    before = [p.data().asnumpy().tobytes() for p in net.collect_params().values()]
    page = diagnose(net, make_batch(), title="<A network> & more", about=["Planted."])
    assert [p.data().asnumpy().tobytes() for p in net.collect_params().values()] == before
    return page


def test_a_page_has_every_section_and_names_the_planted_layer(page):
    assert [section.title for section in page.sections] == TITLES
    text = str(page)
    for title in TITLES:
        assert f"== {title} ==" in text
    assert page.sections[4].tables[0].rows[0][:2] == ("large", "output")
    assert "classes 5 -> 8" in text
    assert "relative error of the network's result: inf" in text.lower()
    assert "float16 is safe for this network; loss scale 2^" in text
    assert "mpgluon.cast_block(net, keep_fp32=" in text
    assert re.search(r"Suggestion: keep .*large.* in FP32", text)


def test_the_file_is_complete_html_that_needs_no_other_file(page, tmp_path):
    page.write(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    outline = Outline(text)
    assert outline.headings == TITLES
    assert "<h1>&lt;A network&gt; &amp; more</h1>" in text
    assert len(outline.pictures) == 3
    assert all(picture.startswith(b"\x89PNG") for picture in outline.pictures)
    assert all(address.startswith("data:image/png;base64,") for address in outline.addresses)
    assert page.sections[0].lines in html.unescape(text)
    assert "net_dense0" in outline.cells


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [lambda: nn.BatchNorm(in_channels=3), lambda: nn.Activation("relu")]
)
def test_a_network_without_matrices_has_no_picture_of_them(make, tmp_path):
    net = initialized(make())
    images, labels = mx.nd.random.normal(shape=(64, 3)), mx.nd.zeros((64, 3))
    page = diagnose(net, mpgluon.diagnostics.Batch(images, labels, gluon.loss.L2Loss()), title="t")
    (pictures,) = [section.pictures for section in page.sections if section.pictures]
    assert len(pictures) == 2
    page.write(tmp_path / "report.html")


@pytest.fixture
def diagnose_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        options = ("--output", str(tmp_path / "page.html"))
        return commands.main(["diagnose", *arguments, *options])

    return run


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    config = TrainingConfig(
        **{"model": "cifar_resnet20_v1", "dtype": "float16", "dataset": "shapes", "epochs": 1},
        **{"images_per_class": 3, "train_per_class": 1, "image_size": 16, "batch_size": 10},
        **{"data_dir": str(folder), "output_dir": str(folder / "out"), "workers": 0},
    )
    train(config)
    return folder / "out"


def test_a_run_is_looked_at_with_its_weights_on_images_of_its_own(
    diagnose_run, run_folder, tmp_path, capsys
):
    assert diagnose_run(str(run_folder), "--batch-size", "4") == 0
    output = capsys.readouterr().out
    assert "cifar_resnet20_v1 after step 1 of" in output
    assert "4 training images of shapes, 16 pixels." in output
    assert output.endswith(f"written to {tmp_path / 'page.html'}\n")
    assert len(Outline((tmp_path / "page.html").read_text()).pictures) == 3


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("mpgluon:no_such_function", "no_such_function"),
        ("no_such_run.npz", "there is no checkpoint no_such_run.npz"),
        (".", "there is no run . (a folder with checkpoints)"),
    ],
)
def test_what_cannot_be_looked_at_is_said_in_a_line(diagnose_run, capsys, network, message):
    assert diagnose_run(network) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not Path("page.html").exists()
    assert mpgluon.__version__
