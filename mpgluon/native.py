"""The former name of :mod:`mpgluon.kernels`, for programs and ``python -m mpgluon.native``."""

import runpy

from mpgluon.kernels import Status, available, load, status

__all__ = ["Status", "available", "load", "status"]

if __name__ == "__main__":
    runpy.run_module("mpgluon.kernels", run_name="__main__")
