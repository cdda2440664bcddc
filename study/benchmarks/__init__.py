"""Libraries and formats timed side by side: in turn, each in a process of its own.

To read in this order: ``timing`` (turns, quartiles, ratios), ``child`` and ``contestant`` (one
process each), ``race`` (who runs when), ``cases``, ``zoo``, ``growth`` and ``memory`` (what is
measured), ``workloads``, ``sequences``, ``loading`` and ``pytorch_peer`` (what contestants do),
``machine``, ``record``, ``report`` and ``figures``. ``summation`` and ``measured_link`` serve
docs/scaling.md.
"""
