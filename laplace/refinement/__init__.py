"""Refinement of the linearised model (Immer et al., 2021, appendix A.3.2): its mode, or a variational Gaussian."""

from laplace.core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
