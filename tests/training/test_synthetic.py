"""Runs on noise from memory: as fast as without images, and otherwise like any run."""

import logging
import re

import numpy as np
from training_helpers import STEPS, run

from recipes.data.synthetic import SyntheticLoader


def test_a_run_on_noise_needs_no_files_and_waits_for_none(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    missing = tmp_path / "no-such-folder"
    done = run(missing, tmp_path / "run", dataset="synthetic", dtype="float16")
    assert done.results["steps"] == STEPS
    assert done.results["dataset"]["name"] == "synthetic"
    assert not missing.exists()
    waits = [event["image_wait"] for event in done.events("step")]
    assert waits == [0.0] * STEPS
    assert "accuracies do not" in caplog.text
    assert "% of the time waited for images" in caplog.text
    left = re.findall(r"about \d+ (?:s|min) left", caplog.text)
    assert len(left) == done.results["config"]["epochs"] - 1


def test_each_epoch_has_the_same_batches_from_where_it_begins():
    loader = SyntheticLoader(3, batch_size=4, image_size=8, classes=5, dtype="float16", seed=1)
    epoch = list(loader)
    assert len(epoch) == len(loader) == 3
    images, labels = epoch[0]
    assert (images.shape, images.dtype, labels.dtype) == ((4, 3, 8, 8), np.float16, np.int32)
    assert labels.asnumpy().max() < 5
    loader.set_epoch(1, 2)
    (last,) = loader
    assert loader.batches_done == 0
    assert (last[0] == images).asnumpy().all()
    other = SyntheticLoader(3, batch_size=4, image_size=8, classes=5, dtype="float16", seed=2)
    assert not (next(iter(other))[0] == images).asnumpy().all()
