"""Training with a Laplace approximation in the loop."""

from laplace.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "laplace.training.continual": "TaskFit TaskResult continual_training train_task",
        "laplace.training.marglik": "marglik_training",
        "laplace.training.online": "Checkpoint OnlineLaplace",
        "laplace.training.task_memory": "TaskMemory quadratic_penalty",
    },
)
