"""Structures of the curvature: one file each, one line of registration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from laplace.core.lazy import attach
from laplace.core.registry import Registry

if TYPE_CHECKING:
    from laplace.structures.base import Curvature

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "laplace.structures.base": "AdditiveCurvature Curvature",
        "laplace.structures.block": "BlockCurvature",
        "laplace.contract.dense_defaults": "CurvatureFromDense DenseDefaults PrecisionFromDense",
        "laplace.structures.diag": "DiagCurvature",
        "laplace.large_structures.ekfac": "EkfacCurvature",
        "laplace.structures.full": "FullCurvature",
        "laplace.structures.kron": "KronCurvature",
        "laplace.large_structures.low_rank": "LowRankCurvature",
        "laplace.large_structures.lowrank_kron": "LowRankKronCurvature",
        "laplace.extensions.matrix_free": "MatrixFreeCurvature",
        "laplace.structures.precision": "Precision",
    },
    own="FAMILIES STRUCTURES",
)

STRUCTURES: Registry[type[Curvature]] = Registry("hessian_structure")
STRUCTURES.refer("full", "laplace.structures.full:FullCurvature")
STRUCTURES.refer("kron", "laplace.structures.kron:KronCurvature")
STRUCTURES.refer("diag", "laplace.structures.diag:DiagCurvature")
STRUCTURES.refer("block", "laplace.structures.block:BlockCurvature")
STRUCTURES.refer("lowrank", "laplace.large_structures.low_rank:LowRankCurvature")
STRUCTURES.refer("ekfac", "laplace.large_structures.ekfac:EkfacCurvature")
STRUCTURES.refer("lowrank_kron", "laplace.large_structures.lowrank_kron:LowRankKronCurvature")
STRUCTURES.refer("matrix_free", "laplace.extensions.matrix_free:MatrixFreeCurvature")

FORMS: Registry[type[Any]] = Registry("form")
"""Forms that a structure's curvature takes where that is less work; the posterior is the same."""
FORMS.refer("rows", "laplace.large_structures.rows:RowCurvature")

FAMILIES: Registry[type[Curvature]] = Registry("functional_approximation")
FAMILIES.refer("sod", "laplace.gp.subset:SubsetCurvature")
FAMILIES.refer("nystrom", "laplace.gp.nystrom:NystromCurvature")
FAMILIES.refer("variational", "laplace.extensions.valla:VariationalCurvature")
