"""The training script: its options are the config, and bad input gets one line and status 2."""

import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

from mpgluon.base.processor import have_hyperthreads, usable_cores

import pytest
from helpers import module_from

from recipes import console
from recipes.training import TrainingConfig

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train_caltech.py"
QUICK = [
    *("--model=cifar_resnet20_v1", "--image-size=32", "--batch-size=10", "--epochs=1"),
    *("--workers=0", "--images-per-class=3", "--train-per-class=2"),
]


@pytest.fixture(scope="module")
def script():
    return module_from(SCRIPT)


@pytest.fixture(autouse=True)
def _root_logger_as_it_was():
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


TEXTS = {"dtype": "bfloat16", "dataset": "shapes", "kvstore": "mpi", "update_rounding": "kahan"}
KINDS = get_type_hints(TrainingConfig)


def test_without_options_the_config_is_the_default_one(script):
    options = vars(script.parse([]))
    assert options.pop("resume") is False
    assert set(options) == {field.name for field in fields(TrainingConfig)}
    assert TrainingConfig(**options) == TrainingConfig()


@pytest.mark.parametrize("field", fields(TrainingConfig), ids=lambda field: field.name)
def test_each_option_sets_its_field_in_its_type(script, field):
    kind = (*get_args(KINDS[field.name]), KINDS[field.name])[0]
    option = f"--{field.name.replace('_', '-')}"
    text = TEXTS.get(field.name, {int: "17", float: "0.125"}.get(kind, "text"))
    options = vars(script.parse([option] if kind is bool else [option, text]))
    found = options.pop(field.name)
    assert found == kind(text)
    assert type(found) is kind
    others = {f.name: f.default for f in fields(TrainingConfig) if f.name != field.name}
    assert options == {**others, "resume": False}


@pytest.mark.multiprocess
def test_help_names_every_option_and_default():
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    text = re.sub(r"\s+", " ", done.stdout)
    for field in fields(TrainingConfig):
        assert f"--{field.name.replace('_', '-')} " in text
        if field.default not in (None, False):
            assert f"(default: {field.default})" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype=float64"], "argument --dtype: received 'float64', which names no policy"),
        (["--dataset=mnist"], "invalid choice: 'mnist'"),
        (["--epochs=two"], "invalid int value: 'two'"),
        (["--learning-rate=fast"], "invalid float value: 'fast'"),
        (["--colour=red"], "unrecognized arguments: --colour=red"),
    ],
)
def test_a_command_line_that_cannot_be_parsed_shows_the_usage(script, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        script.main(arguments)
    assert stop.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("usage:")
    assert message in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model=ssd_512_resnet50_v1_voc"], "--model: 'ssd_512_resnet50_v1_voc' is not an image"),
        (["--devices=gpu:99"], "sees 0 GPUs; use --devices cpu"),
        (["--loss-scale=big"], "--loss-scale: a loss scale is"),
        (["--loss-scale=1e400"], "--loss-scale: a static loss scale must be a power of two"),
        (["--optimizer=dcasgd"], "DCASGD fails with --momentum=0.9; choose --momentum 0 with it"),
        (["--growth-interval=0"], "--growth-interval must be at least 1, received 0"),
        (["--train-per-class=3"], "--train-per-class=3 leaves nothing to test on in 10 of 10"),
        (["--dataset=folder", "--data-dir=/no/folder"], "error: --data-dir: "),
        (["--dataset=folder", "--data-dir=pets"], "error: --data-dir: "),
        (["--pretrained=nowhere.params"], "--pretrained: there is no parameter file nowhere"),
        (["--image-size=0"], "--image-size must be at least 1"),
        (["--amp"], "--amp computes in 16 bits: choose --dtype float16 or bfloat16"),
        (["--seed=4294967296"], "--seed must be in [0, 4294967295]"),
        (["--output-dir=/dev/null"], "made: Not a directory; choose another --output-dir"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_gets_a_line_and_status_2(script, rendered, tmp_path, capsys, arguments, message):
    given = [*QUICK, "--dataset=shapes", f"--data-dir={rendered}", f"--output-dir={tmp_path}"]
    assert script.main([*given, *arguments]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    (line,) = [line for line in errors.splitlines() if line.startswith("error:")]
    assert errors.splitlines()[-1] == line
    assert message in line
    assert "Traceback" not in errors


def test_a_missing_data_set_names_both_ways_to_one_and_renders_none(script, tmp_path, capsys):
    data = tmp_path / "data"
    given = [*QUICK, f"--data-dir={data}", f"--output-dir={tmp_path / 'run'}"]
    assert script.main(given) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"error: Caltech 101 is not in {data}")
    assert f"python scripts/download_caltech.py --data-dir {data}" in line
    assert "--dataset shapes" in line
    assert not data.exists()


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_a_run_may_be_as_short_as_its_warm_up(script, rendered, tmp_path, epochs):
    given = [*QUICK, "--dataset=shapes", f"--data-dir={rendered}", f"--output-dir={tmp_path}"]
    assert script.main([*given, f"--epochs={epochs}"]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["config"]["epochs"] == epochs
    assert results["steps"] == 2 * epochs


@pytest.mark.multiprocess
def test_a_bad_value_ends_the_process_with_status_2_and_one_line():
    done = run("--epochs=0")
    expected = "error: --epochs must be at least 1, received 0\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


@pytest.mark.multiprocess
def test_a_run_on_photographs_in_float16_ends_with_its_accuracy(caltech101_mini, tmp_path):
    output = tmp_path / "run"
    done = run(
        *("--dtype=float16", "--model=cifar_resnet20_v1", f"--data-dir={caltech101_mini}"),
        *(f"--output-dir={output}", "--image-size=32", "--train-per-class=3", "--batch-size=10"),
        *("--epochs=1", "--workers=1"),
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((output / "results.json").read_text())
    assert results["dataset"]["name"] == "caltech101"
    assert results["dataset"]["train_images"] == 3 * len(results["dataset"]["classes"])
    assert results["steps"] == results["dataset"]["train_images"] // 10
    line, heading, *confusions = done.stdout.splitlines()
    assert heading.split() == ["category", "taken", "for", "images"]
    assert [row.split() for row in confusions] == [
        [right, answer, str(count)] for right, answer, count in results["confusions"]
    ]
    assert line.startswith(
        f"test accuracy {results['test_accuracy']:.3f} (mean of the classes "
        f"{results['test_accuracy_per_class']:.3f}) on caltech101, {results['steps']} steps "
        f"({results['skipped_steps']} skipped) in "
    )
    assert line.endswith(f"final loss scale {results['final_loss_scale']:g}; results in {output}")
    # A log that is not a terminal gets a line for each epoch, and no bars.
    (epoch,) = [line for line in done.stderr.splitlines() if line.startswith("epoch 1: ")]
    scale = f"loss scale {results['final_loss_scale']:g}"
    for shown in ("test accuracy ", "training loss ", "images per second", scale):
        assert shown in epoch
    assert "\r" not in done.stderr


AFTER_ITS_IMPORTS = """
import os, runpy, sys
try:
    runpy.run_path(sys.argv.pop(1), run_name="__main__")
except SystemExit:
    print(os.environ["OMP_NUM_THREADS"])
"""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux tells the cores")
@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, usable_cores() // (2 if have_hyperthreads() else 1)),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "999"}, 1),
    ],
)
def test_the_script_computes_with_all_cores_unless_told_otherwise(environment, threads):
    others = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", AFTER_ITS_IMPORTS, SCRIPT, "-h"],
        env={**others, **environment}, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == str(threads)


@pytest.mark.parametrize(
    ("kept", "options", "advice"),
    [
        (True, [], "stopped; continue with --resume"),
        (True, ["--resume=auto"], "stopped; the same command continues"),
        (False, [], "stopped; there is no checkpoint"),
    ],
)
def test_a_second_ctrl_c_says_how_to_resume(
    script, tmp_path, monkeypatch, capsys, kept, options, advice
):
    def interrupted(*_, **__):
        if kept:
            (tmp_path / "checkpoints").mkdir()
            (tmp_path / "checkpoints" / "step-00000004.npz").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(console, "train", interrupted)
    assert script.main([*QUICK, f"--output-dir={tmp_path}", *options]) == 130
    assert capsys.readouterr().err.splitlines()[-1].startswith(advice)
