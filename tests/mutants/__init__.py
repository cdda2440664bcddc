"""Planted faults in the library, each of which a test must notice."""
