"""Random networks in every format: `make fuzz`; docs/fuzzing.md says what is compared."""
