"""Weights from other frameworks: files read without running code, and names translated."""

from recipes.weights.state_dicts import read_state_dict
from recipes.weights.torchvision_names import values_for

__all__ = ["read_state_dict", "values_for"]
