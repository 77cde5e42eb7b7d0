"""From a Gaussian over the network's outputs to a distribution over targets."""

from laplace.core.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
