"""PReLU in a cast network: in a graph, MXNet's own multiplies the slope's gradient by the slope."""

from __future__ import annotations

from mpgluon.deployment import export_mxnet, import_mxnet
from mpgluon_tools.deployment.recording import record

import mxnet as mx
import numpy as np
import pytest
from helpers import EACH_WAY, STATIC, in_way
from interfaces import interface
from mxnet import autograd, gluon

# Products and sums of these are integers below 256: numbers of every format.
X = np.random.RandomState(0).randint(-2, 3, (2, 3, 2, 2)).astype("float32")
ARRIVING = np.random.RandomState(1).randint(1, 3, X.shape).astype("float32")


class Between(gluon.HybridBlock):
    """PReLU between two operators, perhaps in the body of a loop over the images."""

    def __init__(self, slopes, *, in_loop):
        super().__init__()
        self.in_loop = in_loop
        self.slope = self.params.get("slope", shape=slopes.shape, init=mx.init.Constant(slopes))
        self.initialize()

    def hybrid_forward(self, F, x, slope):
        if mx.util.is_np_array():
            return -F.npx.leaky_relu(-x, slope, act_type="prelu")

        def prelu(x):
            return -F.LeakyReLU(-x, slope, act_type="prelu")

        return (
            F.contrib.foreach(lambda x, _: (prelu(x), []), x, [])[0] if self.in_loop else prelu(x)
        )


@pytest.mark.parametrize("place", ["mx.nd", "mx.np", "loop"])
@pytest.mark.parametrize("slopes", [[2.0], [0.0], [0.5, -2.0, 4.0]], ids=str)
@EACH_WAY
def test_results_and_gradients_are_exact_however_the_network_runs(way, slopes, place):
    slopes = np.float32(slopes)
    at_each = slopes.reshape(1, -1, 1, 1)
    results = np.where(X < 0, X, at_each * X)  # -PReLU(-x)
    gradient = np.where(X < 0, 0, ARRIVING * X).sum((0, 2, 3))
    gradient = gradient if slopes.size > 1 else gradient.sum(keepdims=True)
    with interface(place == "mx.np") as array:
        x, arriving, with_nan = array(X), array(ARRIVING), array(np.where(X == 2, np.nan, X))
        x.attach_grad()
        for options in ({"active": False}, {}, STATIC):
            net = in_way(way, Between(array(slopes), in_loop=place == "loop"))
            net.hybridize(**options)
            for _ in range(2):
                with autograd.record():
                    found = net(x)
                found.backward(arriving)
            np.testing.assert_array_equal(found.asnumpy(), results)
            np.testing.assert_array_equal(net.slope.grad().asnumpy(), gradient)
            of_x = np.where(X < 0, ARRIVING, at_each * ARRIVING)  # at 0, as MXNet's
            np.testing.assert_array_equal(x.grad.asnumpy(), of_x)
            np.testing.assert_array_equal(np.isnan(net(with_nan).asnumpy()), X == 2)


@pytest.mark.filterwarnings("ignore:Cannot decide type for the following arguments")  # MXNet's
@EACH_WAY
def test_exports_hold_mxnets_operator_and_have_the_same_results(way, tmp_path):
    net = in_way(way, Between(mx.nd.array([0.5, -2.0, 4.0]), in_loop=False))
    net.hybridize()
    results = net(mx.nd.array(X)).asnumpy()
    dtype = "float16" if "float16" in way else "bfloat16"
    export_mxnet(net, tmp_path / "net", dtype=dtype)
    np.testing.assert_array_equal(import_mxnet(tmp_path / "net")(mx.nd.array(X)).asnumpy(), results)
    recorded = [node.operator for node in record(net).graph.nodes]  # as exported to ONNX
    assert recorded.count("LeakyReLU") == 1
