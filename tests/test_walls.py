"""The imports that each folder is allowed: NumPy and MXNet for the library, and lower houses."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from helpers import run_python

ROOT = Path(__file__).resolve().parents[1]
DOORS = [ROOT / "mpgluon" / "__main__.py", ROOT / "mpgluon_command.py"]  # of the commands
# The public names of the second house, in the first one.
FACES = [
    *(ROOT / "mpgluon" / f"{name}.py" for name in ("diagnostics", "deployment")),
    *sorted(ROOT.glob("mpgluon/tools/*.py")),
]
TOOLS = [*sorted(ROOT.glob("mpgluon_tools/**/*.py")), *FACES, *DOORS]
LIBRARY = sorted({*ROOT.glob("mpgluon/**/*.py")} - set(TOOLS))
RECIPES = sorted(ROOT.glob("recipes/**/*.py"))
OUTSIDE = {"scripts", "notebooks", "teaching", "study", "tests"}

# The rows of CONTRIBUTING's table: a module imports from the rows before its own, or its own.
FLOORS = (
    "errors",
    "base",
    "formats",
    "kernels",
    "graph",
    "cast",
    "updates",
    "trainer amp contrib_amp preparation fp16_utils estimator",
    "checkpoint",
    "distributed",
)
# Packages that an extra brings, imported when several processes are asked for.
OPTIONAL = {"mpgluon/distributed/mpi.py": {"mpi4py"}}
# The packages of the extras, and what only tests and documentation need.
NOT_THE_LIBRARYS = (
    "PIL tqdm matplotlib gluoncv jinja2 tabulate safetensors onnx onnxruntime tensorboard mpi4py "
    "flask scipy IPython pytest"
)


def imported_names(path: Path) -> set[str]:
    """Return the imports of a file, anywhere in it, as dotted names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def packages(path: Path) -> set[str]:
    """Return the packages that a file imports, less the standard library."""
    found = {name.partition(".")[0] for name in imported_names(path)}
    return found - set(sys.stdlib_module_names)


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[1].removesuffix(".py")


def offenders(paths: list[Path], forbidden: Callable[[Path], set[str]]) -> dict[str, set[str]]:
    """Return the files with forbidden imports, and these imports."""
    found = {str(path.relative_to(ROOT)): forbidden(path) for path in paths}
    return {path: names for path, names in found.items() if names}


def test_the_library_imports_numpy_and_mxnet_only():
    allowed = {"numpy", "mxnet", "mpgluon"}
    others = offenders(LIBRARY, lambda path: packages(path) - allowed)
    assert others == OPTIONAL
    formats = [path for path in LIBRARY if room_of(path) == "formats"]
    assert offenders(formats, lambda path: packages(path) & {"mxnet"}) == {}


_OF_TOOLS = ("mpgluon_tools", "mpgluon.tools", "mpgluon.diagnostics", "mpgluon.deployment")


def test_each_house_uses_only_those_below_it():
    def tools(path: Path) -> set[str]:
        return {name for name in imported_names(path) if name.startswith(_OF_TOOLS)}

    assert offenders(LIBRARY, tools) == {}
    assert offenders(TOOLS, lambda path: packages(path) & (OUTSIDE | {"recipes"})) == {}
    assert offenders(RECIPES, lambda path: packages(path) & OUTSIDE) == {}


def test_only_the_faces_name_the_second_house():
    naming = [path for path in ROOT.glob("mpgluon/**/*.py") if "mpgluon_tools" in path.read_text()]
    assert set(naming) == set(FACES)
    assert max(len(path.read_text().splitlines()) for path in FACES) <= 12


def test_no_module_of_the_library_imports_upwards():
    floor_of = {room: number for number, rooms in enumerate(FLOORS) for room in rooms.split()}
    modules = [path for path in LIBRARY if room_of(path) != "__init__"]
    assert set(map(room_of, modules)) == set(floor_of)

    def above(path: Path) -> set[str]:
        used = {name.split(".")[1] for name in imported_names(path) if name.startswith("mpgluon.")}
        floor = floor_of[room_of(path)]
        return {room for room in used & set(floor_of) if floor_of[room] > floor}

    assert offenders(modules, above) == {}


def test_the_names_of_contrib_amp_do_not_use_amp_which_offers_them():
    (path,) = (path for path in LIBRARY if room_of(path) == "contrib_amp")
    upwards = ("mpgluon.amp", "mpgluon.preparation", "mpgluon.estimator")
    assert not {name for name in imported_names(path) if name.startswith(upwards)}


def run(code: str) -> str:
    blocked = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {NOT_THE_LIBRARYS.split()!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())

import importlib.metadata

def not_installed(name):
    raise importlib.metadata.PackageNotFoundError(name)

importlib.metadata.Distribution.from_name = not_installed
"""
    done = run_python(blocked + code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.multiprocess
def test_a_network_trains_is_diagnosed_and_recorded_without_the_extras(tmp_path):
    run(f"""
import mpgluon
from mpgluon import amp, diagnostics
import mxnet as mx
from mxnet import autograd, gluon

net = gluon.nn.Dense(2, in_units=3)
net.initialize()
mpgluon.cast_block(net)
trainer = gluon.Trainer(net.collect_params(), "sgd", {{"multi_precision": True}})
amp.init_trainer(trainer)
x = mx.nd.ones((4, 3))
flight = diagnostics.FlightRecorder(net, trainer, {str(tmp_path / "flight")!r})
numerics = diagnostics.NumericsRecorder(net, trainer, {str(tmp_path / "numerics")!r}, every=1)
with flight.step(x, x[:, 0]), numerics.step(x, x[:, 0]):
    with autograd.record():
        loss = net(x * 7e4).sum()  # overflows: both record the step
        with amp.scale_loss(loss, trainer) as scaled_loss:
            scaled_loss.backward()
    trainer.step(4)
batch = diagnostics.Batch(x, mx.nd.ones((4, 2)), gluon.loss.L2Loss())
print(diagnostics.range_report(net, batch))
mpgluon.save_checkpoint({str(tmp_path / "checkpoint")!r}, net, trainer)
""")
    assert all(list((tmp_path / recorder).iterdir()) for recorder in ("flight", "numerics"))


EXTRAS = [
    ("from mpgluon.tools.plots import png; png(None)", "matplotlib", "plots"),
    ("import mpgluon_tools.report", "jinja2", "report"),
    ("import mpgluon_tools.recorder.numerics.page", "jinja2", "report"),
    ("from mpgluon.diagnostics import diagnose", "jinja2", "report"),
    ("from mpgluon.tools.onnx import read_metadata; read_metadata('net.onnx')", "onnx", "onnx"),
    (
        "from mpgluon.tools.zoo import refuse_unknown_network as f; f('resnet18_v1b')",
        "gluoncv",
        "zoo",
    ),
    ("import recipes.training", "PIL", "recipes"),
]


@pytest.mark.multiprocess
def test_a_tool_without_its_extra_raises_with_the_name_of_the_extra():
    run(f"""
import os
import mpgluon

for use, package, extra in {EXTRAS}:  # each in a process of its own
    if os.fork() == 0:
        try:
            exec(use)
        except ImportError as error:
            command = f"pip install 'mpgluon[{{extra}}]'"
            assert str(error) == f"{{package}} is not installed; install it with {{command}}"
            os._exit(0)
    assert os.wait()[1] == 0, use
""")


# Modules that only some programs need, and the use that imports them.
LATER = {
    "mpgluon.amp": "train",
    "mpgluon.trainer.step": "train",
    "mpgluon.updates.masters": "train",
    "mpgluon.checkpoint": "save or load",
    "mpgluon.cast.plain_graph": "prepare a network in FP32",
    "mpgluon.graph.bfloat16": "hybridize",
    "mpgluon.graph.grid": "hybridize",
    "mpgluon.kernels.bfloat16": "compute in bfloat16",
    "mpgluon.kernels.library": "cast for a CPU, which may compile",
    "mpgluon.cast.symbol_block": "cast an imported graph",
    "mpgluon.cast.deconvolution": "compute a Deconvolution",
}


@pytest.mark.multiprocess
def test_what_only_some_programs_need_is_imported_by_these_and_can_be():
    modules = [path.relative_to(ROOT).with_suffix("") for path in LIBRARY]
    names = [".".join(path.parts).removesuffix(".__init__") for path in modules]
    names = [name for name in names if not name.endswith(("__main__", "kernels.check"))]
    first, every = run(f"""
import sys
import mpgluon
print(*sys.modules)
for name in {names}:
    __import__(name)
print(*sys.modules)
""").splitlines()
    assert LATER.keys() & set(first.split()) == set()
    assert set(names) <= set(every.split())


def test_public_names_of_the_second_house_are_names_of_the_first():
    import mpgluon.tools.plots
    import mpgluon.tools.zoo
    import mpgluon_tools
    from mpgluon import deployment, diagnostics
    from mpgluon.tools import onnx
    from mpgluon_tools.recorder.steps.flight_recorder import FlightRecorder

    for name in ("ServingMetadata", "export_onnx", "read_metadata"):
        assert getattr(deployment, name) is getattr(onnx, name)
    assert diagnostics.FlightRecorder is FlightRecorder
    for house in ("plots", "zoo", "onnx"):
        home, face = getattr(mpgluon_tools, house), getattr(mpgluon.tools, house)
        assert all(getattr(face, name) is getattr(home, name) for name in home.__all__)
    with pytest.raises(AttributeError, match=r"deployment' has no attribute 'classify'"):
        deployment.classify  # noqa: B018


# ---- Ratchets. A number that must grow is changed in the same commit, whose message says why.

LINES = {
    "mpgluon": 19_380,
    "mpgluon_tools": 18_873,
    "recipes": 5_515,
    "study": 18_667,
    "scripts": 454,
    "tests": 56_391,
}
LINES_LOADED = {"mpgluon": 8_098, "mpgluon.amp": 12_356}  # by an import: a cast, training
LONGEST_BODY = 60  # lines of a function, without its docstring
LONG_BODIES = 0
LINES_OF_TRAINER_STATE = 200
FILES_OF_SCRIPTS = 7


def lines_of(folder: str) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in ROOT.glob(f"{folder}/**/*.py"))


@pytest.mark.parametrize("folder", LINES)
def test_a_folder_has_no_more_lines_than_its_ratchet(folder):
    assert lines_of(folder) <= LINES[folder]


@pytest.mark.multiprocess
@pytest.mark.parametrize("module", LINES_LOADED)
def test_the_import_loads_no_more_lines_than_its_ratchet(module):
    files = run(f"""
import sys
import {module}
print("\\n".join(m.__file__ for name, m in sys.modules.items() if name.startswith("mpgluon")))
""").splitlines()
    lines = sum(len(Path(file).read_text("utf-8").splitlines()) for file in files)
    assert lines <= LINES_LOADED[module]


def body_lines(function: ast.FunctionDef) -> int:
    first = (
        function.body[1:] if ast.get_docstring(function) and function.body[1:] else function.body
    )
    return first[-1].end_lineno - first[0].lineno + 1


def test_no_more_bodies_are_long():
    functions = [
        (f"{path.name}: {node.name}", body_lines(node))
        for path in [*LIBRARY, *TOOLS, *RECIPES]
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef)
    ]
    assert len([name for name, lines in functions if lines > LONGEST_BODY]) <= LONG_BODIES


def modules_used(path: Path, names: set[str]) -> set[str]:
    """Return the modules that a file names, anywhere: in functions, for types, in strings."""
    tree = ast.parse(path.read_text("utf-8"))
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    used = imported_names(path) | {text for text in texts if isinstance(text, str)}
    return {name if name in names else name.rpartition(".")[0] for name in used} & names


def test_no_modules_import_each_other_in_a_circle():
    modules = {module_name(path): path for path in {*LIBRARY, *TOOLS} - {*FACES, *DOORS}}
    # Python imports a module's own package first; that does not count.
    uses = {
        name: {
            one
            for one in modules_used(path, set(modules)) - {name}
            if not name.startswith(f"{one}.")
        }
        for name, path in modules.items()
    }
    TopologicalSorter(uses).prepare()  # which names the circle that it finds


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_what_a_user_calls_is_in_few_scripts():
    assert len(list(ROOT.glob("scripts/*.py"))) <= FILES_OF_SCRIPTS


def test_the_state_of_a_trainer_is_short():
    tree = ast.parse((ROOT / "mpgluon" / "trainer" / "step.py").read_text("utf-8"))
    (state,) = (node for node in tree.body if getattr(node, "name", "") == "TrainerState")
    assert state.end_lineno - state.lineno + 1 <= LINES_OF_TRAINER_STATE
