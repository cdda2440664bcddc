"""A user's folder: a module with functions that commands are given, right ones and wrong ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from mpgluon_tools import commands

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULE = '''
import mpgluon
from mpgluon.diagnostics import Batch

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn


def small():
    net = nn.HybridSequential(prefix="small_")
    with net.name_scope():
        net.add(nn.Conv2D(4, 3), nn.Activation("relu"), nn.GlobalAvgPool2D(), nn.Dense(3))
    net.initialize(mx.init.Xavier())
    return net


class TwoInputs(gluon.HybridBlock):
    """Words and features in, numbers for each word and one number out."""

    def __init__(self):
        super().__init__(prefix="two_")
        with self.name_scope():
            self.words, self.tagger = nn.Embedding(50, 16), nn.Dense(8, flatten=False)
            self.features, self.value = nn.Dense(12), nn.Dense(1)

    def hybrid_forward(self, F, words, features):
        hidden = F.relu(self.features(features))
        return self.tagger(self.words(words)), self.value(hidden)


def two():
    net = TwoInputs()
    net.initialize(mx.init.Xavier())
    return net


def with_batch():
    x, labels = mx.nd.random.normal(shape=(6, 5)), mx.nd.arange(6) % 3
    return dense(), Batch(x, labels, gluon.loss.SoftmaxCrossEntropyLoss())


def dense():
    net = nn.Dense(3, in_units=5)
    net.initialize(mx.init.Xavier())
    return net


def good():
    net = dense()
    mpgluon.cast_block(net)
    return net


def trained():
    net = good()
    return net, gluon.Trainer(net.collect_params(), "adam")


def labelled():
    return (*trained(), np.zeros(2, np.float16))


def raw():
    return nn.Dense(3, in_units=5)


def with_argument(size):
    return good()


def four():
    return 1, 2, 3, 4


def number():
    return 5


def steep():
    x, labels = mx.nd.ones((2, 5)), mx.nd.zeros(2)
    return dense(), Batch(x, labels, lambda output, labels: 1000 * output.astype("float32"))


def broken():
    return 1 / 0


value = 5
'''


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Return the current folder, which has the modules ``mine`` and ``unimportable``."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "unimportable.py").write_text("import nothing_of_that_name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("mine", "unimportable"):
        sys.modules.pop(name, None)


@pytest.fixture
def refused(capsys):
    """Return a function that runs a command line which must fail with one line; returns it."""

    def run(*arguments: str) -> str:
        assert commands.main([str(one) for one in arguments]) == 2
        errors = capsys.readouterr().err
        assert errors.startswith("error: ")
        assert errors.count("\n") == 1
        return errors

    return run


@pytest.fixture
def printed(capsys):
    """Return a function that runs a command line, and returns its output."""

    def run(*arguments: str, status: int = 0) -> str:
        assert commands.main([str(one) for one in arguments]) == status
        output, errors = capsys.readouterr()
        assert errors == ""
        return output

    return run


@pytest.fixture
def started():
    """Return a function that runs ``python -m …`` in the folder of the user."""

    def run(*arguments: str, module: str = "mpgluon", **variables: str):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
            env=environment,
        )

    return run
