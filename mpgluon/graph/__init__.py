"""MXNet graphs as Python objects: reading one, rewriting one."""
