"""Commands on a network of MXNet's NumPy interface: the output for the same one in mx.nd."""

from __future__ import annotations

import sys

from mpgluon_tools.serving.classifier import Classifier

import mxnet as mx
import numpy as np
import pytest
from interfaces import interface, made

MODULE = """
import interfaces

import mxnet as mx


def in_nd():
    return interfaces.made()


def in_np():
    mx.npx.set_np()
    return interfaces.made()
"""
SHAPE = "--input-shape=4,3,8,8"


@pytest.fixture(autouse=True)
def _module(folder):
    (folder / "both.py").write_text(MODULE)
    with interface(in_numpy=False):  # switched back afterwards
        yield
    sys.modules.pop("both", None)


def in_both(printed, *arguments):
    in_nd = printed(arguments[0], "both:in_nd", *arguments[1:])
    in_np = printed(arguments[0], "both:in_np", *arguments[1:])
    return in_nd, in_np.replace("both:in_np", "both:in_nd")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_diagnosis_is_the_same(printed, dtype):
    in_nd, in_np = in_both(printed, "diagnose", SHAPE, f"--dtype={dtype}")
    assert in_np.replace("_np_dot", "dot").split() == in_nd.split()
    assert f"{dtype} against FP32, layer by layer" in in_np


def test_an_exported_file_is_the_same(printed):
    in_nd, in_np = in_both(printed, "export", SHAPE, "--dtype=float16")
    assert in_np == in_nd
    assert "largest relative error of a result" in in_np


def test_a_network_is_timed(printed):
    output = printed("bench", "both:in_np", SHAPE, "--rounds=1", "--no-memory")
    assert "a training step with a batch of 4, 1 round in turn" in output


def test_the_page_for_photographs_predicts_in_other_threads():
    from concurrent.futures import ThreadPoolExecutor
    from io import BytesIO

    from PIL import Image

    file = BytesIO()
    pixels = np.random.RandomState(0).randint(0, 256, (9, 9, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(file, "png")

    def predicted():
        names = [str(number) for number in range(20)]
        classifier = Classifier(made(), names, image_size=8, dtype="float16")
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(classifier, file.getvalue()).result()

    with interface(in_numpy=False):
        in_nd = predicted()
    with interface(in_numpy=True):
        in_np = predicted()
        assert mx.util.is_np_array()
    assert [one.guesses for one in in_np] == [one.guesses for one in in_nd]
