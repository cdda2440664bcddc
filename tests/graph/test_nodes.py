"""The model of a graph keeps what MXNet writes, and knows what MXNet infers."""

import json

import mpgluon
from mpgluon.graph.description import symbol_of
from mpgluon.graph.nodes import VARIABLE, Entry, Graph, Node

import mxnet as mx
import pytest
from mxnet.gluon.model_zoo import vision


def control_flow(x):
    def step(row, state):
        return mx.sym.SliceChannel(row, num_outputs=2)[1], state

    return mx.sym.contrib.foreach(step, x, [mx.sym.var("state")])[0] + 1


def cast_network(x):
    net = vision.resnet18_v1(classes=3)
    mpgluon.cast_block(net)
    return symbol_of(net, [x.name])


MAKES = {
    "a cast network": cast_network,
    "squeezenet": lambda x: symbol_of(vision.squeezenet1_0(), [x.name]),
    "several results": lambda x: mx.sym.Group([*mx.sym.SliceChannel(x, num_outputs=3), x]),
    "control flow": control_flow,
}


@pytest.mark.parametrize("name", MAKES)
def test_a_graph_that_is_read_and_written_is_the_same_to_mxnet(name):
    symbol = MAKES[name](mx.sym.var("data", shape=(2, 3), lr_mult=2))
    graph = Graph.read(symbol)
    expected, written = (
        json.loads(one.tojson(remove_amp_cast=False)) for one in (symbol, graph.symbol())
    )
    assert [node.name for node in graph.nodes] == [node["name"] for node in expected["nodes"]]
    assert written == expected


def test_entries_are_replaced_in_chains_and_in_the_operands_of_what_is_put_in_their_place():
    x = mx.sym.var("x")
    parts = mx.sym.SliceChannel(x, num_outputs=2, name="parts")
    symbol = mx.sym.Group([mx.sym.exp(mx.sym.abs(parts[1], name="abs"), name="exp"), parts[0]])
    graph = Graph.read(symbol)
    nodes = {node.name: node for node in graph.nodes}
    x, parts, y = Entry(nodes["x"]), nodes["parts"], Entry(Node(VARIABLE, "y"))
    new = {
        (parts, 0): y,
        (parts, 1): x,
        (nodes["abs"], 0): Entry(parts, 1),  # left out; and its operand is replaced
        (nodes["exp"], 0): Entry(Node("elemwise_add", "sum", {}, [Entry(nodes["abs"]), y])),
    }
    replaced = graph.replaced(new)
    assert [(head.node.name, head.number) for head in replaced.heads] == [("sum", 0), ("y", 0)]
    assert [node.name for node in replaced.nodes] == ["x", "y", "sum"]
    assert graph.symbol().tojson() == symbol.tojson()


def test_options_are_python_values_without_internal_attributes():
    x = mx.sym.var("x")
    layer = mx.sym.Activation(x, act_type="relu", attr={"__mine__": "1"}, name="layer")
    made = mx.sym.Convolution(layer, kernel=(3, 3), num_filter=8, no_bias=True)
    relu, convolution = (node for node in Graph.read(made).nodes if not node.is_variable)
    assert relu.options == {"act_type": "relu"}
    assert convolution.options == {"kernel": (3, 3), "num_filter": 8, "no_bias": True}


def test_dtypes_and_shapes_are_those_that_mxnet_infers():
    x = mx.sym.var("x")
    half = mx.sym.amp_cast(x, dtype="float16")
    graph = Graph.read(mx.sym.Group([*mx.sym.SliceChannel(half, num_outputs=2), x > 0]))
    assert graph.infer({"x": "float32", "unknown": "int8"}, {"x": (3, 4)})
    values = [(entry.value.dtype, entry.value.shape) for entry in graph.heads]
    assert values == [("float16", (3, 2)), ("float16", (3, 2)), ("float32", (3, 4))]
    assert graph.shapes(graph.heads[0].node) == [(3, 4)]


def test_what_mxnet_cannot_infer_is_unknown():
    graph = Graph.read(mx.sym.var("x") + mx.sym.var("y"))
    assert not graph.infer({})
    assert [node.outputs[0].dtype for node in graph.nodes] == ["", "", ""]
    assert not graph.infer({"x": "float32", "y": "float32"}, {})


def test_a_graph_has_the_nodes_that_its_results_depend_on():
    one, other = Node(VARIABLE, "one"), Node(VARIABLE, "other")
    total = Node("elemwise_add", "total", {}, [Entry(one), Entry(other)])
    assert Graph([Entry(total)]).nodes == [one, other, total]
    total.inputs[1] = total.inputs[0]
    assert Graph([Entry(total)]).symbol().list_arguments() == ["one"]
