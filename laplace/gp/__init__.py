"""Gaussian processes of the linearised network over data: on a subset of them, and in a subspace of their outputs."""

from laplace.core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
