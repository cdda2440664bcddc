"""A release: one version in all files, and a source distribution that installs and trains."""

import os
import re
import subprocess
import venv
from pathlib import Path

import mpgluon
from mpgluon.kernels import compiling

import pytest

ROOT = Path(__file__).resolve().parents[1]

# The first program of a new user: cast, one training step, and the operators that it used.
FIRST_STEP = """
import sys

import mpgluon
from mpgluon import amp

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

assert mpgluon.__file__.startswith(sys.argv[1]), mpgluon.__file__
net = nn.HybridSequential()
net.add(nn.Conv2D(8, 3, in_channels=3), nn.BatchNorm(in_channels=8), nn.Flatten())
net.add(nn.Dense(10, in_units=8 * 6 * 6))
net.initialize(mx.init.Xavier())
assert mpgluon.cast_block(net).parameters_cast == 4
trainer = gluon.Trainer(
    net.collect_params(), "sgd", {"learning_rate": 0.1, "multi_precision": True}
)
amp.init_trainer(trainer, 1024)
images = mx.nd.random.normal(shape=(4, 3, 8, 8))
labels = mx.nd.array([0, 1, 2, 3], dtype="int32")
before = net[-1].weight.data().copy()
with autograd.record():
    loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(images), labels)
    with amp.scale_loss(loss, trainer) as scaled_loss:
        autograd.backward(scaled_loss)
trainer.step(4)
assert not amp.step_was_skipped(trainer)
assert (net[-1].weight.data() != before).sum().asscalar() > 0
print(mpgluon.__version__)
"""


def test_package_and_changelog_have_one_version():
    pyproject = (ROOT / "pyproject.toml").read_text("utf-8")
    (declared,) = re.findall(r'^version = "(.*)"$', pyproject, re.MULTILINE)
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    newest = next(one for one in headings if one != "Unreleased")
    assert (declared, newest) == (mpgluon.__version__, mpgluon.__version__)


def run(*command: object, **options) -> str:
    """Return the output of a command; if it fails, fail with the output."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **options}
    done = subprocess.run([str(part) for part in command], check=False, **options)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.network
def test_a_source_distribution_installs_in_a_fresh_environment_and_trains(tmp_path):
    if not compiling.compiler():
        pytest.skip("there is no C++ compiler")
    python = tmp_path / "fresh" / "bin" / "python"
    venv.create(tmp_path / "fresh", with_pip=True)
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    run(*pip, "build==1.6.1")
    run(python, "-m", "build", "--sdist", "--outdir", tmp_path / "dist", ROOT)
    (source,) = (tmp_path / "dist").iterdir()
    assert source.name == f"mpgluon-{mpgluon.__version__}.tar.gz"

    run(*pip, f"{source}[cpu]")
    own = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    own.pop("PYTHONPATH", None)
    where = {"cwd": tmp_path, "env": own}
    trained = run(python, "-W", "ignore", "-c", FIRST_STEP, tmp_path / "fresh", **where)
    assert trained.split()[-1] == mpgluon.__version__
    said = run(python, "-W", "ignore", "-m", "mpgluon.kernels", **where)
    assert said.startswith("Native operators: compiled for this processor")


def test_the_environment_for_a_gpu_takes_the_systems_python_where_there_is_no_other(tmp_path):
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\n")
    driver.chmod(0o755)
    own = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    commands = ["make", "-n", "test", "WITH=gpu", f"GPU={tmp_path}/gpu", "PYTHON=python3.99"]
    planned = run(*commands, cwd=ROOT, env=own)
    assert f"\npython3 -m venv {tmp_path}/gpu\n" in planned
    assert f"{tmp_path}/gpu/bin/python -m pytest tests/gpu" in planned


def test_finetune_trains_on_caltech_101_or_on_photographs_of_ones_own():
    planned = run("make", "-n", "finetune", cwd=ROOT)
    assert "scripts/download_caltech.py --data-dir data\n" in planned
    assert "mpgluon finetune" not in planned
    words = " ".join(planned.replace("\\\n", " ").split())
    assert (
        "--model efficientnet_lite0 --pretrained data/efficientnet_lite0.pth --dtype float16 "
        "--data-dir data --train-per-class 30 --test-per-class 50 --image-size 160 "
        "--test-image-size 192 --min-crop-area 0.35 --batch-size 32 --epochs 5 --warmup-epochs 1 "
        "--learning-rate 0.005 --head-rate 10 --output-dir runs/finetune --resume=auto"
    ) in words
    planned = run("make", "-n", "finetune", "PHOTOS=my photographs", "FINETUNE=runs/mine", cwd=ROOT)
    assert (
        'mpgluon finetune "my photographs" --weights data/efficientnet_lite0.pth '
        '--output-dir "runs/mine"\n'
    ) in planned
    assert "caltech" not in planned


def test_the_test_files_that_targets_name_exist():
    named = set(re.findall(r"(?:study/)?tests/[\w/]+\.py", (ROOT / "Makefile").read_text("utf-8")))
    assert len(named) > 10
    assert {name for name in named if not (ROOT / name).is_file()} == set()


def test_every_test_that_needs_the_environment_of_peers_is_run_there():
    planned = run("make", "-n", "test", "WITH=peers", cwd=ROOT)
    needs = re.compile(r'/ "\.venv-peers" /|import NEEDS[_]TORCH')
    needed = [
        path.relative_to(ROOT).as_posix()
        for folder in ("tests", "study/tests")
        for path in sorted((ROOT / folder).rglob("test_*.py"))
        if needs.search(path.read_text("utf-8"))
    ]
    elsewhere = {
        "study/tests/test_benchmark_script.py",  # without it
        "tests/third_party/test_gluonts.py",  # in two environments
    }
    assert elsewhere < set(needed)
    assert {name for name in needed if name not in planned} == elsewhere
