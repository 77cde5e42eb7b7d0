"""Classes of the full curvature without its matrix: declarations, as those of `named.py`."""

from __future__ import annotations

from laplace.named import LLLaplace, SubnetLaplace
from laplace.parametric import ParametricLaplace
from laplace.structures.matrix_free import MatrixFreeCurvature
from laplace.structures.solve_report import SolveReport


class MatrixFreeLaplace(ParametricLaplace):
    """All weights, the full curvature by matrix–vector products, without forming the matrix.

    Options are given as `structure_kwargs={"tolerance": 1e-3, …}`.
    """

    _key = ("all", "matrix_free")
    structure = MatrixFreeCurvature

    @property
    def solve_reports(self) -> dict[str, SolveReport]:
        """Accuracy of the last iterative solves: their residuals, and the standard error of the log determinant.

        Keys are `"variances"`, `"samples"`, `"log determinant"` and `"solutions"`, as far as computed since the fit.
        Empty if the network is so small that the matrix was formed (`dense_below`): results are exact then.

        Raises:
            NotFittedError: Before `fit`.
        """
        curvature = self.fitted().curvature
        return curvature.reports if isinstance(curvature, MatrixFreeCurvature) else {}


class MatrixFreeLLLaplace(LLLaplace, MatrixFreeLaplace):
    """The last layer, the full curvature by matrix–vector products."""

    _key = ("last_layer", "matrix_free")


class MatrixFreeSubnetLaplace(SubnetLaplace, MatrixFreeLaplace):
    """A subnetwork, the full curvature by matrix–vector products."""

    _key = ("subnetwork", "matrix_free")
