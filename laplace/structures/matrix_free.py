"""The full curvature without its matrix: the data are held, and the network is asked for products H v = Σ Jᵀ Λ J v.

One reading of the data sums Kronecker factors, which precondition (`matrix_free_precision.py`), and keeps every batch's
inputs with the output Hessian Λ at the fit. No other part of the training set, and no matrix of P rows and columns, is
held. Where P is small the matrix is less work than its products, and is formed from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from laplace.core.batch import Inputs
from laplace.core.hyperparameters import GaussianPrior, check_counts
from laplace.core.layout import Layout
from laplace.engines.engine import MEMORY_BUDGET, BatchSummary, CurvatureEngine
from laplace.engines.profile import BatchProfile
from laplace.errors import InvalidArgument, InvalidData, UnsupportedError
from laplace.structures.algebra import Recent
from laplace.structures.base import Curvature, DataPass, require_finite
from laplace.structures.cost import Cost
from laplace.structures.fields import entries, is_finite
from laplace.structures.held_data import DataProducts, HeldBatch
from laplace.structures.kron import KronCurvature
from laplace.structures.matrix_free_precision import MatrixFreePrecision, SolveOptions, System
from laplace.structures.precision import Precision
from laplace.structures.solve_report import SolveReport
from laplace.structures.variances_over_priors import VariancesOverPriors

_DENSE = 1024
"""Weights up to which the matrix is less work than its products."""


@dataclass(frozen=True)
class MatrixFreeOptions:
    """Options of a curvature that is known by its products.

    Attributes:
        tolerance: Largest residual of a solution, relative to its right-hand side, in the norm of the preconditioner;
            a variance is then wrong by about its square, relatively.
        max_iterations: Products of the curvature with a block of vectors; a solution that takes more is given with a
            warning.
        n_probes: Probes of the log determinant; its standard error falls with their root.
        seed: Of the probes, which are the same for all hyper-parameters.
        dense_below: Weights up to which the matrix is formed, and everything is exact.
        kept_bytes: Bytes of features and Jacobians that are kept from one product to the next.

    Raises:
        InvalidArgument: A value out of range.
    """

    tolerance: float = 1e-3
    max_iterations: int = 500
    n_probes: int = 16
    seed: int = 0
    dense_below: int = _DENSE
    kept_bytes: int = MEMORY_BUDGET

    def __post_init__(self) -> None:
        check_counts(max_iterations=self.max_iterations)
        check_counts(0, dense_below=self.dense_below, kept_bytes=self.kept_bytes)
        check_counts(2, n_probes=self.n_probes)
        if not 0 < self.tolerance < 1:
            raise InvalidArgument(f"tolerance={self.tolerance}; it must lie in (0, 1).")

    @property
    def solving(self) -> SolveOptions:
        """Those of the answers."""
        return SolveOptions(self.tolerance, self.max_iterations, self.n_probes, self.seed)


@dataclass(frozen=True, eq=False)
class MatrixFreeCurvature(Curvature):
    """The full curvature by its products.

    Attributes:
        factors: Kronecker factors of the same data, of the preconditioner.
        data: What products are formed from.
        mean: θ*, at which, `[P]`.
        chosen: Options.
    """

    factors: KronCurvature
    data: tuple[HeldBatch, ...]
    mean: Tensor
    chosen: MatrixFreeOptions
    name = "matrix_free"
    options = MatrixFreeOptions
    asks_network = True
    needs_columns = True

    @property
    def n_terms(self) -> int:
        return self.factors.n_terms

    @property
    def note(self) -> str:
        rows = sum(batch.shape[0] for batch in self.data)
        return (
            f"products with the full curvature to a residual of {self.chosen.tolerance:.2g}; held with the inputs of "
            f"{rows:,} data"
        )

    @property
    def reports(self) -> dict[str, SolveReport]:
        """The last report of every question that was asked; empty where the matrix was formed."""
        return {} if self._latest is None else self._latest.reports.by_question()

    @classmethod
    def first_pass(cls, engine: CurvatureEngine, options: MatrixFreeOptions) -> DataPass:
        return _Holding(engine, options)

    @classmethod
    def cost(cls, profile: BatchProfile, options: MatrixFreeOptions) -> Cost:
        kron = KronCurvature.cost(profile, None)
        row = profile.n_params * profile.itemsize
        outputs = profile.n_data * profile.n_outputs
        data = (profile.n_batches or 1) * (profile.inputs + outputs * profile.itemsize)
        maps = min(options.kept_bytes, (profile.n_batches or 1) * outputs * row)
        solving = min(MEMORY_BUDGET, 8 * outputs * row)
        products = 4.0 * _ITERATIONS * outputs * profile.n_params
        return replace(
            kron,
            fitted=kron.fitted + data + row,
            running=kron.running + data,
            adding=kron.adding + data + row,
            posterior=kron.posterior + maps + solving,
            projecting=kron.projecting + 3 * profile.piece_bytes([profile.n_params], profile.n_outputs),
            solve=kron.solve + products,
        )

    def __add__(self, other: Curvature) -> MatrixFreeCurvature:
        """Curvature of both sets of data.

        Raises:
            UnsupportedError: The network was trained between the two fits.
        """
        if not isinstance(other, MatrixFreeCurvature):
            return NotImplemented
        if not torch.equal(self.mean, other.mean):
            raise UnsupportedError(
                "hessian_structure='matrix_free' asks the network for products, and its weights are not those of the "
                "former fit any more, at which that curvature was. Fit all data together with override=True, or use "
                "hessian_structure='kron', 'diag' or 'full', whose curvature is held."
            )
        return replace(self, factors=self.factors + other.factors, data=(*self.data, *other.data))

    def scaled(self, factor: float) -> MatrixFreeCurvature:
        data = tuple(batch.scaled(factor) for batch in self.data)
        return replace(self, factors=self.factors.scaled(factor), data=data)

    # The posterior.

    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> Precision:
        """The posterior precision.

        Args:
            weights: As of `Curvature.precision`.
            prior: As of `Curvature.precision`.
            **options: `engine`, of the network with the weights of the fit.

        Raises:
            UnsupportedError: There is no engine.
        """
        system = self._system(options.get("engine"))
        if self._is_small:
            return system.full.precision(weights, prior)
        return MatrixFreePrecision(system, weights, prior)

    def scan(self, weights: Tensor, layout: Layout, **options: Any) -> VariancesOverPriors:
        if not self._is_small:
            return super().scan(weights, layout, **options)
        return self._system(options.get("engine")).full.scan(weights, layout)

    @property
    def _is_small(self) -> bool:
        return len(self.mean) <= self.chosen.dense_below

    def _system(self, engine: CurvatureEngine | None) -> System:
        if engine is None:
            raise UnsupportedError(
                "curvature of hessian_structure='matrix_free' is known by products that a network is asked for; ask "
                "the posterior (la.posterior(), la.evidence()) for its precision."
            )
        return self._recent(engine, lambda: self._made(engine))

    def _made(self, engine: CurvatureEngine) -> System:
        products = DataProducts(engine, self.data, self.chosen.kept_bytes)
        return System(products, self.factors, self.chosen.solving, self.n_terms)

    @cached_property
    def _recent(self) -> Recent[System]:
        return Recent()

    @property
    def _latest(self) -> System | None:
        return self._recent.value

    def decompose(self, **options: Any) -> None:
        self.factors.decompose()

    # What is saved and shown.

    def state(self) -> dict[str, Any]:
        return {
            "factors": self.factors.state(),
            "data": [batch.state() for batch in self.data],
            "mean": self.mean,
            "chosen": entries(self.chosen),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> MatrixFreeCurvature:
        data = tuple(HeldBatch.from_state(batch) for batch in state["data"])
        chosen = MatrixFreeOptions(**state["chosen"])
        return cls(KronCurvature.from_state(state["factors"]), data, state["mean"], chosen)

    def __getstate__(self) -> dict[str, Any]:
        """State that is copied and pickled: no network, and nothing that can be asked of it again."""
        return entries(self)


_ITERATIONS = 50
"""Iterations of conjugate gradients that a plan expects."""


class _Holding(DataPass):
    """Sums Kronecker factors, and holds what products take.

    Args:
        engine: Computes both.
        options: Of the structure.
    """

    def __init__(self, engine: CurvatureEngine, options: MatrixFreeOptions) -> None:
        self.engine = engine
        self.options = options
        self.factors: KronCurvature | None = None
        self.data: list[HeldBatch] = []

    def add(self, x: Inputs, y: Tensor) -> BatchSummary:
        output = self.engine.output_curvature(x, y)
        if self.factors is None:
            summary, self.factors = KronCurvature.from_batch(self.engine, x, y)
        else:
            summary, self.factors = self.factors.with_batch(self.engine, x, y)
        require_finite(self.factors.is_finite())
        require_finite(is_finite(output.hessian))
        self.data.append(HeldBatch.of(x, output))
        return summary

    def finish(self) -> MatrixFreeCurvature:
        if self.factors is None:
            raise InvalidData("no batch was read.")
        mean = self.engine.problem.mean()
        dtype = torch.promote_types(mean.dtype, torch.float32)
        return MatrixFreeCurvature(self.factors.kept(), tuple(self.data), mean.to(dtype), self.options)
