"""The page of a port's comparison: the picture has each part, in its place and with its words."""

import math
import re
from html.parser import HTMLParser

from mpgluon_tools.leaving.parity import Parity, Part
from mpgluon_tools.leaving.parity_page import parity_page

RIGHT = [
    Part("conv<0>", 0.0, 64, follows="the input"),
    Part("conv<0>", 2.5, 64, 1.0),
    Part("result 0", 3.0, 64, follows="conv<0>"),
]


class Shapes(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.circles, self.open = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag == "circle":
            self.circles.append(dict(attributes))


def circles_of(*parts):
    return Shapes(parity_page(Parity(parts, "float16"), "port.py")).circles


def test_a_right_port_has_a_ring_and_a_dot_for_each_layer_and_none_is_marked():
    page = parity_page(Parity(RIGHT, "float16"), "port.py & layers.npz")
    assert "<h1>port.py &amp; layers.npz</h1>" in page
    assert "<strong>The same function: 3 parts, none of which differs.</strong>" in page
    assert page.count('class="limit"') == 3
    assert "<title>between the input and conv&lt;0&gt;: 0, at most 64</title>" in page
    assert [one["class"] for one in circles_of(*RIGHT)] == ["operand", "", "operand"]
    assert not re.search(r"(src|href)=|@import|url\(", page)  # it loads nothing


def test_a_difference_is_marked_and_lies_higher_up():
    wrong = Part("dense", 1e6, 64, said="another result", follows="")
    small, large = circles_of(Part("conv", 1.0, 64), wrong)
    assert large["class"] == "wrong"
    assert float(large["cy"]) < float(small["cy"])
    assert float(large["cx"]) > float(small["cx"])


def test_what_is_beyond_the_picture_lies_at_its_ends():
    parts = [
        Part(str(units), units, 0) for units in (0.0, 1e-9, 1e-1, 1e8, 1e30, math.inf, math.nan)
    ]
    heights = [float(one["cy"]) for one in circles_of(*parts)]
    assert heights[0] == heights[1] == heights[2] == max(heights)
    assert heights[3] == heights[4] == heights[5] == heights[6] == min(heights)
