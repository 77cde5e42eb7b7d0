"""Predictions as plain modules of PyTorch, for programs that have no Laplace approximation."""

from laplace.core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
