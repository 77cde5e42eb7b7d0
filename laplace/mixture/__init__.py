"""Mixtures of Laplace approximations (Eschenhagen et al., 2021)."""

from typing import TYPE_CHECKING

from laplace.core.lazy import attach

if TYPE_CHECKING:
    from laplace.mixture.confidence import confidence_bound
    from laplace.mixture.mimo import MimoBatches, mimo_loss, mimo_outputs
    from laplace.mixture.mixture import MixtureLaplace
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "laplace.mixture.confidence": "confidence_bound",
            "laplace.mixture.mimo": "MimoBatches mimo_loss mimo_outputs",
            "laplace.mixture.mixture": "MixtureLaplace",
        },
    )

__all__ = ["MimoBatches", "MixtureLaplace", "confidence_bound", "mimo_loss", "mimo_outputs"]
