"""PyTorch on a GPU trains the same network by the same recipe as we do; compared on a CPU.

PyTorch has an environment of its own, which ``make test WITH=peers`` makes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mpgluon.formats.float_format import format_named
from mpgluon.formats.scaling import round_scaled
from mpgluon.tools.zoo import build_network

import mxnet as mx
import numpy as np
import pytest
from helpers import module_from

from recipes.training.optimizers import make_optimizer
from study.experiments.cifar10 import RECIPE

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "study" / "scripts" / "record_tensor_core_training.py"
TORCH = ROOT / ".venv-peers" / "bin" / "python"
needs_torch = pytest.mark.skipif(
    not TORCH.exists(), reason="PyTorch has no environment here; make test WITH=peers makes one"
)

# Writes results of the FP8 convolution, with operands that it draws, and a step of a run in FP8.
COMPUTE = """
import sys
import numpy as np, torch
from study.experiments import tensor_core_training

torch.manual_seed(0)
found = {}
for kernel, stride in ((3, 1), (3, 2), (1, 2)):
    data = torch.randn(16, 16, 8, 8).to(torch.bfloat16).requires_grad_()
    weight = torch.randn(32, 16, kernel, kernel, requires_grad=True)
    for sums in ("float32", "default"):
        result = tensor_core_training.Convolution8.apply(data, weight, stride, sums)
        gradient = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
        gradient = gradient.to(torch.bfloat16)
        gradients = torch.autograd.grad(result, (data, weight), gradient)
        values = dict(zip(("data", "weight", "gradient", "result", "of_data", "of_weight"),
                          (data, weight, gradient, result, *gradients)))
        found.update({f"{kernel} {stride} {sums} {name}": one.detach().float().numpy()
                      for name, one in values.items()})
found["parameters"] = sum(p.numel() for p in tensor_core_training.Network("float32").parameters())
images = torch.randint(0, 255, (128, 32, 32, 3), dtype=torch.uint8)
run = tensor_core_training.Run("e4m3", 0, (images, torch.arange(128) % 10))
run.step()
found["rates"] = run.rates.numpy()
found["losses"] = run.losses[:1].numpy()
np.savez(sys.argv[1], **found)
"""


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    path = tmp_path_factory.mktemp("torch") / "computed.npz"
    command = [str(TORCH), "-c", COMPUTE, str(path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    with np.load(path) as values:
        return dict(values)


def products(data, weight, gradient, stride):
    """Return a convolution and its gradients in float64, a place of the kernel at a time."""
    kernel, side = weight.shape[2], weight.shape[2] // 2
    padded = np.pad(data, ((0, 0), (0, 0), (side, side), (side, side)))
    rows, columns = gradient.shape[2:]
    result = np.zeros(gradient.shape)
    of_padded, of_weight = np.zeros(padded.shape), np.zeros(weight.shape)
    for y, x in np.ndindex(kernel, kernel):
        there = np.s_[:, :, y : y + stride * rows : stride, x : x + stride * columns : stride]
        result += np.einsum("nchw,fc->nfhw", padded[there], weight[:, :, y, x])
        of_padded[there] += np.einsum("nfhw,fc->nchw", gradient, weight[:, :, y, x])
        of_weight[:, :, y, x] = np.einsum("nfhw,nchw->fc", gradient, padded[there])
    inside = np.s_[:, :, side : side + data.shape[2], side : side + data.shape[3]]
    return result, of_padded[inside], of_weight


@needs_torch
@pytest.mark.parametrize("sums", ["float32", "default"])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (1, 2)])
def test_its_products_are_those_of_operands_that_mpgluon_rounds(computed, kernel, stride, sums):
    case = {
        name: computed[f"{kernel} {stride} {sums} {name}"]
        for name in ("data", "weight", "gradient", "result", "of_data", "of_weight")
    }
    data, weight = (
        round_scaled(case[name], format_named("float8_e4m3")).astype(np.float64)
        for name in ("data", "weight")
    )
    gradient = round_scaled(case["gradient"], format_named("float8_e5m2")).astype(np.float64)
    expected = products(data, weight, gradient, stride)
    magnitudes = products(abs(data), abs(weight), abs(gradient), stride)
    for name, exact, magnitude in zip(("result", "of_data", "of_weight"), expected, magnitudes):
        # FP32 sums, at most 1,024 terms; results and gradients of data are rounded to BF16.
        bound = 2.0**-14 * magnitude + (2.0**-8 * abs(exact) if name != "of_weight" else 0)
        assert (abs(case[name] - exact) <= bound).all()
        assert (exact != 0).mean() > 0.2  # with a stride, most data have no gradient


@needs_torch
def test_the_network_has_as_many_parameters_and_steps_the_same_rates(computed):
    net = build_network(RECIPE.model, classes=10, image_size=RECIPE.image_size, devices=[mx.cpu()])
    learned = [one for one in net.collect_params().values() if one.grad_req != "null"]
    assert computed["parameters"] == sum(np.prod(one.shape) for one in learned)
    steps = len(computed["rates"])
    schedule = make_optimizer(RECIPE, steps, RECIPE.batch_size).lr_scheduler
    expected = [schedule(step) for step in range(1, steps + 1)]
    np.testing.assert_allclose(computed["rates"], expected, rtol=1e-6, atol=1e-8)
    assert 1 < computed["losses"] < 5


def test_without_pytorch_the_script_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert module_from(SCRIPT).main([]) == 2
    assert "error: this needs PyTorch" in capsys.readouterr().err
