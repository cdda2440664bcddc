"""The numbers of a training run over time: a recorder, its files, warnings, and a comparison.

The public names are ``mpgluon.diagnostics.NumericsRecorder``, ``read_numerics`` and
``compare_numerics``.
"""
