"""Compile the native library, and say how that went."""

from __future__ import annotations

import logging
import sys

from mpgluon.native.library import CompilationError, build

logging.basicConfig(level=logging.INFO, format="%(message)s")
try:
    sys.stdout.write(f"{build()}\n")
except (CompilationError, OSError) as error:
    sys.stderr.write(f"no native operators, MXNet's own are used: {error}\n")
