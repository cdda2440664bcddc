"""Fixture of the tests in this folder: the scenarios of `ranks_train`, in 2 and 4 processes."""

from __future__ import annotations

import numpy as np
import pytest
from distributed_helpers import HERE, mpirun, succeeded


@pytest.fixture(
    scope="session",
    params=[pytest.param(2, id="2 ranks"), pytest.param(4, id="4 ranks", marks=pytest.mark.slow)],
)
def scenarios(request, tmp_path_factory) -> tuple[int, dict[str, np.ndarray]]:
    """Return the number of ranks, and by name what every scenario left on all of them."""
    folder = tmp_path_factory.mktemp("ranks")
    succeeded(mpirun(request.param, HERE / "ranks_train.py", folder))
    with np.load(folder / "results.npz") as file:
        return request.param, {name: file[name] for name in file.files}
