"""Evidence: experiments that show what 16-bit training keeps and what breaks it, and their page."""
