"""Networks by name, and networks that start from a parameter file."""

from mpgluon import CheckpointError
from mpgluon.base.blocks import blocks_of

import mxnet as mx
import numpy as np
import pytest
from helpers import assert_same_bits, parameters_of
from mxnet import gluon
from mxnet.gluon import nn

from recipes.training.config import TrainingConfig
from recipes.training.networks import (
    build_network,
    has_input_normalization,
    load_pretrained,
    prepare_network,
)

ONE, TWO = [mx.cpu()], [mx.cpu(0), mx.cpu(1)]


def make_net(classes: int = 4, *, seed: int = 0, prefix=None) -> gluon.HybridBlock:
    mx.random.seed(seed)
    np.random.seed(seed)
    net = nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        net.add(nn.Conv2D(6, 3, in_channels=3), nn.BatchNorm(in_channels=6))
        net.add(nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(classes, in_units=6))
    net.initialize(mx.init.Normal(1))
    return net


@pytest.fixture
def pretrained(tmp_path):
    """Return a network of 4 classes and the file with its parameters."""
    net = make_net(seed=1)
    path = tmp_path / "pretrained.params"
    net.save_parameters(str(path))
    return net, path


@pytest.mark.parametrize(
    ("name", "image_size"),
    [("squeezenet1.1", 224), ("resnet18_v2", 32), ("cifar_resnet20_v1", 32), ("resnet18_v1b", 32)],
)
@pytest.mark.parametrize("devices", [ONE, TWO], ids=["one device", "two devices"])
def test_a_network_of_either_zoo_is_ready_on_every_device(name, image_size, devices):
    net = build_network(name, classes=7, image_size=image_size, devices=devices)
    for parameter in net.collect_params().values():
        assert 0 not in parameter.shape
        assert parameter.list_ctx() == devices
        copies = [data.asnumpy() for data in parameter.list_data()]
        assert all(copy.dtype == np.float32 for copy in copies)
        assert all(copy.tobytes() == copies[0].tobytes() for copy in copies)
    for device in devices:
        assert net(mx.nd.zeros((2, 3, image_size, image_size), ctx=device)).shape == (2, 7)


@pytest.mark.parametrize("test_image_size", [None, 48])
@pytest.mark.parametrize("model", ["cifar_resnet20_v1", "mobilenetv3_small"])
def test_averages_have_one_window_where_all_images_have_one_size(model, test_image_size):
    config = TrainingConfig(model=model, image_size=32, test_image_size=test_image_size)
    net = prepare_network(config, classes=7, devices=ONE).net
    global_ones = [
        layer._kwargs["global_pool"]
        for layer in blocks_of(net)
        if isinstance(layer, nn.GlobalAvgPool2D)
    ]
    assert global_ones
    assert set(global_ones) == {test_image_size is not None}
    plain = build_network(model, classes=7, image_size=32, devices=ONE)
    for name, parameter in plain._collect_params_with_prefix().items():
        net._collect_params_with_prefix()[name].set_data(parameter.data())
    images = mx.nd.random.normal(shape=(2, 3, 32, 32))
    assert_same_bits(net(images).asnumpy(), plain(images).asnumpy())


def test_a_network_with_an_input_normalization_learns_its_statistics():
    net = build_network("resnet18_v2", classes=5, image_size=32, devices=ONE)
    assert has_input_normalization(net)
    assert not has_input_normalization(
        build_network("resnet18_v1", classes=5, image_size=32, devices=ONE)
    )
    first = net.features[0]
    images = mx.nd.random.normal(3, 2, (4, 3, 32, 32))
    for asks, changes in ((False, False), (True, True)):
        before = first.running_mean.data().asnumpy()
        if asks:
            images.attach_grad()
        with mx.autograd.record():
            result = net(images)
        result.backward()
        assert (first.running_mean.data().asnumpy() != before).all() == changes


@pytest.mark.parametrize("name", ["resnet51_v3", ""])
def test_a_name_in_no_zoo_is_refused_with_where_to_look(name):
    with pytest.raises(ValueError, match=r"no model zoo has .* called .* gluoncv\.model_zoo"):
        build_network(name, classes=5, image_size=32, devices=ONE)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        # Takes other options, has no option "classes", ignores it, and gives two results.
        ("ssd_512_resnet50_v1_voc", "is not an image classifier: .* KeyError, 'classes'"),
        ("simple_pose_resnet18_v1b", "is not an image classifier: .*unexpected .*'classes'"),
        ("mobilenet1.0_int8", "8-bit integers; choose .* made from, mobilenet1.0$"),
        ("hrnet_w18_small_v1_c", r"for 5 classes: .* into \(1, 1000\), not \(1, 5\)"),
        ("nasnet_4_1056", r"for 5 classes: .* into \(1, 5\), \(1, 5\), not \(1, 5\)"),
    ],
)
def test_a_network_that_is_not_a_classifier_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        build_network(name, classes=5, image_size=64, devices=ONE)


@pytest.mark.parametrize("name", ["alexnet", "inceptionv3"])  # fails in a pooling, in a convolution
def test_an_image_that_is_too_small_is_refused_with_its_size(name):
    with pytest.raises(ValueError, match=f"{name} does not work on images of 32 x 32 .*larger"):
        build_network(name, classes=5, image_size=32, devices=ONE)


def test_a_head_of_another_size_keeps_its_initial_values_and_all_else_is_loaded(pretrained):
    source, path = pretrained
    net = make_net(9)
    before = parameters_of(net)
    fresh = load_pretrained(net, path, classes=9)
    assert sorted(fresh) == ["4.bias", "4.weight"]
    after = parameters_of(net)
    assert_same_bits({name: after[name] for name in fresh}, {name: before[name] for name in fresh})
    rest = before.keys() - fresh
    expected = parameters_of(source)
    assert_same_bits({name: after[name] for name in rest}, {name: expected[name] for name in rest})


def test_an_exported_networks_file_is_loaded_by_its_own_names(tmp_path):
    source, net = (make_net(seed=seed, prefix="pretrained_") for seed in (1, 0))
    source.hybridize()
    source(mx.nd.zeros((1, 3, 8, 8)))
    source.export(str(tmp_path / "exported"))
    path = tmp_path / "exported-0000.params"
    assert {name.partition(":")[0] for name in mx.nd.load(str(path))} == {"arg", "aux"}
    assert load_pretrained(net, path, classes=4) == []
    assert_same_bits(parameters_of(net), parameters_of(source))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_file_of_as_many_classes_replaces_all_values_and_is_widened_exactly(pretrained, dtype):
    source, path = pretrained
    values = {name: value.astype(dtype) for name, value in parameters_of(source).items()}
    mx.nd.save(str(path), {name: mx.nd.array(v, dtype=dtype) for name, v in values.items()})
    net = make_net()
    assert load_pretrained(net, path, classes=4) == []
    assert_same_bits(parameters_of(net), {n: v.astype(np.float32) for n, v in values.items()})


MISSING = ({"0.weight": None}, ["0.weight is missing in the file"])
EXTRA = ({"5.weight": (3,)}, ["5.weight is in the file only"])
WRONG_SHAPE = ({"1.gamma": (7,)}, ["1.gamma is ('float32', (7,)) in the file and ('float32', (6,"])


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        MISSING,
        EXTRA,
        WRONG_SHAPE,
        # Another number of inputs, and not of classes only.
        ({"4.weight": (4, 7)}, ["4.weight is ('float32', (4, 7)) in the file"]),
        ({**MISSING[0], **EXTRA[0], **WRONG_SHAPE[0]}, [*MISSING[1], *EXTRA[1], *WRONG_SHAPE[1]]),
    ],
)
def test_a_file_that_does_not_fit_is_refused_and_changes_nothing(pretrained, changes, messages):
    source, path = pretrained
    values = {n: mx.nd.array(v) for n, v in parameters_of(source).items() if n not in changes}
    values |= {name: mx.nd.zeros(shape) for name, shape in changes.items() if shape is not None}
    mx.nd.save(str(path), values)
    net = make_net()
    before = parameters_of(net)
    with pytest.raises(CheckpointError, match="does not fit this network") as error:
        load_pretrained(net, path, classes=4)
    assert all(message in str(error.value) for message in messages)
    assert str(path) in str(error.value)
    assert_same_bits(parameters_of(net), before)


@pytest.mark.parametrize("content", [b"", b"a line of text\n" * 100, None], ids=repr)
def test_other_files_than_parameter_files_are_refused(tmp_path, content):
    path = tmp_path / "weights.params"
    if content is not None:
        path.write_bytes(content)
    net = make_net()
    before = parameters_of(net)
    with pytest.raises(CheckpointError, match=r"not an MXNet parameter file|no parameter file"):
        load_pretrained(net, path, classes=4)
    assert_same_bits(parameters_of(net), before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "image_size", "nominal"),
    [("googlenet", 32, 224), ("inceptionv3", 75, 299), ("densenet121", 32, 224)],
)
def test_a_fixed_final_average_adapts_to_smaller_images(name, image_size, nominal):
    net = build_network(name, classes=5, image_size=image_size, devices=ONE)
    as_published = build_network(name, classes=5, image_size=nominal, devices=ONE)
    values = parameters_of(net)
    for structural_name, published in as_published._collect_params_with_prefix().items():
        published.set_data(mx.nd.array(values[structural_name]))
    # All places of an image of the nominal size: the average that was published.
    images = mx.nd.random.uniform(shape=(1, 3, nominal, nominal))
    np.testing.assert_allclose(
        net(images).asnumpy(), as_published(images).asnumpy(), rtol=1e-4, atol=1e-5
    )
