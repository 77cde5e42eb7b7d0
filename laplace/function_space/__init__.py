"""Posteriors over functions: Gaussian processes of the linearised network on a subset of the data, and their kin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laplace.core.lazy import attach
from laplace.core.registry import Registry

if TYPE_CHECKING:
    from laplace.grid import (
        ELLA,
        LLELLA,
        BaseFunctionalLaplace,
        FunctionalLaplace,
        FunctionalLLLaplace,
        LLVaLLA,
        VaLLA,
    )
    from laplace.jacobian.jacobian import kernel
    from laplace.structures.base import Curvature
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "laplace.grid": "ELLA LLELLA BaseFunctionalLaplace FunctionalLaplace FunctionalLLLaplace LLVaLLA VaLLA",
            "laplace.jacobian.jacobian": "kernel",
        },
    )

FAMILIES: Registry[type[Curvature]] = Registry("functional_approximation")
FAMILIES.refer("sod", "laplace.structures.gp.subset:SubsetCurvature")
FAMILIES.refer("nystrom", "laplace.structures.gp.nystrom:NystromCurvature")
FAMILIES.refer("variational", "laplace.function_space.variational:VariationalCurvature")

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
