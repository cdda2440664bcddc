"""Formats that a call asks for, and positions in images and bounds that need more than 16 bits."""

from __future__ import annotations

import os
import shutil
import subprocess

import mxnet as mx
import numpy as np
import pytest
from helpers import BOTH, EACH_WAY, in_way, initialized, run_python
from mxnet import gluon
from mxnet.gluon import nn


class Function(gluon.HybridBlock):
    """Applies a function of ``F`` and an array to the numbers that an identity layer returns."""

    def __init__(self, function):
        super().__init__()
        self._function = function
        self.identity = nn.Conv2D(1, 1, in_channels=1, use_bias=False)

    def hybrid_forward(self, F, x):
        return self._function(F, self.identity(x))


def results_of(function, way, values, *, hybridize):
    net = in_way(way, initialized(Function(function), mx.init.One()))
    net.hybridize(hybridize)
    return net(mx.nd.array(values)).asnumpy()


@BOTH
@pytest.mark.parametrize("way", ["cast float16", "autocast float16"])
def test_a_result_has_the_format_that_the_call_names(way, hybridize):
    def total(F, x):
        probabilities = F.softmax(F.reshape(x, (-1, 2)), dtype="float16")
        return F.broadcast_add(F.sum(probabilities * 30_000), F.ones((1,)))

    found = results_of(total, way, np.zeros((1, 1, 10, 2)), hybridize=hybridize)
    assert found.item() == 10 * 30_000 + 1  # in FP32, of float16 numbers of 15,000


@BOTH
@EACH_WAY
def test_an_image_is_warped_at_positions_in_fp32(way, hybridize):
    rows = np.tile(np.arange(512) % 16, (1, 1, 2, 1))

    def warped(F, x):
        identity = F.reshape(F.slice_axis(x, axis=3, begin=0, end=3), (1, 6))
        identity = identity * 0 + F.reshape(F.one_hot(F.zeros((1,)), 6), (1, 6))
        identity = identity + F.reshape(F.one_hot(F.zeros((1,)) + 4, 6), (1, 6))
        grid = F.GridGenerator(identity, transform_type="affine", target_shape=(2, 512))
        return F.BilinearSampler(x, grid)

    assert np.abs(results_of(warped, way, rows, hybridize=hybridize) - rows).max() < 0.01


CLIPPED_IN_ANOTHER_LOCALE = """
import locale
import mpgluon, mxnet as mx, numpy as np
from mxnet.gluon import nn

class Clipped(nn.HybridBlock):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Dense(8, in_units=8), nn.Dense(8, in_units=8)

    def hybrid_forward(self, F, x):
        return self.last(F.clip(self.first(x), -0.5, 0.75))

locale.setlocale(locale.LC_ALL, "de_DE.UTF-8")
assert locale.localeconv()["decimal_point"] == ","
net = Clipped()
net.initialize(mx.init.Normal(1))
mpgluon.cast_block(net)
images = mx.nd.array(np.random.RandomState(0).standard_normal((4, 8)))
imperative = net(images).asnumpy()
net.hybridize()
np.testing.assert_array_equal(net(images).asnumpy(), imperative)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("native_operators")
def test_bounds_are_read_alike_in_a_locale_with_a_decimal_comma(tmp_path):
    if shutil.which("localedef") is None or not os.path.exists("/usr/share/i18n/locales/de_DE"):
        pytest.skip("this machine has no definition of the locale de_DE")
    command = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "de_DE.UTF-8")]
    subprocess.run(command, check=False, capture_output=True)  # a warning is a status of 1
    run = run_python(CLIPPED_IN_ANOTHER_LOCALE, env={**os.environ, "LOCPATH": str(tmp_path)})
    assert run.returncode == 0, run.stderr
