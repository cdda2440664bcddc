"""State dicts that PyTorch wrote, in Gluon's twins: outputs equal to PyTorch's own.

gluoncv refuses to be imported where PyTorch 2 is installed, so PyTorch computes in an environment
of its own, which ``make test WITH=peers`` makes. torchvision is not needed: the forward passes are
written by hand.
"""

import os
import subprocess
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from torchvision_by_hand import NETWORKS, TWINS, efficientnet, fitting_state, images
from weights_helpers import distance, tolerance

from recipes.training.networks import build_network, load_pretrained
from recipes.weights import read_state_dict

HERE = Path(__file__).resolve().parent
ENVIRONMENT = HERE.parents[1] / ".venv-peers"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not ENVIRONMENT.is_dir(),
        reason="PyTorch has no environment here; make test WITH=peers makes one and runs this",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with what PyTorch wrote."""
    folder = tmp_path_factory.mktemp("pytorch")
    command = [str(ENVIRONMENT / "bin" / "python"), "pytorch_side.py", str(folder)]
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    finished = subprocess.run(
        command, cwd=HERE, env=own, capture_output=True, text=True, timeout=600, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return folder


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_twin_gives_pytorchs_outputs(folder, name, suffix):
    shapes, forward = NETWORKS[name]
    net = build_network(TWINS[name], classes=1000, image_size=224, devices=[mx.cpu()])
    assert load_pretrained(net, folder / f"{name}{suffix}", classes=1000) == []
    found = net(mx.nd.array(images(224))).asnumpy()
    expected = np.load(folder / f"{name}.npy")
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).all()
    assert distance(found, expected) <= tolerance(forward, fitting_state(name, shapes), 224)


def test_published_weights_give_the_logits_of_their_own_implementation(folder):
    weights = folder / "published.pth"
    net = build_network("efficientnet_lite0", classes=1000, image_size=224, devices=[mx.cpu()])
    assert load_pretrained(net, weights, classes=1000) == []
    found = net(mx.nd.array(images(224))).asnumpy()
    expected = np.load(folder / "published.npy")
    assert distance(found, expected) <= tolerance(efficientnet, read_state_dict(weights), 224)


def test_every_kind_of_tensor_is_read_to_the_bit(folder):
    found = read_state_dict(folder / "kinds.pth")
    expected = np.load(folder / "kinds.npz")
    assert list(found) == list(expected)
    for name, values in expected.items():
        assert found[name].shape == values.shape
        assert (found[name] == values).all()


def test_a_file_in_the_format_of_before_pytorch_1_6_has_the_same_arrays(folder):
    old, new = (read_state_dict(folder / f"{name}.pth") for name in ("old", "state"))
    assert list(old) == list(new) != []
    assert all((old[name] == new[name]).all() for name in new)
