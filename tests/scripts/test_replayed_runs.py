"""Steps that the training script recorded are replayed as documented, cures included."""

import os
import re
import subprocess
import sys
from pathlib import Path

from mpgluon.base.processor import have_hyperthreads, usable_cores
from mpgluon_tools.recorder.steps.recorded_step import read_step

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
OVERFLOWS = ["--loss-scale=16777216"]  # 2**24, at which FP16 gradients do not fit
DIVERGES = ["--learning-rate=1e12"]  # for formats that have FP32's range
QUICK = [
    *("--model=cifar_resnet20_v1", "--image-size=16", "--images-per-class=3", "--batch-size=10"),
    *("--train-per-class=2", "--epochs=2", "--warmup-epochs=0", "--workers=0"),
    "--record-overflows=1",
]
FLOAT8 = "params=float32,compute=float8_e4m3,scaling=tensor,between=float16,amax_history=4"

pytestmark = pytest.mark.multiprocess


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess:
    """Run a command after Python, where no number of threads is set as in these tests."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}  # others may need the cores
    environment.pop("OMP_NUM_THREADS", None)
    return subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, command)],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_replay_has_the_threads_that_the_training_had(rendered, tmp_path):
    data = [f"--data-dir={rendered}", "--dataset=shapes", f"--output-dir={tmp_path}"]
    finite_in_part = ["--dtype=float16", "--loss-scale=32768", "--epochs=1"]
    trained = run(SCRIPTS / "train_caltech.py", *QUICK, *data, *finite_in_part, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    (file,) = (tmp_path / "overflows").iterdir()
    assert read_step(file).threads == usable_cores() // (2 if have_hyperthreads() else 1)
    done = run("-m", "mpgluon", "replay", "--no-cures", file, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"the same bits in all 65 gradients, of which \d\d? are", done.stdout)
    assert "thread" not in done.stdout


@pytest.fixture
def replayed(rendered, tmp_path, request):
    """Return a function that trains, records, replays the newest file, and returns the output."""

    def replay(options: list[str]) -> str:
        if "float8" in str(options):
            request.getfixturevalue("native_operators")
        return _replayed(options, rendered, tmp_path)

    return replay


def _replayed(options: list[str], data: Path, folder: Path) -> str:
    dataset = "folder" if "--dataset=folder" in options else "shapes"
    if dataset == "folder":
        (data,) = data.glob("shapes-*")
    options = [f"--dataset={dataset}", f"--data-dir={data}", f"--output-dir={folder}", *options]
    trained = run(SCRIPTS / "train_caltech.py", *QUICK, *options, cwd=folder)
    assert trained.returncode == 0, trained.stderr
    done = run("-m", "mpgluon", "replay", folder, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "replayed: the same bits in all 65 gradients" in done.stdout
    assert "not run" not in done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--dtype=float16"],
        ["--dtype=float16", "--amp", "--ema=0.9"],
        ["--dtype=float16", "--dataset=folder", "--accumulate=2"],
        ["--dtype=mixed_float16"],
        ["--dtype=float16", "--sync-batch-norm"],
        [f"--dtype={FLOAT8}"],
    ],
    ids=" ".join,
)
def test_a_step_whose_loss_scale_was_too_large_names_the_scale_that_fits(options, replayed):
    printed = replayed([*options, *OVERFLOWS])
    assert "skipped at a loss scale of 1.67772e+07" in printed
    assert "\nlayer: net.output\n" in printed  # of its logits, whose gradient the loss computes
    # The Python to write follows in a line of its own, since it does not fit into 80 columns.
    lines = printed.splitlines()
    saves = {line.split("  ")[0]: line.split()[-1] for line in lines if "  " in line}
    assert saves["half the loss scale: 8.38861e+06"] == "no"
    (name,) = [name for name in saves if name.startswith("the largest loss scale")]
    assert saves[name] == "yes"
    (code,) = [after for line, after in zip(lines, lines[1:]) if line.startswith(name)]
    assert "    amp.init_trainer(trainer, mpgluon.DynamicLossScale(init_scale=2.0**1" in code
    assert saves["net.output in FP32"] == "no"
    assert saves["bfloat16, no loss scale"] == saves["all in FP32, no loss scale"] == "yes"


@pytest.mark.slow  # two processes, which import everything, for each
@pytest.mark.parametrize(
    "options",
    [
        ["--dtype=float32"],
        ["--dtype=bfloat16"],
        ["--dtype=bfloat16", "--amp"],
        ["--dtype=emulated_bfloat16"],
        ["--dtype=mixed_float8"],
        ["--dtype=params=bfloat16,compute=bfloat16"],
        ["--dtype=params=bfloat16,compute=bfloat16", "--update-rounding=stochastic"],
    ],
    ids=" ".join,
)
def test_a_step_of_a_run_that_diverged_is_saved_by_nothing(options, replayed):
    printed = replayed([*options, *DIVERGES])
    assert "with a loss that is not finite, at a loss scale of 1\n" in printed
    assert "not finite before the step began: " in printed
    cures = printed[printed.index("\ncure ") :].splitlines()[2:]
    verdicts = [re.split("  +", cure)[1] for cure in cures if not cure.startswith("    ")]
    assert len(verdicts) >= 2
    assert set(verdicts) == {"no"}
