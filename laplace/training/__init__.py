"""Training with a Laplace approximation in the loop."""

from laplace.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "laplace.training.online": "Checkpoint OnlineLaplace marglik_training",
    },
)
