"""Number formats, policies and loss scales, on NumPy: nothing here needs MXNet."""
