"""Mixtures of Laplace approximations (Eschenhagen et al., 2021)."""

from laplace.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "laplace.mixture.confidence": "confidence_bound",
        "laplace.mixture.mimo": "MimoBatches mimo_loss mimo_outputs",
        "laplace.mixture.mixture": "MixtureLaplace",
    },
)
