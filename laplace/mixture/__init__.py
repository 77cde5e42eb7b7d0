"""Mixtures of Laplace approximations (Eschenhagen et al., 2021)."""

from laplace.mixture.confidence import confidence_bound
from laplace.mixture.mixture import MixtureLaplace

__all__ = ["MixtureLaplace", "confidence_bound"]
