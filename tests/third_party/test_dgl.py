"""dgl's graph networks with its MXNet backend, whose kernels take FP32 only."""

from __future__ import annotations

from functools import partial

from mpgluon import amp

import mxnet as mx
import numpy as np
import pytest
import third_party_helpers
from mxnet import gluon
from mxnet.gluon import nn
from third_party_helpers import Case, check

with pytest.MonkeyPatch.context() as environment:
    environment.setenv("DGLBACKEND", "mxnet")
    dgl = pytest.importorskip("dgl", reason="dgl is not installed (make test WITH=third-party)")
from dgl.nn.mxnet import GATConv, GraphConv, SAGEConv

pytestmark = pytest.mark.third_party

NODES, EDGES, CLASSES = 20, 60, 4
RANDOM = np.random.RandomState(0)
GRAPH = dgl.add_self_loop(
    dgl.graph((RANDOM.randint(0, NODES, EDGES), RANDOM.randint(0, NODES, EDGES)))
)
FEATURES = mx.nd.array(RANDOM.standard_normal((NODES, 8)))
LABELS = mx.nd.array(RANDOM.randint(0, CLASSES, NODES))
mx.set_np_shape(False)  # which dgl switches on for all of MXNet when it is imported
LAYERS = {
    "GAT": partial(GATConv, num_heads=1),
    "GCN": GraphConv,
    "GraphSAGE": partial(SAGEConv, aggregator_type="mean"),
}


@pytest.fixture(autouse=True)
def _np_shape():
    with mx.util.np_shape(True):
        yield


class Classifier(gluon.Block):
    """Two layers on a graph between dense ones.

    With tanh, since a ReLU that a rounding switches changes a gradient by more than roundings do.
    """

    def __init__(self, layer):
        super().__init__()
        self.embedding, self.output = nn.Dense(16), nn.Dense(CLASSES)
        self.first, self.second = layer(16, 16), layer(16, 16)

    def forward(self, x):
        x = self.first(GRAPH, self.embedding(x)).reshape((NODES, -1))
        return self.output(self.second(GRAPH, mx.nd.tanh(x)).reshape((NODES, -1)))


def make(name):
    net = Classifier(LAYERS[name])
    net.initialize(mx.init.Xavier())
    net(FEATURES)
    return net


def losses(net, _step):
    return gluon.loss.SoftmaxCELoss()(net(FEATURES), LABELS)


CASES = {name: Case(partial(make, name), losses, NODES, learning_rate=0.1) for name in LAYERS}


@pytest.mark.parametrize("name", LAYERS)
def test_a_graph_network_trains_in_bfloat16_like_fp32(name):
    check(CASES[name], "autocast bfloat16", hybridize=False)


@pytest.mark.parametrize("name", LAYERS)
def test_a_graph_network_trains_in_float16_with_its_graph_layers_in_fp32(name, monkeypatch):
    way = partial(amp.autocast, dtype="float16", keep_fp32=(GATConv, GraphConv, SAGEConv))
    monkeypatch.setitem(third_party_helpers.WAYS, "autocast", way)
    check(CASES[name], "autocast", hybridize=False)


def test_dgl_refuses_float16_by_itself():
    net = make("GraphSAGE")
    amp.autocast(net, "float16")
    with pytest.raises(dgl.DGLError, match="float32 or float64"):
        net(FEATURES)
