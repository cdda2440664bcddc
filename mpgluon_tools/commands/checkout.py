"""The way of commands to ``recipes``: training, its runs, and state dicts of PyTorch.

``pyproject.toml`` names the module for them as an entry point of the group ``mpgluon.networks``. It
is looked for in the folder of this package alone: other installed packages cannot take its place.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType

__all__ = ["is_run", "opener"]

_FOLDER = Path(__file__).resolve().parents[2]  # of a checkout, or of all installed packages
_GROUP = "mpgluon.networks"


def is_run(name: str) -> bool:
    """Return whether a name is the folder of a run, which has checkpoints, or a checkpoint."""
    path = Path(name)
    return path.suffix == ".npz" or (path / "checkpoints").is_dir()


def opener(what: str) -> ModuleType:
    """Return the module of ``recipes`` that trains, and opens runs and state dicts.

    It has ``finetune(photographs, output_dir=, dtype=, weights=, epochs=)``,
    ``open_a_run(path, device)``, ``open_a_run_with_images(path, device, batch_size)``, which
    return an :class:`~mpgluon_tools.commands.networks.OpenedNetwork`, and
    ``load_pretrained(net, path, *, classes)``, which is like
    :func:`~mpgluon_tools.parameter_files.load_parameter_file`.

    Parameters
    ----------
    what : str
        The use of the module, as the error's sentence begins.

    Raises
    ------
    ValueError
        If the folder of this package has no ``recipes``.
    ImportError
        If a package of the extra ``recipes`` is missing.
    """
    for found in distributions(name="mpgluon"):
        for point in found.entry_points:
            file = _FOLDER.joinpath(*point.value.split(".")).with_suffix(".py")
            if point.group == _GROUP and file.is_file():
                sys.path.insert(0, str(_FOLDER))
                try:
                    return importlib.import_module(point.value)
                finally:
                    sys.path.remove(str(_FOLDER))
    raise ValueError(
        f"{what}, which needs the extra recipes: run pip install 'mpgluon[recipes]', then this "
        "command again"
    )
