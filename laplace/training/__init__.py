"""Training with a Laplace approximation in the loop."""

from laplace.training.continual import TaskFit, TaskResult, continual_training, quadratic_penalty, train_task

__all__ = ["TaskFit", "TaskResult", "continual_training", "quadratic_penalty", "train_task"]
