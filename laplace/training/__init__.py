"""Training with a Laplace approximation in the loop."""

from laplace.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "laplace.training.continual": "TaskFit TaskMemory TaskResult continual_training quadratic_penalty train_task",
        "laplace.training.online": "Checkpoint OnlineLaplace marglik_training",
    },
)
