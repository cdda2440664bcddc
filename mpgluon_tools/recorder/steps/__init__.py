"""A flight recorder for skipped steps, and running such a step again.

The public names are ``mpgluon.diagnostics.FlightRecorder`` and ``mpgluon.diagnostics.replay``.
"""
