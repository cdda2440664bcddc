"""Measuring honestly: cases side by side in one interleaved run, medians and quartiles."""
