"""Mixtures of Laplace approximations (Eschenhagen et al., 2021)."""

from laplace.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "laplace.mixture.mixture": "MixtureLaplace",
    },
)
