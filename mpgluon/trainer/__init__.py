"""The additions to a Gluon Trainer: master weights, the loss scale, skipped steps."""
