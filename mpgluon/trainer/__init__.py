"""What mpgluon keeps beside a Gluon Trainer: master weights, the loss scale, the fate of a step."""
