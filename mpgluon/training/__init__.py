"""Training an image classifier: one config, one loop, results in one folder."""

from mpgluon.training.config import TrainingConfig
from mpgluon.training.interruption import InterruptedRunError
from mpgluon.training.loop import train

__all__ = ["InterruptedRunError", "TrainingConfig", "train"]
