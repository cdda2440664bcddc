"""The answers at the beginning of CONTRIBUTING.md: the places exist, run, and decide."""

import re
import sys
from pathlib import Path

import mpgluon
from mpgluon import FloatFormat, Policy, amp, checkpoint, kernels
from mpgluon.base.archive import read_archive
from mpgluon.cast import plan
from mpgluon.formats import float_format
from mpgluon.graph import operators

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, gluon
from mxnet.gluon import nn

ROOT = Path(__file__).parent.parent
PLACE = re.compile(r"`([\w/]+\.(?:py|h))`: `([\w.]+)`")


def answers():
    """Return the questions and their places, as (file, name)."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8").partition("## Set up")[0]
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")][1:]
    return {question.strip(): PLACE.findall(answer) for question, answer in rows}


ANSWERS = answers()


def called_by(work):
    """Return the (file, function) pairs of this repository that a function calls."""
    called = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            path = Path(frame.f_code.co_filename).relative_to(ROOT)
            called.add((path.as_posix(), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return called


def functions_of(question):
    """Return the Python functions among the places of the question that begins so."""
    (places,) = (found for text, found in ANSWERS.items() if text.startswith(question))
    return {(path, name.rpartition(".")[2]) for path, name in places if path.endswith(".py")}


def make_training(*, scaled=True):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(2, 3, in_channels=1), nn.BatchNorm(in_channels=2), nn.Dense(2, in_units=8))
    net.initialize()
    mpgluon.cast_block(net)
    options = {"learning_rate": 0.1, "multi_precision": True}
    trainer = gluon.Trainer(net.collect_params(), "sgd", options)
    if scaled:
        amp.init_trainer(trainer, 8)
    return net, trainer


def train_step(net, trainer, *, scaled=True, largest=1.0):
    with autograd.record():
        loss = net(mx.nd.ones((2, 1, 4, 4)) * largest)
        if not scaled:
            loss.backward()
        else:
            with amp.scale_loss(loss, trainer) as scaled_loss:
                scaled_loss.backward()
    trainer.step(2)


def test_there_are_nine_answers_in_three_places_at_most():
    assert len(ANSWERS) == 9
    assert all(1 <= len(places) <= 3 for places in ANSWERS.values())


@pytest.mark.parametrize("place", sorted(set().union(*ANSWERS.values())), ids=": ".join)
def test_each_place_has_the_name(place):
    path, name = place
    text = (ROOT / path).read_text("utf-8")
    for part in name.split("."):
        assert re.search(rf"(?m)^\s*(class|def) {part}\b|^\s*{part}\b.*[:=]|\"{part}\"", text), part


@pytest.mark.parametrize(
    ("question", "scaled", "largest"),
    [("Where is a step skipped", True, np.inf), ("Where is the loss multiplied", True, 1.0),
     ("Which kernel computes", True, 1.0), ("Where are masters made", True, 1.0),
     ("Where are masters made", False, 1.0)],
)  # fmt: skip
def test_the_functions_run_where_the_answer_says(question, scaled, largest):
    net, trainer = make_training(scaled=scaled)
    called = called_by(lambda: train_step(net, trainer, scaled=scaled, largest=largest))
    assert {place for place in functions_of(question) if place[1].islower()} <= called
    if scaled:
        assert amp.step_was_skipped(trainer) is (largest == np.inf)


def written_by(net, trainer, tmp_path):
    mpgluon.save_checkpoint(tmp_path / "c.npz", net, trainer)
    return read_archive(tmp_path / "c.npz")


def test_one_table_decides_what_a_checkpoint_holds(tmp_path, monkeypatch):
    net, trainer = make_training()
    train_step(net, trainer)
    _, before = written_by(net, trainer, tmp_path)
    without = {name: part for name, part in checkpoint.PARTS.items() if name != "optimizer"}
    monkeypatch.setattr(checkpoint, "PARTS", without)
    header, arrays = written_by(net, trainer, tmp_path)
    assert "optimizer" not in header["trainer"]
    assert {name for name in before if not name.startswith("trainer/")} == arrays.keys()


@pytest.mark.parametrize("stays", [True, False])
def test_one_line_keeps_batchnorm_in_fp32(monkeypatch, stays):
    if not stays:
        monkeypatch.setattr(plan, "BATCH_NORMS", ())
    net = nn.HybridSequential()
    net.add(nn.BatchNorm(in_channels=2))
    net.initialize()
    mpgluon.cast_block(net, keep_fp32=())
    assert np.dtype(net[0].gamma.dtype) == (np.float32 if stays else np.float16)


def test_one_line_adds_a_format(monkeypatch):
    monkeypatch.setitem(float_format._NAMED, "toy", FloatFormat("toy", 4, 4))
    policy = Policy.parse("compute=toy")
    if kernels.load():
        net = nn.Dense(1, in_units=1, weight_initializer="ones")
        net.initialize()
        amp.autocast(net, policy)
        assert net(mx.nd.array([[1.0625]])).asscalar() == 1  # 4 significant bits


@pytest.mark.parametrize("rule", [None, operators.Rule.COMPUTE])
def test_one_line_adds_an_operators_rule(monkeypatch, rule):
    if rule is not None:
        monkeypatch.setattr(operators, "_RULES", {**operators._RULES, "softmax": rule})
    net = nn.HybridLambda(lambda F, x: F.softmax(x))
    amp.autocast(net, "float16")
    result = net(mx.nd.array([[0.0, 1.0]])).asnumpy()
    assert (result == result.astype(np.float16)).all() == (rule is not None)
