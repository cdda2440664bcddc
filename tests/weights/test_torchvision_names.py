"""Weights with torchvision's names in Gluon's twins, against forward passes written by hand."""

import sys
from types import ModuleType

from mpgluon import CheckpointError

import mxnet as mx
import numpy as np
import pytest
from torchvision_by_hand import TWINS, fitting_state, images, networks, random_state, run
from weights_helpers import MxnetOperators, distance, tolerance

from recipes.training.networks import build_network, load_pretrained
from recipes.weights import values_for

CLASSES = 7
SLOW = pytest.mark.slow
CASES = networks(CLASSES, vgg_pixels=32)
PIXELS = {name: 32 if name.startswith("vgg") else 64 for name in CASES}


def network_of(name, classes=CLASSES):
    size = PIXELS[name]
    return build_network(TWINS[name], classes=classes, image_size=size, devices=[mx.cpu()])


def save(state, path):
    from safetensors.numpy import save_file

    save_file(state, str(path))
    return path


def values_in(net):
    mx.nd.waitall()
    return {k: p.data().asnumpy() for k, p in net._collect_params_with_prefix().items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[SLOW] * one.startswith("vgg")) for one in CASES]
)
def test_a_twin_computes_what_torchvisions_network_does(tmp_path, name):
    shapes, forward = CASES[name]
    state, pixels = fitting_state(name, shapes), PIXELS[name]
    net = network_of(name)
    # Sorted by name in the file, which is not the order of the layers.
    assert load_pretrained(net, save(state, tmp_path / "w.safetensors"), classes=CLASSES) == []
    expected = run(MxnetOperators, forward, state, pixels)
    found = net(mx.nd.array(images(pixels))).asnumpy()
    bound = tolerance(forward, state, pixels)
    assert 0 < bound < 0.01 * np.linalg.norm(expected)
    assert distance(found, expected) <= bound


@pytest.mark.parametrize(
    "name", ["resnet18", "mobilenet_v2", "efficientnet_lite0", pytest.param("vgg11", marks=SLOW)]
)
def test_a_head_of_another_size_is_new_and_the_rest_is_loaded(tmp_path, name):
    state = random_state(CASES[name][0])  # with a bias in MobileNetV2's head too
    net = network_of(name, classes=CLASSES + 2)
    before = values_in(net)
    fresh = load_pretrained(net, save(state, tmp_path / "w.safetensors"), classes=CLASSES + 2)
    after = values_in(net)
    heads = {
        "resnet18": ["fc.weight", "fc.bias"],
        "vgg11": ["output.weight", "output.bias"],
        "mobilenet_v2": ["output.0.weight"],
        "efficientnet_lite0": ["fc.weight", "fc.bias"],
    }
    assert sorted(fresh) == sorted(heads[name])
    assert all((after[key] == before[key]).all() for key in fresh)
    # Where the values drawn are zeros or ones, as in a new BatchNorm, others have come.
    assert all((after[key] != before[key]).any() for key in before.keys() - fresh - KEPT_ALIKE)


# MobileNetV2's first convolution in Gluon that torchvision leaves out: an identity is put there,
# whose BatchNorm has the values of a new one.
KEPT_ALIKE = {f"features.3.out.1.{word}" for word in ("beta", "running_mean", "running_var")}


def test_every_difference_is_listed_by_name_and_shape_and_nothing_is_loaded(tmp_path):
    state = random_state(CASES["resnet18"][0])
    state["layer1.0.conv1.weight"] = np.zeros((64, 64, 1, 1), np.float32)
    state["layer2.1.bn1.bias"] = state["layer2.1.bn1.bias"].astype(np.int32)
    state["layer4.2.conv1.weight"] = np.zeros((512, 512, 3, 3), np.float32)
    for number in range(2):
        del state[f"layer3.{number}.bn2.running_mean"], state[f"layer3.{number}.bn2.weight"]
    net = network_of("resnet18")
    before = values_in(net)
    path = save(state, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_pretrained(net, path, classes=CLASSES)
    message = str(error.value)
    for part in (
        str(path),
        "layer1.0.conv1.weight is (64, 64, 1, 1) in the file, "
        "layer1.0.conv1.weight (64, 64, 3, 3) in the network",
        "layer2.1.bn1.bias is int32 (128,) in the file, layer2.1.bn1.beta (128,)",
        "layer4.2.conv1.weight (512, 512, 3, 3) is in the file only",
        "layer3.0.bn2.running_mean (256,) is in the network only",
        "layer3.1.bn2.gamma (256,) is in the network only",
        "resnet50_v1b",
    ):
        assert part in message
    after = values_in(net)
    assert all((after[key] == before[key]).all() for key in before)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        # The stride is elsewhere in MXNet's own ResNet, whose names differ.
        ("resnet50", "resnet50_v1", "is in the file only"),
        ("resnet18", "resnet34_v1b", r"layer1\.2\.conv1\.weight \(64, .* is in the network"),
        pytest.param("vgg11", "vgg13", "in the network only", marks=SLOW),
        ("vgg11", "vgg11_bn", r"features\.1\.gamma \(64,\) is in the network only"),
        pytest.param("vgg13_bn", "vgg13", "is in the file only", marks=SLOW),
        ("mobilenet_v2", "efficientnet_lite0", r"0\.project_conv\.weight \(16, .* in the network"),
        ("efficientnet_lite0", "mobilenetv2_1.0", "is in the file only"),
        ("mobilenet_v2", "mobilenetv2_0.5", r"features\.0\.0\.weight is \(32, 3, 3, 3\)"),
    ],
)
def test_another_network_than_the_twin_is_refused(theirs, ours, message):
    state = random_state(CASES[theirs][0])
    net = build_network(ours, classes=CLASSES, image_size=PIXELS[theirs], devices=[mx.cpu()])
    shapes = {n: tuple(p.shape) for n, p in net._collect_params_with_prefix().items()}
    with pytest.raises(CheckpointError, match=message):
        values_for(state, shapes, classes=CLASSES)


def test_gluoncv_with_pytorch_is_refused_with_advice(monkeypatch):
    class Refusing(ModuleType):  # as gluoncv 0.10 does where PyTorch 2 is installed
        def __getattr__(self, name):
            raise RuntimeError("torch>=1.4.0,<2.0.0 is required")

    monkeypatch.setitem(sys.modules, "gluoncv", Refusing("gluoncv"))
    with pytest.raises(ValueError, match=r"'resnet50_v1b' may be .* environment without PyTorch"):
        build_network("resnet50_v1b", classes=3, image_size=32, devices=[mx.cpu()])
