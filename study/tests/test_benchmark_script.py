"""The script: options, output, files and exit status."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
from pathlib import Path

import pytest
from helpers import module_from
from PIL import Image

from study.benchmarks import cases
from study.benchmarks import memory as memory_module
from study.benchmarks.contestant import Contestant
from study.benchmarks.memory import largest_batch, peaks_by_batch
from study.benchmarks.race import Case
from study.benchmarks.record import read_record
from study.benchmarks.tuning import tuning
from study.benchmarks.zoo import zoo, zoo_small

pytestmark = pytest.mark.slow  # figures are made by hand, and rarely

SCRIPT = Path(__file__).resolve().parents[2] / "study" / "scripts" / "benchmark.py"
TINY = str(Path(__file__).with_name("tiny_contestants.py"))


@pytest.fixture
def script():
    return module_from(SCRIPT)


def tiny(function: str, name: str = "", **options) -> Contestant:
    return Contestant(name or function, f"{TINY}:{function}", options)


@pytest.fixture
def tiny_cases(monkeypatch, tmp_path):
    """Put two tiny cases in the place of the real ones; return the settings of each call."""
    calls = []

    def case(name):
        def make(settings):
            calls.append(settings)
            letters = [
                tiny("notes", letter, path=str(tmp_path / name), letter=letter) for letter in "ab"
            ]
            return [Case(name, f"the case {name}", letters)]

        return make

    for name in list(cases.CASES):
        if name in ("gemm", "training"):
            monkeypatch.setitem(cases.CASES, name, case(name))
        else:
            monkeypatch.delitem(cases.CASES, name)
    return calls


def is_png(path: Path) -> bool:
    with Image.open(path) as image:
        return image.format == "PNG"


# --- real ones -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_real_training_step_is_timed_next_to_plain_gluon(script, capsys):
    given = ["training", "loss-scaling", "--model", "cifar_resnet20_v1", "--image-size", "32"]
    given += ["--batch-size", "2", "--rounds", "2", "--warm-up", "1", "--dtype", "float16"]
    assert script.main([*given, "--threads", "1", "--no-peers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (training,) = (n for n, line in enumerate(lines) if line.startswith("training step"))
    assert lines[training] == "training step, cifar_resnet20_v1, batch 2, 32 px"
    assert lines[training + 1].split()[:2] == ["seconds", "quartiles"]
    assert lines[training + 2].startswith("Gluon float32 ")
    assert lines[training + 2].split()[6:10] == ["1.000", "1.000", "to", "1.000"]
    assert lines[training + 3].startswith("mpgluon float16 ")
    assert lines[training + 4].startswith("mpgluon autocast float16 ")
    assert lines[training + 6] == "loss scaling, float16, cifar_resnet20_v1, batch 2, 32 px"
    assert [line.split()[0] for line in lines[training + 8 :]] == ["stock", "amp"]


def arguments_of(contestant: Contestant) -> tuple[set[str], set[str]]:
    """Return the factory's arguments, and the ones that have no default."""
    source, _, function = contestant.factory.rpartition(":")
    if not source.endswith(".py"):
        found = inspect.signature(getattr(importlib.import_module(source), function)).parameters
        required = {name for name, one in found.items() if one.default is inspect.Parameter.empty}
        return set(found), required
    # A peer's cannot be imported here.
    for node in ast.parse(Path(source).read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            defaults = dict(zip((one.arg for one in node.args.kwonlyargs), node.args.kw_defaults))
            return set(defaults), {name for name, default in defaults.items() if default is None}
    raise AssertionError(f"{source} has no {function}")


@pytest.mark.parametrize(
    "make", [*cases.CASES.values(), zoo, zoo_small, memory_module.memory, tuning]
)
def test_every_contestant_can_be_found_and_takes_its_options(make, script):
    pythons = {f"{name}_python": f"/{name}" for name in script.PEERS.values()}
    for case in make(cases.CaseOptions(**pythons)):
        assert len({one.name for one in case.contestants}) == len(case.contestants) >= 2
        for contestant in case.contestants:
            taken, required = arguments_of(contestant)
            assert required <= set(contestant.options) <= taken, contestant


# --- tiny ones -------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny_cases")
def test_all_cases_are_timed_in_order_and_written_under_the_machines_name(script, capsys, tmp_path):
    assert script.main(["all", "--rounds", "2", "--output", str(tmp_path / "results")]) == 0
    (path,) = (tmp_path / "results").glob("*.json")
    assert re.fullmatch(r"cpu-[a-z0-9-]+-\d+-cores", path.stem)
    assert is_png(path.with_suffix(".png"))
    record = read_record(path)
    assert [case.name for case in record.cases] == list(cases.CASES)
    assert all(len(one.seconds) == 2 for case in record.cases for one in case.results)
    assert record.conditions.threads == len(os.sched_getaffinity(0))
    assert record.versions["library-a"] == "1.0"
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("the case")] == [
        f"the case {name}" for name in cases.CASES
    ]
    assert f"written: {path} and {path.with_suffix('.png')}" in printed


def test_options_reach_the_cases_and_the_conditions(script, tiny_cases, tmp_path):
    path = tmp_path / "record.json"
    images = tmp_path / "photographs"
    (images / "one").mkdir(parents=True)
    (images / "one" / "first.jpg").touch()
    given = ["gemm", "gemm", "--model", "vgg16", "--batch-size", "2", "4", "--image-size", "32"]
    given += ["--device", "cpu:0", "--dtype", "bfloat16", "--no-peers", "--images", str(images)]
    given += ["--workers", "3", "--threads", "1", "--rounds", "1", "--warm-up", "0"]
    assert script.main([*given, "--limit", "50", "--output", str(path)]) == 0
    assert tiny_cases == [
        cases.CaseOptions(
            model="vgg16",
            batch_sizes=[2, 4],
            image_size=32,
            device="cpu:0",
            dtypes=["bfloat16"],
            peers=False,
            torch_python=None,
            images=str(images),
            workers=3,
        )
    ]
    conditions = read_record(path).conditions
    assert (conditions.threads, conditions.rounds) == (1, 1)
    assert (conditions.warm_up, conditions.limit_s) == (0, 50)


def test_a_peer_takes_part_if_there_is_an_interpreter_and_else_the_script_says_so(
    script, tiny_cases, capsys, tmp_path, monkeypatch
):
    short = ["gemm", "--rounds", "1", "--warm-up", "0"]
    monkeypatch.setattr(script, "ROOT", tmp_path)
    script.main(short)
    printed = capsys.readouterr().out
    assert "PyTorch does not take part: no .venv-peers" in printed
    assert "OpenVINO does not take part: no .venv-peers" in printed
    python = tmp_path / ".venv-peers" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    script.main(short)
    script.main([*short, "--torch-python", str(SCRIPT), "--model", "vgg16"])
    printed = capsys.readouterr().out
    assert "does not take part" not in printed
    names = [f"{name}_python" for name in script.PEERS.values()]
    asked = [tuple(getattr(settings, name) for name in names) for settings in tiny_cases]
    torch, *others = [str(python)] * len(names)
    assert asked == [(None,) * len(names), (torch, *others), (str(SCRIPT), *others)]


def test_what_fails_is_named_and_the_status_says_so(script, monkeypatch, capsys, tmp_path):
    contestants = [tiny("tells"), tiny("raises", run_number=1)]
    monkeypatch.setitem(cases.CASES, "gemm", lambda _: [Case("gemm", "a case", contestants)])
    assert script.main(["gemm", "--rounds", "1", "--output", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "no result for raises: it ended with status 1" in printed
    assert "    RuntimeError: went wrong in run 1" in printed
    (path,) = tmp_path.glob("*.json")
    assert [one.name for one in read_record(path).cases[0].failures] == ["raises"]
    monkeypatch.setitem(cases.CASES, "gemm", lambda _: [Case("gemm", "a case", contestants[1:])])
    assert script.main(["gemm", "--rounds", "1", "--output", str(tmp_path / "none.json")]) == 1
    assert not (tmp_path / "none.png").exists()  # there is nothing to draw
    assert capsys.readouterr().out.endswith("none.json\n")


def networks_of(settings, name="zoo", mebibytes=1):
    """Return a tiny case for each network and batch size."""
    return [
        Case(
            name,
            f"the step of {model}, batch {batch}",
            [
                tiny("counts", one, multiply_adds=1, mebibytes=mebibytes * batch)
                for one in ("Gluon float32", "mpgluon float16")
            ],
            {
                **{"model": model, "batch_size": batch, "image_size": 32},
                "memory_limit_mib": settings.memory_limit_mib,
            },
        )
        for model in settings.models or ["some"]
        for batch in settings.batch_sizes or [8]
    ]


def test_the_zoo_has_a_table_of_all_its_networks_and_a_record_of_its_own(
    script, monkeypatch, capsys, tmp_path
):
    calls = []
    monkeypatch.setitem(
        script.LONG_CASES, "zoo", lambda options: calls.append(options) or networks_of(options)
    )
    options = ["--models", "vgg11", "vgg13", "--rounds", "2", "--output", str(tmp_path)]
    assert script.main(["zoo", *options]) == 0
    assert calls[0].models == ["vgg11", "vgg13"]
    assert calls[0].image_size is calls[0].dtypes is None  # the network's own, the case's own
    printed = capsys.readouterr().out
    table = printed[printed.index("network ") :].splitlines()
    assert [line.split()[0] for line in table[1:5]] == ["vgg11", "vgg13", "geometric", "largest"]
    (path,) = tmp_path.glob("*-zoo.json")
    assert is_png(path.with_suffix(".png"))
    assert [len(one.seconds) for case in read_record(path).cases for one in case.results] == [2] * 4


def test_the_largest_batch_within_a_limit_is_searched_for_by_the_case_memory_only(
    script, monkeypatch, capsys, tmp_path
):
    def steps(settings):
        return networks_of(settings, "memory", 20)

    monkeypatch.setitem(script.LONG_CASES, "memory", steps)
    monkeypatch.setattr(memory_module, "memory", steps)
    options = ["--batch-size", "1", "2", "--memory-limit", "150MiB", "--warm-up", "0"]
    assert script.main(["memory", *options, "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-memory.json")
    assert is_png(path.with_suffix(".png"))
    cases_read = read_record(path).cases
    peaks = peaks_by_batch(cases_read)["Gluon float32"]
    largest = largest_batch(peaks, 150)
    assert peaks[largest].mib <= 150 < peaks[largest + 1].mib
    assert {len(one.seconds) for case in cases_read for one in case.results} == {1}
    assert f"largest within 150 MiB {largest}" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setitem(cases.CASES, "gemm", steps)
    assert script.main(["gemm", *options, "--rounds", "1"]) == 0
    assert "batch 3" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["no-case"], "invalid choice: 'no-case'"),
        (["gemm", "--batch-size", "0"], "--batch-size: must be at least 1, received 0"),
        (["gemm", "--rounds", "-1"], "--rounds"),
        (["gemm", "--image-size", "none"], "--image-size"),
        (["gemm", "--dtype", "float64"], "--dtype"),
        (["gemm", "scale"], "scale is measured by itself"),
        (["zoo", "all"], "zoo is measured by itself"),
        (["memory", "--memory-limit", "8"], "--memory-limit: must be such as 8GiB"),
        (["gemm", "--torch-python", "/nowhere/python"], "there is no /nowhere/python"),
        ([], "CASE"),
    ],
)
def test_wrong_options_are_refused(wrong, message, script, capsys):
    with pytest.raises(SystemExit) as stop:
        script.main(wrong)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["training", "--model", "nosuch"], "no model zoo has a network called 'nosuch'"),
        (["zoo", "--models", "vgg11", "nosuch"], "no model zoo has a network called 'nosuch'"),
        (["training", "--device", "gpu:99"], "names gpu(99), but this build of MXNet sees"),
        (["training", "--device", "cpu:0,1"], "--device takes one device, received 'cpu:0,1'"),
        (["gemm", "--limit", "0"], "received 11, 1, 0 and 2"),
    ],
)
@pytest.mark.usefixtures("tiny_cases")
def test_what_no_contestant_could_do_is_refused_before_one_starts(wrong, message, script, capsys):
    assert script.main([*wrong, "--threads=1"]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""


def test_a_folder_without_images_is_refused_before_anything_is_timed(script, capsys, tmp_path):
    assert script.main(["tuning", "--images", str(tmp_path), "--output", str(tmp_path)]) == 2
    assert f"{tmp_path} has no images" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
