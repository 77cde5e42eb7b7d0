"""Structures of the curvature: one file each, one line of registration."""

from laplace.registry import Registry
from laplace.structures.base import AdditiveCurvature, Curvature, Precision
from laplace.structures.diag import DiagCurvature
from laplace.structures.full import FullCurvature
from laplace.structures.kron import KronCurvature

STRUCTURES: Registry[type[Curvature]] = Registry("hessian_structure")
STRUCTURES.register("full")(FullCurvature)
STRUCTURES.register("kron")(KronCurvature)
STRUCTURES.register("diag")(DiagCurvature)

__all__ = [
    "STRUCTURES",
    "AdditiveCurvature",
    "Curvature",
    "DiagCurvature",
    "FullCurvature",
    "KronCurvature",
    "Precision",
]
