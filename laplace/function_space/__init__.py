"""Posteriors over functions: Gaussian processes of the linearised network on a subset of the data, and their kin."""

from laplace.function_space.base import BaseFunctionalLaplace
from laplace.function_space.named import ELLA, LLELLA, FunctionalLaplace, FunctionalLLLaplace
from laplace.function_space.variational_named import LLVaLLA, VaLLA
from laplace.jacobian.kernels import kernel

__all__ = [
    "ELLA",
    "LLELLA",
    "BaseFunctionalLaplace",
    "FunctionalLLLaplace",
    "FunctionalLaplace",
    "LLVaLLA",
    "VaLLA",
    "kernel",
]
