"""Measuring honestly: cases side by side in one interleaved run, medians and quartiles.

To read in this order: ``timing`` (turns, quartiles, ratios), ``child`` and ``contestant`` (one
process each), ``race`` (who runs when), ``cases`` (what is timed), ``workloads``, ``loading`` and
``pytorch_peer`` (what contestants do), ``record``, ``report`` and ``figures``; ``growth`` (cost
against size). ``scaling`` and its neighbours are a model of many GPUs, not a measurement.
"""
