"""Every operator that a network can call as ``F.name`` is found again by its name in a graph."""

from mpgluon import PrecisionError
from mpgluon.graph.nodes import Graph
from mpgluon.graph.replay import _operator_named, replay

import mxnet as mx
import pytest
from mxnet.operator import get_all_registered_operators


@pytest.mark.parametrize("interface", [mx.nd, mx.sym], ids=["arrays", "symbols"])
def test_every_operator_outside_the_numpy_interface_is_found(interface):
    names = {name for name in get_all_registered_operators() if "_backward_" not in name}
    names = {name for name in names if not name.startswith(("_np", "_mpgluon"))}
    names.add("_np_cumsum")
    assert len(names) > 500
    assert all(callable(_operator_named(interface, name)) for name in names)


@pytest.mark.parametrize(
    "function",
    [
        lambda F, x: F.cumsum(x, axis=1),
        lambda F, x: F.image.normalize(x, mean=(0.5,), std=(2.0,)),
        lambda F, x: F.contrib.quadratic(x, a=1.0, b=2.0, c=3.0),
        lambda F, x: F.linalg.gemm2(x, x, transpose_b=True),
    ],
    ids=["cumsum", "image", "contrib", "linalg"],
)
def test_an_operator_computes_what_it_did_in_the_network(function):
    x = mx.nd.random.normal(shape=(1, 4, 4))
    graph = Graph.read(function(mx.sym, mx.sym.var("x")))
    found = replay(graph, mx.nd, {"x": x})[graph.heads[0].key]
    assert (found.asnumpy() == function(mx.nd, x).asnumpy()).all()


def test_like_operators_of_random_take_the_shape_of_their_operand():
    graph = Graph.read(mx.sym.random.uniform_like(mx.sym.var("x"), low=2.0, high=3.0))
    found = replay(graph, mx.nd, {"x": mx.nd.zeros((2, 5))})[graph.heads[0].key].asnumpy()
    assert found.shape == (2, 5)
    assert ((found >= 2) & (found < 3)).all()


def test_an_operator_of_the_numpy_interface_is_refused_by_name():
    x = mx.sym.var("x").as_np_ndarray()
    graph = Graph.read((x + x).as_nd_ndarray())
    with pytest.raises(PrecisionError, match=r"operator _npi_add, .* call mx\.npx\.set_np"):
        replay(graph, mx.sym, {"x": mx.sym.var("x")})
