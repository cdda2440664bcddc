"""The page about a network: complete, self-contained, and made by the script for every source."""

from __future__ import annotations

import base64
import html
import html.parser
import re
from pathlib import Path

import mpgluon
from mpgluon.tools.report import diagnose

import pytest
from diagnostics_helpers import Times, make_batch, make_net
from helpers import module_from

from recipes.training import TrainingConfig, train

ROOT = Path(__file__).resolve().parents[2]
TITLES = [
    *("Verdict", "What each loss scale would lose", "What was looked at"),
    *("Which part of float16's range is used", "What float16 would lose"),
    *("float16 against FP32, layer by layer", "Shapes for Tensor Cores", "This machine"),
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
    losses = page.sections[4].tables[0]
    assert losses.rows[0][:2] == ("large", "output")
    assert "classes 5 -> 8" in text
    assert "relative error of the network's result: inf" in text.lower()
    assert "float16 is safe for this network; loss scale 2^" in text
    assert "mpgluon.cast_block(net, keep_fp32=" in text
    assert re.search(r"Suggestion: keep .*large.* in FP32", text)


def test_the_file_is_complete_html_that_needs_nothing_beside_it(page, tmp_path):
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


# The script


@pytest.fixture
def diagnose_script(monkeypatch, tmp_path):
    module = module_from(ROOT / "scripts" / "diagnose.py")
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        return module.main([*arguments, "--output", str(tmp_path / "page.html")])

    return run


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_network_of_the_zoo_is_looked_at_on_noise(diagnose_script, tmp_path, capsys, dtype):
    options = ("--image-size", "16", "--classes", "10", "--batch-size", "2", "--dtype", dtype)
    assert diagnose_script("cifar_resnet20_v1", *options) == 0
    output = capsys.readouterr().out
    assert "Images of normal noise, (2, 3, 16, 16): no data set." in output
    assert "Weights as they were drawn: an untrained network." in output
    assert f"{dtype} against FP32, layer by layer" in output
    assert "== Verdict ==" in output
    assert ("What each loss scale would lose" in output) == (dtype == "float16")
    assert output.endswith(f"written to {tmp_path / 'page.html'}\n")
    assert len(Outline((tmp_path / "page.html").read_text()).pictures) == 3


def test_a_function_of_the_users_own_is_called_for_a_network(diagnose_script, tmp_path, capsys):
    (tmp_path / "mine_of_test_report.py").write_text(
        "from mxnet.gluon import nn\n"
        "def net():\n"
        "    net = nn.HybridSequential(prefix='mine_')\n"
        "    with net.name_scope():\n"
        "        net.add(nn.Conv2D(4, 3), nn.Dense(3))\n"
        "    net.initialize()\n"
        "    return net\n"
        "def number():\n"
        "    return 3\n"
    )
    assert diagnose_script("mine_of_test_report:net", "--image-size", "8") == 0
    assert "HybridSequential from mine_of_test_report:net." in capsys.readouterr().out
    assert diagnose_script("mine_of_test_report:number") == 2
    assert "returned int, not a HybridBlock" in capsys.readouterr().err


def test_a_run_is_looked_at_with_its_weights_on_images_of_its_own(
    diagnose_script, tmp_path, capsys
):
    config = TrainingConfig(
        **{"model": "cifar_resnet20_v1", "dtype": "float16", "dataset": "shapes", "epochs": 1},
        **{"images_per_class": 3, "train_per_class": 1, "image_size": 16, "batch_size": 10},
        **{"data_dir": str(tmp_path), "output_dir": str(tmp_path / "out"), "workers": 0},
    )
    train(config)
    assert diagnose_script(str(tmp_path / "out"), "--batch-size", "4") == 0
    output = capsys.readouterr().out
    assert "cifar_resnet20_v1 after step 1 of" in output
    assert "4 training images of shapes, 16 pixels." in output


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("no_such_network", "no model zoo has a network called 'no_such_network'"),
        ("no_such_module:net", "No module named 'no_such_module'"),
        ("mpgluon:no_such_function", "no_such_function"),
        ("no_such_run.npz", "there is no checkpoint no_such_run.npz"),
        (".", "holds no checkpoints"),
    ],
)
def test_what_cannot_be_looked_at_is_said_in_a_line(diagnose_script, capsys, network, message):
    assert diagnose_script(network) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not Path("page.html").exists()
    assert mpgluon.__version__
