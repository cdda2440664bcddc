"""TensorBoard receives the history: each step once, however often the run was ended."""

import sys
from collections import defaultdict
from pathlib import Path

from mpgluon_tools.recorder.numerics.files import read_numerics

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util.tensor_util import make_ndarray
from test_resume import assert_same_course
from training_helpers import STEPS, STEPS_PER_EPOCH, Run, quick_config, run, run_interrupted

from recipes.training import train

STEP_SCALARS = ("loss", "learning_rate", "loss_scale", "gradient_norm", "images_per_second")
EPOCH_SCALARS = ("train_loss", "train_accuracy", "test_accuracy", "test_accuracy_per_class")


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return steps and values by tag as they lie in the files, which are not purged of any."""
    scalars = defaultdict(list)
    for path in sorted(folder.iterdir()):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                assert value.metadata.plugin_data.plugin_name == "scalars"
                scalars[value.tag].append((event.step, make_ndarray(value.tensor).item()))
    return dict(scalars)


def expected(done: Run) -> dict[str, list[tuple[int, float]]]:
    """Return the history's values in float32, the format of TensorBoard."""
    scalars = defaultdict(list)
    for kind, names in (("step", STEP_SCALARS), ("epoch", EPOCH_SCALARS)):
        for event in done.events(kind):
            for name in names:
                if event[name] is not None:
                    value = float(np.float32(event[name]))
                    scalars[f"{kind}/{name}"].append((event["step"], value))
    skipped = 0
    for event in done.events("step"):
        accuracy = float(np.float32(event["correct"] / event["images"]))
        scalars["step/accuracy"].append((event["step"], accuracy))
        skipped += event["skipped"]
        scalars["step/skipped_steps"].append((event["step"], skipped))
    return dict(scalars)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tensorboard_reads_what_the_history_says(shapes, tmp_path, dtype, request):
    done = run(shapes, tmp_path, dtype=dtype, tensorboard=True)
    assert_same_course(done, request.getfixturevalue(f"{dtype}_run"))
    scalars = read(tmp_path / "tensorboard")
    np.testing.assert_equal(scalars, expected(done))
    assert [step for step, _ in scalars["step/loss"]] == list(range(1, STEPS + 1))
    assert [step for step, _ in scalars["epoch/test_accuracy"]] == [STEPS_PER_EPOCH, STEPS]
    assert ("step/gradient_norm" in scalars) == (dtype == "float16")


@pytest.mark.parametrize(
    "after_step", [4, *(pytest.param(step, marks=pytest.mark.slow) for step in (1, 6))]
)
def test_a_run_that_was_interrupted_has_each_step_once(shapes, tmp_path, after_step, float16_run):
    options = {"dtype": "float16", "tensorboard": True}
    resumed = run_interrupted(shapes, tmp_path, after_step=after_step, **options)
    assert_same_course(resumed, float16_run)
    np.testing.assert_equal(read(tmp_path / "tensorboard"), expected(resumed))


def test_a_run_without_it_imports_nothing_a_missing_package_is_named(shapes, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)  # as if not installed
    with pytest.raises(ValueError, match="'pip install tensorboard', or leave out --tensorboard"):
        train(quick_config(shapes, tmp_path, tensorboard=True))
    assert not (tmp_path / "history.jsonl").exists()
    run(shapes, tmp_path, epochs=1)
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.slow
def test_recorded_numerics_are_curves_by_layer(shapes, tmp_path):
    done = run(shapes, tmp_path, dtype="float16", tensorboard=True, record_numerics=2)
    scalars = read(tmp_path / "tensorboard")
    recording = read_numerics(done.folder / "numerics")
    recorded = list(recording)
    assert [step.number for step in recorded] == [1, *range(2, STEPS + 1, 2)]
    for kind in ("activation", "activation gradient", "gradient"):
        for tensor in recorded[0].of(kind):
            curve = scalars[f"largest {kind}s/{tensor.id.name}"]
            of_steps = {s.number: s.tensors[tensor.id] for s in recorded if tensor.id in s.tensors}
            assert curve == [
                (n, np.float32(t.statistics.largest).item()) for n, t in of_steps.items()
            ]
            assert len(of_steps) == (len(recorded) if kind == "gradient" else 1)
    ratios = [step.update_ratios()["output.weight"] for step in recorded]
    values = [float(np.float32(ratio)) for ratio in ratios]
    assert [value for _, value in scalars["update over weight/output.weight"]] == values
