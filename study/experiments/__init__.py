"""The experiments behind docs/results.md, their records, and the page. Not in the wheel."""
