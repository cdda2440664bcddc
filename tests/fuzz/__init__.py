"""Random networks in every format: `make fuzz`; docs/fuzzing.md has the comparisons."""
