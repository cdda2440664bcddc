"""A page on which to try a network on photographs; the extra ``serve``."""
