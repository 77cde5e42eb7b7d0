"""Mixtures of Laplace approximations (Eschenhagen et al., 2021)."""

from laplace.mixture.confidence import confidence_bound
from laplace.mixture.mimo import mimo_outputs
from laplace.mixture.mimo_training import MimoBatches, mimo_loss
from laplace.mixture.mixture import MixtureLaplace

__all__ = ["MimoBatches", "MixtureLaplace", "confidence_bound", "mimo_loss", "mimo_outputs"]
