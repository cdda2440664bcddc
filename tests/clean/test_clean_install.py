"""The wheel of `make wheel`, installed with one extra at a time and nothing else.

`make test-clean` builds the wheel and runs this.
"""

import os
import re
import subprocess
import tempfile
import venv
import zipfile
from contextlib import contextmanager
from pathlib import Path

import mpgluon

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ["", "recipes", "plots", "report", "zoo", "onnx", "serve", "mpi"]
NEED_A_GPU = {"cu117"}  # its own build of MXNet cannot be imported without NVIDIA's driver
OF_A_CHECKOUT = {  # for what the wheel lacks, or for options of a script that it lacks
    *("notebooks", "lab", "tensorboard", "safetensors", "evidence", "docs", "dev")
}


@pytest.fixture(scope="session")
def wheel():
    (found,) = (ROOT / "dist").glob(f"mpgluon-{mpgluon.__version__}-*.whl")
    return found


@pytest.mark.network
def test_the_wheel_holds_the_houses_and_the_command_for_the_systems_of_mxnet(wheel):
    assert "-py3-none-manylinux" in wheel.name
    packages = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    distribution = f"mpgluon-{mpgluon.__version__}.dist-info"
    houses = {"mpgluon", "mpgluon_tools", "recipes"}
    assert packages == {*houses, "mpgluon_command.py", distribution}


@pytest.mark.network
@pytest.mark.parametrize(
    "extra", [*EXTRAS[:2], *(pytest.param(one, marks=pytest.mark.left_out) for one in EXTRAS[2:])]
)
def test_every_name_and_command_works_or_names_its_extra(wheel, extra, tmp_path):
    extras = ["cpu", *filter(None, [extra])]
    with environment([f"{wheel}[{','.join(extras)}]"]) as folder:
        # No compiler is on this PATH, and no library of another run in this cache.
        own = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "PATH": str(folder)}
        variables = {**own, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        script = Path(__file__).with_name("every_name.py")
        done = run(folder / "python", script, tmp_path, *extras[1:], env=variables)
    assert done.returncode == 0, done.stderr


@pytest.mark.network
def test_with_numpy_2_one_line_says_which_numpy_to_install(wheel, tmp_path):
    advice = re.compile(r'.*MXNet 1\.9\.1 cannot be .* NumPy 2\..*pip install "numpy<2"')
    with environment([f"{wheel}[cpu]"], ["onnx", "onnxruntime"]) as folder:
        imported = run(folder / "python", "-c", "import mpgluon", env={})
        assert advice.fullmatch(imported.stderr.splitlines()[-1]), imported.stderr
        (tmp_path / "numerics").mkdir()
        for name in ("bench", "diagnose", "export", "serve", "numerics"):
            done = run(folder / "mpgluon", name, tmp_path / "numerics", env={})
            assert done.returncode == 2
            assert advice.fullmatch(done.stderr.removesuffix("\n")), done.stderr
        doctor = run(folder / "mpgluon", "doctor", env={})
    assert 'fix: pip install "numpy<2"' in doctor.stdout
    assert "1 error," in doctor.stdout


@contextmanager
def environment(*installations):
    """Make an environment; pip installs one list after the other. Yield its folder of programs."""
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as fresh:
        venv.create(fresh, with_pip=True)
        folder = Path(fresh, "bin")
        for packages in installations:
            done = run(folder / "python", "-m", "pip", "--quiet", "install", *packages, env=without)
            assert done.returncode == 0, done.stderr
        yield folder


def run(*command, env):
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_every_extra_is_tried_or_belongs_to_no_tool_of_the_wheel():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[tool")[0]
    extras = set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))
    assert extras == {"cpu", *EXTRAS, *NEED_A_GPU, *OF_A_CHECKOUT} - {""}
    tools = "".join(path.read_text("utf-8") for path in ROOT.glob("mpgluon_tools/**/*.py"))
    assert set(re.findall(r'extra\("(\w+)"\)', tools)) <= set(EXTRAS)
