"""The wheel of `make wheel`, installed with one extra at a time and nothing else.

`make test-clean` builds the wheel and runs this.
"""

import os
import re
import subprocess
import tempfile
import venv
import zipfile
from pathlib import Path

import mpgluon

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ["", "plots", "report", "zoo", "onnx", "serve", "mpi"]
NEED_A_GPU = {"cu117"}  # its own build of MXNet cannot be imported without NVIDIA's driver
OF_A_CHECKOUT = {  # whose code is not in the wheel
    *("recipes", "notebooks", "lab", "tensorboard", "safetensors", "evidence", "docs", "dev")
}


@pytest.fixture(scope="session")
def wheel():
    (found,) = (ROOT / "dist").glob(f"mpgluon-{mpgluon.__version__}-*.whl")
    return found


@pytest.mark.network
def test_the_wheel_holds_both_houses_and_the_command_for_the_systems_of_mxnet(wheel):
    assert "-py3-none-manylinux" in wheel.name
    packages = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    distribution = f"mpgluon-{mpgluon.__version__}.dist-info"
    assert packages == {"mpgluon", "mpgluon_tools", "mpgluon_command.py", distribution}


@pytest.mark.network
@pytest.mark.parametrize("extra", EXTRAS)
def test_every_name_and_command_works_or_names_its_extra(wheel, extra, tmp_path):
    with tempfile.TemporaryDirectory() as fresh:
        venv.create(fresh, with_pip=True)
        python = Path(fresh, "bin", "python")
        names = ",".join(filter(None, ("cpu", extra)))
        run(python, "-m", "pip", "--quiet", "install", f"{wheel}[{names}]")
        # No compiler is on this PATH, and no library of another run in this cache.
        own = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "PATH": f"{fresh}/bin"}
        environment = {**own, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        script = Path(__file__).with_name("every_name.py")
        run(python, script, tmp_path, *filter(None, [extra]), env=environment)


def run(*command, env=None):
    """Run a command; if it fails, fail with its output."""
    env = env or {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_extra_is_tried_or_belongs_to_no_tool_of_the_wheel():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[tool")[0]
    extras = set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))
    assert extras == {"cpu", *EXTRAS, *NEED_A_GPU, *OF_A_CHECKOUT} - {""}
    tools = "".join(path.read_text("utf-8") for path in ROOT.glob("mpgluon_tools/**/*.py"))
    assert set(re.findall(r'extra\("(\w+)"\)', tools)) <= set(EXTRAS)
