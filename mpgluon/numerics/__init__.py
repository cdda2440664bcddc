"""Numbers and formats: what 16 bits can hold, policies, loss scales, dtypes, reductions."""
