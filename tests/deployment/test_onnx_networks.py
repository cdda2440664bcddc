"""Recurrent, detection and segmentation networks as ONNX, computed by onnxruntime and by MXNet."""

from __future__ import annotations

from mpgluon import PrecisionError
from mpgluon.base.blocks import set_value
from mpgluon.deployment import export_torch, inference_network
from mpgluon_tools.onnx.export import export_onnx

import mxnet as mx
import numpy as np
import onnxruntime
import pytest
from deployment_helpers import Lambda, some_images
from interfaces import interface
from mxnet import gluon
from mxnet.gluon import nn, rnn


def flat(outputs):
    if isinstance(outputs, (list, tuple)):
        return [array for part in outputs for array in flat(part)]
    return [outputs]


def exported(net, folder, shapes):
    """Return a session of the network's file and its results by MXNet and onnxruntime."""
    path = export_onnx(net, folder / "net.onnx", input_shapes=shapes)
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def assert_same_results(session, net, arrays, tolerance):
    names = [value.name for value in session.get_inputs()]
    inputs = {name: array.asnumpy() for name, array in zip(names, arrays)}
    results, expected = session.run(None, inputs), flat(net(*arrays))
    assert len(results) == len(expected)
    for result, array in zip(results, expected):
        reference = array.asnumpy()
        assert result.shape == reference.shape
        assert np.abs(result - reference).max() <= tolerance * np.abs(reference).max()


class WithStates(gluon.HybridBlock):
    """A recurrent layer whose begin states are inputs, and whose last states are results."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def hybrid_forward(self, _, data, *states):
        return self.layer(data, list(states))


class WithLengths(WithStates):
    """A recurrent layer of sequences of several lengths."""

    def hybrid_forward(self, _, data, lengths):
        return self.layer(data, sequence_length=lengths)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: WithLengths(rnn.LSTM(4, use_sequence_length=True, input_size=3)),
            PrecisionError,
            r"RNN: use_sequence_length\); write these blocks",
        ),
        (lambda: Lambda(lambda _, x, __: x * 2), ValueError, "not use its input data1; take a"),
    ],
)
def test_an_input_without_a_place_in_the_file_is_refused(make, error, message, tmp_path):
    net = make()
    net.initialize()
    with pytest.raises(error, match=message):
        export_onnx(net, tmp_path / "net.onnx", input_shapes=[(5, 2, 3), (2,)])


RECURRENT = {
    "lstm": rnn.LSTM,
    "gru": rnn.GRU,
    "tanh": lambda size, layers, **options: rnn.RNN(size, layers, "tanh", **options),
    "relu": lambda size, layers, **options: rnn.RNN(size, layers, "relu", **options),
}
# Each step of time rounds some thirty sums of 11 terms, which are not larger than the results.
FEW_ROUNDINGS = 2e-6


@pytest.mark.parametrize("layout", ["TNC", "NTC"])
@pytest.mark.parametrize(("layers", "both"), [(1, False), (2, True)])
@pytest.mark.parametrize("kind", RECURRENT)
def test_a_recurrent_layer_takes_any_batch_length_and_begin_state(
    kind, layers, both, layout, tmp_path
):
    options = {"layout": layout, "bidirectional": both, "input_size": 3}
    for with_states in (False, True):
        net = RECURRENT[kind](4, layers, **options)
        net = WithStates(net) if with_states else net
        net.initialize(mx.init.Uniform(0.5))
        shapes = []
        for sizes in ((2, 5), (3, 7)):
            batch = sizes[layout.index("N")]
            state = (layers * (1 + both), batch, 4)
            shapes.append([(*sizes, 3)] + [state] * with_states * (1 + (kind == "lstm")))
        session = exported(net, tmp_path, shapes[0])
        arrays = [some_images(*shape, seed=seed) for seed, shape in enumerate(shapes[1])]
        assert_same_results(session, net, arrays, FEW_ROUNDINGS)


@pytest.mark.filterwarnings("ignore:ndarray.context:DeprecationWarning")  # in Gluon's layer
@pytest.mark.parametrize("kind", RECURRENT)
def test_a_recurrent_layer_of_the_numpy_interface_begins_with_zeros(kind, tmp_path):
    with interface(in_numpy=True) as array:
        net = RECURRENT[kind](4, 2, layout="NTC", input_size=3)
        net.initialize(mx.init.Uniform(0.5))
        session = exported(net, tmp_path, [(2, 5, 3)])
        images = array(np.random.RandomState(0).standard_normal((3, 7, 3)).astype(np.float32))
        assert_same_results(session, net, [images], FEW_ROUNDINGS)
        program = export_torch(net, tmp_path / "torch", [(2, 5, 3)]) / "model.py"
        assert "self.rnn0(x.transpose(0, 1))" in program.read_text()  # zeros by default, there
        # oneDNN may add the products of a step in another order for predictions.
        again, expected = inference_network(net, "float32")(images).asnumpy(), net(images).asnumpy()
        assert np.abs(again - expected).max() <= FEW_ROUNDINGS * np.abs(expected).max()


@pytest.mark.parametrize("example", [(2, 5), (5, 5), (1, 1)])
def test_a_sentence_may_have_any_length_whatever_the_example_has(example, tmp_path):
    net = nn.HybridSequential()
    net.add(nn.Embedding(20, 3), rnn.LSTM(4, layout="NTC", input_size=3))
    net.add(nn.Dense(2, flatten=False, in_units=4))
    net.initialize(mx.init.Uniform(0.5))
    session = exported(net, tmp_path, [example])
    words = mx.nd.array(np.random.RandomState(0).randint(-2, 25, (3, 7)))
    assert session.get_inputs()[0].shape == ["data_0", "data_1"]
    assert_same_results(session, net, [words], FEW_ROUNDINGS)


def test_a_length_that_an_operator_needs_is_fixed(tmp_path):
    net = nn.HybridSequential()
    net.add(nn.Embedding(20, 3), rnn.LSTM(4, layout="NTC", input_size=3))
    net.add(nn.HybridLambda(lambda F, x: F.repeat(x, 2, axis=0)))
    net.initialize(mx.init.Uniform(0.5))
    session = exported(net, tmp_path, [(2, 5)])
    assert session.get_inputs()[0].shape == ["batch", 5]
    assert_same_results(session, net, [mx.nd.ones((3, 5))], FEW_ROUNDINGS)


def test_positions_beyond_2048_stay_exact_in_a_float16_file(tmp_path):
    net = nn.HybridLambda(lambda F, x: F.broadcast_sub(x, F.arange(3000)))
    path = export_onnx(net, tmp_path / "net.onnx", dtype="float16", input_shapes=[(1, 3000)])
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    data = np.arange(3000, dtype=np.float32)[np.newaxis]
    assert not session.run(None, {"data": data})[0].any()


def segmentation(name, **options):
    zoo = pytest.importorskip("gluoncv").model_zoo
    return getattr(zoo, name)(nclass=4, backbone="resnet50", aux=True, pretrained_base=False,
                              base_size=64, crop_size=64, **options)  # fmt: skip


def from_zoo(name, **options):
    zoo = pytest.importorskip("gluoncv").model_zoo
    return zoo.get_model(name, pretrained=False, **options)


PLAIN, CLASSES = {"pretrained_base": False}, {"classes": ["a", "b", "c"]}
NETWORKS = {
    "FCN": (lambda: segmentation("FCN"), 64),
    "PSPNet": (lambda: segmentation("PSPNet"), 64),
    "DeepLabV3": (lambda: segmentation("DeepLabV3"), 64),
    "HRNet": (lambda: from_zoo("hrnet_w18_small_v1_c"), 64),
    "HRNet for segmentation": (lambda: from_zoo("hrnet_w18_small_v1_s"), 64),
    "ResNeSt": (lambda: from_zoo("resnest14"), 64),
    "CenterNet": (lambda: from_zoo("center_net_resnet18_v1b_voc", **PLAIN), 128),
    "SimplePose": (lambda: from_zoo("simple_pose_resnet18_v1b", **PLAIN), 128),
    "SSD": (lambda: from_zoo("ssd_512_resnet50_v1_custom", **PLAIN, **CLASSES), 128),
    "YOLOv3": (lambda: from_zoo("yolo3_mobilenet1.0_custom", **PLAIN, **CLASSES), 64),
}
# Boxes and scores pass some sixty layers, each of which rounds sums of up to 4,608 terms.
MANY_ROUNDINGS = 2e-5


def with_lively_predictors(net, images):
    """Initialize a network so that its scores and boxes differ from each other."""
    net.initialize()
    net(images)
    random = np.random.RandomState(0)
    for name, parameter in net.collect_params().items():
        if name.endswith(("gamma", "_var")):
            set_value(parameter, mx.nd.ones(parameter.shape))
        elif name.endswith("weight") and len(parameter.shape) > 1:
            scale = (2 / np.prod(parameter.shape[1:])) ** 0.5
            if "centernet" in name and parameter.shape[0] in (2, 20):  # its last layers
                scale /= 10  # or its scores round to 1
            values = random.normal(0, scale, parameter.shape)
            set_value(parameter, mx.nd.array(values))
    if net.name.startswith("ssd"):  # or its boxes overflow
        predictors = zip(net.class_predictors, net.box_predictors)
        for feature, pair in zip(net.features(images), predictors):
            for predictor in pair:
                weight = predictor.predictor.weight
                set_value(weight, weight.data() * feature.size**0.5 / feature.norm())
    return net


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "YOLOv3" else pytest.mark.slow) for name in NETWORKS],
)
def test_a_network_for_detection_or_segmentation_gives_mxnets_results(name, tmp_path):
    make, size = NETWORKS[name]
    mx.random.seed(0)
    images = some_images(2, 3, size, size)
    net = with_lively_predictors(make(), images)
    session = exported(net, tmp_path, [(1, 3, size, size)])
    assert_same_results(session, net, [images], MANY_ROUNDINGS)
    if name in ("SSD", "YOLOv3"):  # some rows are boxes, and their scores differ
        assert len(np.unique(net(images)[1].asnumpy())) > 10
