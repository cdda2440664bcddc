"""Networks by name: gluoncv's and two of our own."""

import mpgluon_tools.zoo as _home
from mpgluon_tools.zoo import *  # noqa: F403

__all__ = _home.__all__
