"""Helpers of every floor: names of blocks, files, findings, the machine."""
