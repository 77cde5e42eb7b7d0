"""Training with hyper-parameters that follow the evidence."""

from laplace.training.marglik import marglik_training
from laplace.training.online import Checkpoint, OnlineLaplace

__all__ = ["Checkpoint", "OnlineLaplace", "marglik_training"]
