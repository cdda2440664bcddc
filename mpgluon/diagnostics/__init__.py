"""Looking at numbers: what 16 bits did to them, where, and what to do about it."""
