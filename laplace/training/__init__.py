"""Training with a Laplace approximation in the loop."""

from typing import TYPE_CHECKING

from laplace.core.lazy import attach

if TYPE_CHECKING:
    from laplace.training.continual import TaskFit, TaskResult, continual_training, train_task
    from laplace.training.marglik import marglik_training
    from laplace.training.online import Checkpoint, OnlineLaplace
    from laplace.training.task_memory import TaskMemory, quadratic_penalty
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "laplace.training.continual": "TaskFit TaskResult continual_training train_task",
            "laplace.training.marglik": "marglik_training",
            "laplace.training.online": "Checkpoint OnlineLaplace",
            "laplace.training.task_memory": "TaskMemory quadratic_penalty",
        },
    )

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
