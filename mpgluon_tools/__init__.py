"""The second house of mpgluon: diagnostics, deployment and tools, which the library does not know.

Their public names are ``mpgluon.diagnostics``, ``mpgluon.deployment`` and ``mpgluon.tools``.
"""
