"""An installed package with prebuilt libraries has native operators where there is no compiler."""

import shutil
import subprocess
import sys
from pathlib import Path

from mpgluon import kernels

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
