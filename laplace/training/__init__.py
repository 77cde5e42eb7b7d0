"""Training with a Laplace approximation in the loop."""

from laplace.training.continual import TaskFit, TaskResult, continual_training, train_task
from laplace.training.marglik import marglik_training
from laplace.training.online import Checkpoint, OnlineLaplace
from laplace.training.penalty import quadratic_penalty
from laplace.training.task_memory import TaskMemory

__all__ = [
    "Checkpoint",
    "TaskMemory",
    "OnlineLaplace",
    "TaskFit",
    "TaskResult",
    "continual_training",
    "marglik_training",
    "quadratic_penalty",
    "train_task",
]
