"""Tools to use alongside training: plots, ONNX files, networks by name.

Each tool needs packages that an extra installs, and says which one where they are missing.
"""

from mpgluon_tools.extras import extra

__all__ = ["extra"]
