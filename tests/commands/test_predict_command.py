"""Photographs get their categories on the command line."""

from mpgluon_tools import commands

import numpy as np
import pytest
from PIL import Image
from test_serve_command import NETWORK

OTHERS = """
from mxnet import gluon

class Pair(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return F.mean(x, axis=(2, 3)), F.sum(x, axis=(2, 3))

def pair():
    return Pair()

def maps():
    net = gluon.nn.Conv2D(2, 1, in_channels=3)
    net.initialize()
    return net
"""
OPTIONS = ("--image-size=8", "--class-names=names.txt", "--mean=none", "--std=1,1,1")


@pytest.fixture(autouse=True)
def photographs(folder):
    (folder / "colours.py").write_text(NETWORK)
    (folder / "names.txt").write_text("red\ngreen\nblue\n")
    for name, colour in {"sky.png": (51, 102, 255), "leaf.gif": (0, 255, 0)}.items():
        Image.new("RGB", (12, 9), colour).save(folder / name)


def probabilities(*levels: int) -> list[float]:
    weights = np.exp(np.array(levels) / 255)
    return list(weights / weights.sum())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_line_names_the_likeliest_categories(capsys, dtype):
    arguments = ["predict", "colours:mean_colour", "sky.png", "leaf.gif", "--top=2", *OPTIONS]
    assert commands.main([*arguments, "--dtype", dtype]) == 0
    out, err = capsys.readouterr()
    red, green, blue = probabilities(51, 102, 255)
    of_leaf = probabilities(0, 255, 0)
    expected = [("blue", blue), ("green", green)], [("green", of_leaf[1]), ("red", of_leaf[0])]
    assert red < green
    for line, name, answers in zip(out.splitlines(), ("sky.png", "leaf.gif"), expected):
        found, _, words = line.partition(": ")
        assert found == name
        guesses = [one.rsplit(" ", 1) for one in words.split(", ")]
        assert [category for category, _ in guesses] == [category for category, _ in answers]
        # Three digits; levels up to 1 and their mean are off by 2^-8 of it at most in bfloat16.
        shares = [float(share) for _, share in guesses]
        assert shares == pytest.approx([share for _, share in answers], abs=0.0005 + 2**-7)
    assert "minus 0, 0, 0, divided by 1, 1, 1; the central square of 0.875" in err


def test_what_cannot_be_read_gets_a_line_and_the_others_their_answers(capsys):
    given = ["nowhere.jpg", "names.txt", ".", "sky.png"]
    assert commands.main(["predict", "colours:mean_colour", *given, *OPTIONS]) == 1
    out, err = capsys.readouterr()
    assert [line.partition(":")[0] for line in out.splitlines()] == ["sky.png"]
    assert err.splitlines()[-3:] == [
        "nowhere.jpg: No such file or directory",
        "names.txt: cannot read this image",
        ".: Is a directory",
    ]


def test_names_must_be_as_many_as_the_categories(refused, folder):
    (folder / "names.txt").write_text("red\ngreen\n")
    said = refused("predict", "colours:mean_colour", "sky.png", *OPTIONS)
    assert "the network has 3 logits, but classes names 2" in said


def test_a_network_that_is_not_a_classifier_is_refused_with_the_shapes_it_returns(refused, folder):
    (folder / "others.py").write_text(OTHERS)
    for name, shapes in (("maps", "(1, 2, 32, 32)"), ("pair", "(1, 3), (1, 3)")):
        said = refused("predict", f"others:{name}", "sky.png", "--image-size=32")
        assert f"for one image this network returns {shapes}" in said
