"""The way out of MXNet: its files read without it.

Nothing in this folder imports MXNet or the library, so that it works where neither is installed.
"""
