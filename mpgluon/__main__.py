"""``python -m mpgluon``: the console command, where MXNet can be imported.

Python has imported the package by now, and MXNet with it. If the environment does not say with how
many threads it computes, another process begins with all cores, as the command does.
"""

import os
import subprocess
import sys

from mpgluon_command import main

if "OMP_NUM_THREADS" not in os.environ:
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    os.execv(sys.executable, [sys.executable, *flags, "-m", "mpgluon_command", *sys.argv[1:]])
sys.exit(main())
