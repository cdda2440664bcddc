"""Find or compile the native library, trying again what failed before, and print the outcome."""

from __future__ import annotations

import logging
import sys

from mpgluon.kernels.library import build

logging.basicConfig(level=logging.INFO, format="%(message)s")
found = build(again=True)
if found.words:
    sys.stderr.write(f"{found.words}\n")
sys.stdout.write(f"{found.sentence}\n")
sys.exit(0 if found.path or found.state == "switched off" else 1)
