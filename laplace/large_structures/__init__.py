"""Structures for many weights: corrected eigenvalues, low rank, and low rank beside Kronecker factors."""

from laplace.core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
