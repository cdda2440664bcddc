"""Training an image classifier: one config, one loop, results in one folder."""

from recipes.training.config import TrainingConfig
from recipes.training.interruption import InterruptedRunError
from recipes.training.loop import train

__all__ = ["InterruptedRunError", "TrainingConfig", "train"]
