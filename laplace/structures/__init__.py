"""Structures of the curvature: one file each, one line of registration."""

from laplace.core.registry import Registry
from laplace.structures.additive import AdditiveCurvature
from laplace.structures.base import Curvature
from laplace.structures.block import BlockCurvature
from laplace.structures.dense_defaults import CurvatureFromDense, DenseDefaults, PrecisionFromDense
from laplace.structures.diag import DiagCurvature
from laplace.structures.ekfac import EkfacCurvature
from laplace.structures.full import FullCurvature
from laplace.structures.kron import KronCurvature
from laplace.structures.low_rank import LowRankCurvature
from laplace.structures.lowrank_kron import LowRankKronCurvature
from laplace.structures.matrix_free import MatrixFreeCurvature
from laplace.structures.precision import Precision

STRUCTURES: Registry[type[Curvature]] = Registry("hessian_structure")
STRUCTURES.register("full")(FullCurvature)
STRUCTURES.register("kron")(KronCurvature)
STRUCTURES.register("diag")(DiagCurvature)
STRUCTURES.register("block")(BlockCurvature)
STRUCTURES.register("lowrank")(LowRankCurvature)
STRUCTURES.register("ekfac")(EkfacCurvature)
STRUCTURES.register("lowrank_kron")(LowRankKronCurvature)
STRUCTURES.register("matrix_free")(MatrixFreeCurvature)

__all__ = [
    "STRUCTURES",
    "AdditiveCurvature",
    "BlockCurvature",
    "Curvature",
    "CurvatureFromDense",
    "DenseDefaults",
    "DiagCurvature",
    "EkfacCurvature",
    "FullCurvature",
    "KronCurvature",
    "LowRankCurvature",
    "LowRankKronCurvature",
    "MatrixFreeCurvature",
    "Precision",
    "PrecisionFromDense",
]
