"""How the project is measured: experiments, benchmarks, and their records. Not in the wheel."""
