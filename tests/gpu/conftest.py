"""Fixtures of the tests on a GPU: the GPU, or why there is none, and helpers of other folders.

MXNet's arrays and parameters go to the current context. Here that is ``mx.gpu(0)``, so the helpers
of the CPU's tests, and many of those tests, run on the GPU as they are.
"""

import sys
from pathlib import Path

import mxnet as mx
import pytest

from recipes.data import render_shapes

TESTS = Path(__file__).resolve().parents[1]
sys.path += [
    str(TESTS / folder) for folder in ("amp", "cast", "formats", "kernels", "training", "updates")
]


@pytest.fixture(scope="session")
def gpu() -> mx.Context:
    """Return the first GPU, if MXNet computes on it."""
    device = mx.gpu(0)
    doctor = "mpgluon doctor says more"
    if mx.context.num_gpus() == 0:
        pytest.skip(f"MXNet sees no GPU: a CPU build, no driver, or none is there; {doctor}")
    try:
        (mx.nd.ones(1, ctx=device) + 1).wait_to_read()
    except mx.base.MXNetError as error:
        pytest.skip(f"MXNet does not compute on this GPU: {str(error).splitlines()[-1]}; {doctor}")
    return device


@pytest.fixture(scope="module", autouse=True)
def _repeatable():
    """Limit cuDNN to algorithms that add in a fixed order: training repeats bit for bit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MXNET_ENFORCE_DETERMINISM", "1")
        yield


@pytest.fixture(autouse=True)
def _on_the_gpu(gpu, _seeded):
    with gpu:
        yield


@pytest.fixture(scope="session")
def shapes(tmp_path_factory) -> Path:
    """Return a folder with the rendered data set that `training_helpers` asks for."""
    folder = tmp_path_factory.mktemp("shapes")
    render_shapes(folder, classes=10, images_per_class=6, seed=0)
    return folder
