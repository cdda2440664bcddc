"""Measuring honestly: cases side by side in one interleaved run, medians and quartiles.

To read in this order: ``timing`` (turns, quartiles, ratios), ``child`` and ``contestant`` (a process
for each), ``race`` (who runs when), ``cases`` (what is timed), ``workloads``, ``loading`` and
``pytorch_peer`` (what contestants do), ``record``, ``report`` and ``figures``; ``growth`` (cost
against size). Apart from these, ``scaling``, ``summation`` and what they lead to are about many
GPUs: a model, and no measurement.
"""
