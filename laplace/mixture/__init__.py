"""Mixtures of Laplace approximations (Eschenhagen et al., 2021)."""

from laplace.mixture.mixture import MixtureLaplace

__all__ = ["MixtureLaplace"]
