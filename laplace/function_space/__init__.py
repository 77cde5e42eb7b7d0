"""Posteriors over functions: Gaussian processes of the linearised network on a subset of the data, and their kin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laplace.core.lazy import attach
from laplace.core.registry import Registry

if TYPE_CHECKING:
    from laplace.structures.base import Curvature

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "laplace.grid": "ELLA LLELLA BaseFunctionalLaplace FunctionalLaplace FunctionalLLLaplace LLVaLLA VaLLA",
        "laplace.jacobian.jacobian": "kernel",
    },
    own="FAMILIES",
)

FAMILIES: Registry[type[Curvature]] = Registry("functional_approximation")
FAMILIES.refer("sod", "laplace.structures.gp.subset:SubsetCurvature")
FAMILIES.refer("nystrom", "laplace.structures.gp.nystrom:NystromCurvature")
FAMILIES.refer("variational", "laplace.function_space.variational:VariationalCurvature")
