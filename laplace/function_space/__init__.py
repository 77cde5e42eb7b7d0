"""Posteriors over functions: Gaussian processes of the linearised network on a subset of the data, and their kin."""

from laplace.core.registry import Registry
from laplace.function_space.base import BaseFunctionalLaplace
from laplace.function_space.named import ELLA, LLELLA, FunctionalLaplace, FunctionalLLLaplace
from laplace.function_space.variational import VariationalCurvature
from laplace.function_space.variational_named import LLVaLLA, VaLLA
from laplace.jacobian.kernels import kernel
from laplace.structures.base import Curvature
from laplace.structures.gp.nystrom import NystromCurvature
from laplace.structures.gp.subset_of_data import SubsetCurvature

FAMILIES: Registry[type[Curvature]] = Registry("functional_approximation")
FAMILIES.register("sod")(SubsetCurvature)
FAMILIES.register("nystrom")(NystromCurvature)
FAMILIES.register("variational")(VariationalCurvature)

__all__ = [
    "ELLA",
    "FAMILIES",
    "LLELLA",
    "BaseFunctionalLaplace",
    "FunctionalLLLaplace",
    "FunctionalLaplace",
    "LLVaLLA",
    "VaLLA",
    "kernel",
]
