"""Compare a port to PyTorch with the recorded layers of a network, and name the first difference.

    mpgluon parity layers.npz net/model.py

The recording is a file of mpgluon.deployment.record_layers. The port is a Python file with a
function `load` that returns a torch.nn.Module; if it has a parameter, it is called with the path of
model.safetensors in the same folder. PyTorch and NumPy are needed, and no MXNet.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpgluon_tools.commands.arguments import width

__all__ = ["EPILOG", "add_arguments", "run"]

EPILOG = "Exit status: 0 if the port is the same function, 1 if a layer differs, 2 for an error.\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("recording", help="of mpgluon.deployment.record_layers")
    parser.add_argument("model", help="a Python file with the function load")
    parser.add_argument(
        "--dtype", choices=["float16", "bfloat16"], default="float16",
        help="the format of 16 bits (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--page", metavar="FILE", help="write a page with a picture too (HTML)")


def run(
    options: argparse.Namespace,
    import_all_of_mpgluon: Callable[[], None],  # noqa: ARG001
) -> int:
    """Print the verdict and the table of layers; return 1 if one differs."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "PyTorch is not installed here; run this where the port runs: pip install torch numpy, "
            "and pip install --no-deps mpgluon"
        ) from error
    from mpgluon_tools.leaving.parity import compare_port

    found = compare_port(_port(Path(options.model)), options.recording, dtype=options.dtype)
    print(f"{found.verdict}\n\n{found.table().fitted(width())}")
    if options.page:
        from mpgluon_tools.leaving.parity_page import parity_page

        title = f"{Path(options.model).name} and {Path(options.recording).name}"
        try:
            Path(options.page).write_text(parity_page(found, title), encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"--page {options.page} cannot be written: {error.strerror}"
            ) from error
    return int(found.first is not None)


def _port(path: Path) -> Any:
    """Return the module that the function ``load`` of a file makes."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    sys.path.insert(0, str(path.parent))
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    load = getattr(module, "load", None)
    if load is None:
        raise ValueError(f"{path} has no function load, which returns the port")
    first = next(iter(inspect.signature(load).parameters.values()), None)
    takes_path = first is not None and (first.name == "path" or first.default is first.empty)
    port = load(str(path.with_name("model.safetensors"))) if takes_path else load()
    if not hasattr(port, "modules"):
        raise ValueError(f"load of {path} returns {type(port).__name__}, not a torch.nn.Module")
    return port
