"""The whole training run on a GPU: it learns, and goes on where it was interrupted."""

import pytest
from test_resume import assert_same_course
from training_helpers import STEPS, run, run_interrupted

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "options",
    [{"dtype": "float32"}, {"dtype": "float16"}, {"dtype": "float16", "amp": True}],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_a_run_learns_and_ends_as_if_it_had_not_been_interrupted(shapes, tmp_path, options):
    options = {**options, "devices": "gpu:0"}
    whole = run(shapes, tmp_path / "whole", **options)
    resumed = run_interrupted(shapes, tmp_path / "resumed", after_step=3, **options)
    assert_same_course(resumed, whole)
    assert whole.results["steps"] == STEPS
    done = run(shapes, tmp_path / "long", epochs=12, growth_interval=10, **options)
    first, *_, last = done.events("epoch")
    assert last["train_loss"] < first["train_loss"] / 2
