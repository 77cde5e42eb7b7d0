"""The full curvature without its matrix: the data are held, and the network is asked for products H v = Σ Jᵀ Λ J v.

One reading of the data keeps every batch's inputs with the output Hessian Λ at the fit; where Kronecker factors are to
precondition (`preconditioners.py`), it sums those. No other part of the training set, and no matrix of P rows and
columns, is held. Where P is small the matrix is less work than its products, and is formed from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from laplace.core.argument_checks import check_counts
from laplace.core.batch import Inputs
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.layout import Layout
from laplace.engines.engine import MEMORY_BUDGET, BatchSummary, CurvatureEngine
from laplace.engines.profile import BatchProfile
from laplace.errors import InvalidArgument, InvalidData, UnsupportedError
from laplace.structures.algebra import Recent
from laplace.structures.base import Curvature, DataPass, require_finite
from laplace.structures.cost import Cost
from laplace.structures.fields import entries, from_state, is_finite, state_of
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
        preconditioner: `"lowrank"`, a sketch of the dominant eigenpairs, or `"kron"`, Kronecker factors.
        rank: Eigenpairs of the sketch; 0 for the prior alone.
        max_iterations: Products of the curvature with a block of vectors; a solution that takes more is given with a
            warning.
        n_probes: Probes of the log determinant; its standard error falls with their root.
        seed: Of the probes and the sketch, which are the same for all hyper-parameters.
        dense_below: Weights up to which the matrix is formed, and everything is exact.
        kept_bytes: Bytes of features and Jacobians that are kept from one product to the next.

    Raises:
        InvalidArgument: A value out of range.
    """

    tolerance: float = 1e-3
    preconditioner: str = "lowrank"
    rank: int = 50
    max_iterations: int = 500
    n_probes: int = 16
    seed: int = 0
    dense_below: int = _DENSE
    kept_bytes: int = MEMORY_BUDGET

    def __post_init__(self) -> None:
        check_counts(max_iterations=self.max_iterations)
        check_counts(0, dense_below=self.dense_below, kept_bytes=self.kept_bytes, rank=self.rank)
        check_counts(2, n_probes=self.n_probes)
        if not 0 < self.tolerance < 1:
            raise InvalidArgument(f"tolerance={self.tolerance}; it must lie in (0, 1).")
        if self.preconditioner not in ("lowrank", "kron"):
            raise InvalidArgument(f"preconditioner={self.preconditioner!r}; accepted are 'lowrank' and 'kron'.")

    @property
    def solving(self) -> SolveOptions:
        """Those of the answers."""
        return SolveOptions(self.tolerance, self.max_iterations, self.n_probes, self.seed, self.rank)


@dataclass(frozen=True, eq=False)
class MatrixFreeCurvature(Curvature):
    """The full curvature by its products.

    Attributes:
        terms: E.
        factors: Kronecker factors of the same data, for a preconditioner; None for a sketch.
        data: What products are formed from.
        mean: θ*, at which, `[P]`.
        chosen: Options.
    """

    terms: int
    factors: KronCurvature | None
    data: tuple[HeldBatch, ...]
    mean: Tensor
    chosen: MatrixFreeOptions
    name = "matrix_free"
    options = MatrixFreeOptions
    asks_network = True
    holds_inputs = True
    needs_columns = True

    @property
    def n_terms(self) -> int:
        return self.terms

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
        row = profile.n_params * profile.itemsize
        outputs = profile.n_data * profile.n_outputs
        data = (profile.n_batches or 1) * (profile.inputs + outputs * profile.itemsize)
        maps = min(options.kept_bytes, (profile.n_batches or 1) * outputs * row)
        solving = min(MEMORY_BUDGET, 8 * outputs * row) + 3 * min(options.rank + 10, profile.n_params) * row
        products = 4.0 * _ITERATIONS * outputs * profile.n_params
        kron = Cost(fitted=0, running=0, adding=0)
        if options.preconditioner == "kron":
            kron = KronCurvature.cost(profile, None)
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
                "hessian_structure='matrix_free' asks the network for products, and its weights are no longer those of "
                "the former fit. Fit all data together with override=True, or use hessian_structure='kron', 'diag' or "
                "'full', whose curvature is stored."
            )
        factors = None if self.factors is None or other.factors is None else self.factors + other.factors
        return replace(self, factors=factors, data=(*self.data, *other.data))

    def scaled(self, factor: float) -> MatrixFreeCurvature:
        data = tuple(batch.scaled(factor) for batch in self.data)
        return replace(self, factors=None if self.factors is None else self.factors.scaled(factor), data=data)

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
                "curvature of hessian_structure='matrix_free' is known only through products, which the network "
                "computes; take its precision from the posterior (la.posterior(), la.evidence())."
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
        if self.factors is not None:
            self.factors.decompose()

    # What is saved and shown.

    def state(self) -> dict[str, Any]:
        return {
            "terms": self.terms,
            "factors": None if self.factors is None else self.factors.state(),
            "data": [batch.state() for batch in self.data],
            "mean": self.mean,
            "chosen": entries(self.chosen),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> MatrixFreeCurvature:
        data = tuple(HeldBatch.from_state(batch) for batch in state["data"])
        chosen = MatrixFreeOptions(**state["chosen"])
        factors = None if state["factors"] is None else KronCurvature.from_state(state["factors"])
        return cls(state["terms"], factors, data, state["mean"], chosen)

    def __getstate__(self) -> dict[str, Any]:
        """State that is copied and pickled: no network, and nothing that can be asked of it again."""
        return entries(self)


_ITERATIONS = 50
"""Iterations of conjugate gradients that a plan expects."""


class _Holding(DataPass):
    """Holds what products take, and sums Kronecker factors where they are to precondition.

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
        summary, output = self.engine.output_curvature(x, y)
        require_finite(is_finite(output.hessian))
        if self.options.preconditioner == "kron":
            self._add_factors(x, y)
        self.data.append(HeldBatch.of(x, output))
        return summary

    def _add_factors(self, x: Inputs, y: Tensor) -> None:
        if self.factors is None:
            _, self.factors = KronCurvature.from_batch(self.engine, x, y)
        else:
            _, self.factors = self.factors.with_batch(self.engine, x, y)
        require_finite(self.factors.is_finite())

    def state(self) -> dict[str, Any]:
        return {"factors": state_of(self.factors), "data": [batch.state() for batch in self.data]}

    def resumed(self, state: Mapping[str, Any]) -> DataPass:
        factors = state["factors"]
        self.factors = None if factors is None else from_state(KronCurvature, factors)
        self.data = [HeldBatch.from_state(batch) for batch in state["data"]]
        return self

    def finish(self) -> MatrixFreeCurvature:
        if not self.data:
            raise InvalidData("no batch was read.")
        mean = self.engine.problem.mean()
        dtype = torch.promote_types(mean.dtype, torch.float32)
        n_terms = self.data[0].shape[1] if self.engine.split_outputs else 1
        factors = None if self.factors is None else self.factors.kept()
        return MatrixFreeCurvature(n_terms, factors, tuple(self.data), mean.to(dtype), self.options)
