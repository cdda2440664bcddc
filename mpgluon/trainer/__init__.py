"""The loss scale of a Gluon Trainer: scaled losses, their gradients, skipped steps."""
