"""The recorders: of the steps that overflow, and of each layer's numbers."""
