"""The console command ``mpgluon``, which begins without MXNet: its doctor works where MXNet fails.

``import mpgluon`` imports MXNet. So this module is not in the package, whose commands it runs.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Callable, Optional

__all__ = ["begin_without_mxnet", "import_mpgluon", "main"]


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run a command line, by default this process's, and return the exit status."""
    import_all_of_mpgluon = begin_without_mxnet()
    from mpgluon_tools import commands

    return commands.main(arguments, import_all_of_mpgluon)


def begin_without_mxnet() -> Callable[[], None]:
    """Make modules of mpgluon importable without MXNet; return a function that imports the rest.

    The package is empty at first, and has only the place of its modules. MXNet is then imported to
    compute with all cores, unless the environment says with how many.
    """
    if "mpgluon" in sys.modules:
        return lambda: None
    spec = importlib.util.find_spec("mpgluon")
    if spec is None or spec.loader is None:
        raise ImportError(
            "mpgluon is not installed for this Python; run pip install mpgluon, or in its checkout "
            "pip install -e ."
        )
    loader, package = spec.loader, importlib.util.module_from_spec(spec)
    sys.modules["mpgluon"] = package

    def import_the_rest() -> None:
        from mpgluon.base.processor import use_every_core

        use_every_core()
        loader.exec_module(package)

    return import_the_rest


def import_mpgluon() -> None:
    """Import all of mpgluon as the command does, whose threads a script is to have."""
    begin_without_mxnet()()


if __name__ == "__main__":
    sys.exit(main())
