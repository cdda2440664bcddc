"""``python -m mpgluon``: the console command, where MXNet can be imported."""

import sys

from mpgluon.tools.commands import main

sys.exit(main())
