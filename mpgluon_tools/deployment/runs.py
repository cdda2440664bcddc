"""A trained run as a function of photographs, in any program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Union

from mpgluon.errors import CheckpointError
from mpgluon_tools.commands.checkout import opener

import mxnet as mx

if TYPE_CHECKING:
    from mpgluon_tools.serving.classifier import PhotographClassifier

__all__ = ["load_classifier"]


def load_classifier(run: Union[str, Path], dtype: str = "float32") -> PhotographClassifier:
    """Return the network of a run as a function: photograph to categories and probabilities.

    ::

        classify = mpgluon.load_classifier("runs/finetune")
        category, probability = classify("photograph.jpg")[0]

    Parameters
    ----------
    run : str or Path
        The folder of a run of ``mpgluon finetune`` or ``train_caltech.py``, or a checkpoint in it.
    dtype : {"float32", "float16", "bfloat16"}
        The format in which it predicts.

    Returns
    -------
    PhotographClassifier
        Called with a file or bytes, it returns (category, probability) of every category, likeliest
        first. It may be called from several threads.

    Raises
    ------
    CheckpointError
        If there is no such folder or file, or it does not belong to a run.
    ImportError
        If a package of the extra ``recipes`` is missing.
    ValueError
        If the format is another.
    """
    runs = opener(f"{run} is a run of photographs")
    if not Path(run).exists():
        raise CheckpointError(
            f"there is no run {Path(run).absolute()}; load_classifier takes the folder of a run of "
            "mpgluon finetune or train_caltech.py, or a checkpoint in it"
        )
    opened = runs.open_a_run(Path(run), mx.cpu())
    from mpgluon_tools.serving.classifier import PhotographClassifier  # needs Pillow

    return PhotographClassifier(opened.net, opened.metadata(), dtype)
