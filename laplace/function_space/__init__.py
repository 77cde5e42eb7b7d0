"""Posteriors over functions: Gaussian processes of the linearised network on a subset of the data, and their kin."""

from laplace.function_space.base import BaseFunctionalLaplace
from laplace.function_space.kernels import kernel
from laplace.function_space.named import FunctionalLaplace, FunctionalLLLaplace

__all__ = ["BaseFunctionalLaplace", "FunctionalLLLaplace", "FunctionalLaplace", "kernel"]
