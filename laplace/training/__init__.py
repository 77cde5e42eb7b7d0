"""Training with a Laplace approximation in the loop."""

from laplace.training.continual import TaskFit, TaskResult, continual_training, quadratic_penalty, train_task
from laplace.training.marglik import marglik_training
from laplace.training.online import Checkpoint, OnlineLaplace

__all__ = [
    "Checkpoint",
    "OnlineLaplace",
    "TaskFit",
    "TaskResult",
    "continual_training",
    "marglik_training",
    "quadratic_penalty",
    "train_task",
]
