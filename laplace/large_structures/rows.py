"""Full curvature of few data: H = Aᵀ A by its R < P rows A, which are kept as factors; the posterior is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.core.batch import Inputs
from laplace.core.cached import cached_property
from laplace.core.gram import row_gram
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.inference import kept_for_later
from laplace.core.layout import Layout
from laplace.core.memory import available, in_units
from laplace.core.nested import is_finite
from laplace.core.pieces import bytes_at_once
from laplace.core.precision_policy import wide_dtype, widened
from laplace.engines.cost import DOUBLE, Cost
from laplace.engines.sinks import KeptRows, RowSink
from laplace.errors import OutOfMemory
from laplace.jacobian.blocks import CHUNK_BYTES, TensorShape
from laplace.jacobian.full_sum import MatrixSum
from laplace.jacobian.jacobian import Jacobian
from laplace.large_structures.dual import JointPrecision, ProjectedScan, WeightedRows
from laplace.large_structures.woodbury import left_of
from laplace.structures.base import Curvature, require_finite
from laplace.structures.full import FullCurvature, FullPrecision, is_less_work
from laplace.structures.precision import Form

if TYPE_CHECKING:
    from laplace.engines.engine import BatchSummary, CurvatureEngine
    from laplace.engines.profile import BatchProfile

_MATRICES = 6
"""Matrices `[P, P]` in float64 that a factorisation passes through."""


@dataclass(frozen=True)
class RowCurvature(FullCurvature):
    """The unit curvature by its rows; `sums` is empty."""

    parts: tuple[KeptRows, ...] = ()  # The rows of every batch
    n_rows: int = 0  # R
    n_bytes: int = 0  # Bytes of the rows
    terms: int = 1  # E

    @property
    def n_terms(self) -> int:
        return self.terms

    @property
    def note(self) -> str:
        return (
            f"factored over {self.n_rows:,} rows of the data, fewer than the {self.sums.size:,} weights; holds the "
            "inputs of the layers there, which states do not"
        )

    # Sums over data, which become a matrix as soon as that is less work.

    def with_batch(self, engine: CurvatureEngine, x: Inputs, y: Tensor) -> tuple[BatchSummary, FullCurvature]:
        sink = RowSink(len(engine.problem.slots), self.sums)
        summary = engine.accumulate(x, y, sink)
        require_finite(is_finite(sink.kept))
        return summary, replace(self, terms=sink.n_terms)._with_rows(sink.kept)

    def _with_rows(self, parts: Sequence[KeptRows]) -> FullCurvature:
        """The curvature with more rows: a matrix once it has others than rows, or these take more work or memory."""
        n_rows = self.n_rows + sum(part.count for part in parts)
        n_bytes = self.n_bytes + sum(part.n_bytes for part in parts)
        grown = replace(self, parts=(*self.parts, *parts), n_rows=n_rows, n_bytes=n_bytes)
        return grown if grown._is_less_work else grown.summed()

    @property
    def _is_less_work(self) -> bool:
        size = self.sums.size
        is_small = self.n_bytes < self.terms * DOUBLE * size**2
        return self.sums.is_empty and is_small and is_less_work(size, self.n_rows)

    def summed(self) -> FullCurvature:
        """The matrix, by the sums that would have been formed at once."""
        sums = self.sums if not self.sums.is_empty else MatrixSum(self.sums.size)
        for part in self.parts:
            part.add_to(sums, self.terms)
        return FullCurvature(sums)

    @cached_property
    def values(self) -> Tensor:
        self.require_memory(2)
        with torch.no_grad(), kept_for_later():
            return self.summed().values

    def require_memory(self, n_matrices: int) -> None:
        """Refuses matrices of all weights for which there is no memory."""
        size = self.sums.size
        needed, there = n_matrices * self.terms * DOUBLE * size**2, available(self.parts[0].device)
        if there is not None and there.size < needed:
            raise OutOfMemory(
                f"this takes {n_matrices} matrices of {size:,} × {size:,} weights, {in_units(needed)}, and "
                f"{in_units(there.size)} are available ({there.source}): the posterior is held by {self.n_rows:,} rows "
                "of its data. Predictions, samples, the evidence and la.functional_variance take no such matrix."
            )

    def kept(self, *, additive: bool = False) -> FullCurvature:
        return self.summed() if additive else self

    def is_finite(self) -> Tensor | bool:
        return True  # every batch was looked at

    def __add__(self, other: Curvature) -> FullCurvature:
        if isinstance(other, RowCurvature) and other.terms == self.terms:
            return self._with_rows(other.parts)
        return super().__add__(other)

    # The posterior.

    @cached_property
    def rows(self) -> WeightedRows:
        """The rows, weighted."""
        with torch.no_grad(), kept_for_later():
            return WeightedRows.from_jacobians([(part.jacobian(), part.first) for part in self.parts], self.terms)

    @cached_property
    def head(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Features Φ = Tᵀ Qᵀ of a head, as Q `[D, n]` and T `[n, N]`, and roots of Λ `[N, K, C]`, float64.

        None of other weights. Q is orthonormal: coordinates in it keep the digits that kernels between data which
        repeat lose.
        """
        hessians = [part.hessian for part in self.parts if part.hessian is not None]
        if len(hessians) < len(self.parts):
            return None
        with torch.no_grad(), kept_for_later():
            features = torch.cat([widened(Jacobian(part.blocks).head_features()) for part in self.parts])
            basis, triangle = torch.linalg.qr(features.T)
            return basis, triangle, torch.cat([hessian.wide().root().permute(1, 0, 2) for hessian in hessians])

    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> RowPrecision:
        return RowPrecision((self.rows,), weights, prior, weights.dtype, self)

    def scan(self, weights: Tensor, layout: Layout, **options: Any) -> ProjectedScan:
        one = torch.ones((), dtype=wide_dtype(weights.device), device=weights.device)
        weight, basis = (weights[0], self.rows.unit) if self.terms == 1 else (one, self.rows.basis(weights, None))
        return ProjectedScan(lambda *asked: (basis.split(*asked),), weight, 1.0, weights.dtype)

    # What is saved is the matrix: the rows are what layers see of the data, and stay in memory.

    def moved(self, device: torch.device | None, dtype: torch.dtype | None) -> RowCurvature:
        parts = tuple(part.moved(device, dtype if dtype == wide_dtype() else None) for part in self.parts)
        return replace(self, parts=parts, n_bytes=sum(part.n_bytes for part in parts))

    def __reduce__(self) -> tuple[Any, ...]:
        return FullCurvature.from_state, (self.state(),)

    def __deepcopy__(self, memo: object) -> RowCurvature:
        return self  # nothing of it changes

    @classmethod
    def cost_of(cls, profile: BatchProfile, n_rows: int) -> Cost | None:
        """That of so many rows; None where they take more memory than the matrix."""
        n_data = (profile.n_batches or 0) * profile.n_data
        kept = sum(min(n_rows * t.size, _factors(t, n_data, n_rows)) for t in profile.tensors) * profile.itemsize
        if kept >= profile.n_terms * DOUBLE * profile.n_params**2:
            return None
        n_params, square = profile.n_params, DOUBLE * n_rows**2
        return Cost(
            fitted=kept, running=kept, adding=kept, posterior=2 * kept + 5 * square,
            projecting=4 * bytes_at_once(CHUNK_BYTES, profile.device),
            note=f"factored over {n_rows:,} rows of the data, fewer than the {n_params:,} weights",
        )  # fmt: skip


def _factors(tensor: TensorShape, n_data: int, n_rows: int) -> int:
    """Numbers of the factors of the rows of one tensor."""
    inputs = 0 if tensor.is_bias else n_data * tensor.positions * tensor.groups * tensor.n_inputs
    outputs = n_data if tensor.is_head else n_rows * tensor.positions * tensor.groups
    return inputs + outputs * tensor.n_outputs if tensor.factored else n_rows * tensor.size


@dataclass(frozen=True, eq=False)
class RowPrecision(JointPrecision):
    """P = Σ_e w_e H_e + diag(δ), factored between the rows of H; its matrices are made when they are asked for."""

    curvature: RowCurvature  # H

    def variance(self, jacobian: Jacobian, form: Form) -> Tensor:
        head = self.curvature.head if jacobian.is_head and self.prior.is_constant_per_tensor else None
        if form != "diagonal" or head is None:
            return super().variance(jacobian, form)
        features, basis = widened(jacobian.head_features()), head[0]
        step = max(1, bytes_at_once(CHUNK_BYTES, basis.device) // (DOUBLE * basis.shape[1]))
        variances = torch.cat([self._of_head(rows, basis) for rows in features.split(step)])
        return variances.to(jacobian.summed_in(self.dtype))

    def _of_head(self, features: Tensor, basis: Tensor) -> Tensor:
        """φ D⁻¹ φᵀ − z N_c zᵀ of features φ `[B, D]` with z = φ D⁻¹ Q, for every output c, `[B, C]`."""
        within = (features * self._head_variances) @ basis
        known = torch.stack([((within @ one) * within).sum(1) for one in self._known], 1)
        return left_of((features.square() @ self._head_variances).unsqueeze(1).expand_as(known), known)

    @property
    def _head_variances(self) -> Tensor:
        """Prior variances of the weights of every feature, `[D]`: those of one output are none of another's."""
        blocks = zip(self.curvature.parts[0].blocks, self.scales, strict=True)
        return torch.cat([scale.expand(block.size // block.n_cotangents) for block, scale in blocks])

    @cached_property
    def _known(self) -> tuple[Tensor, ...]:
        """N_c = T S_c (I + G)⁻¹ S_cᵀ Tᵀ of every output of a head, `[n, n]`, by a root of it."""
        if self.curvature.head is None:
            return ()
        _, triangle, roots = self.curvature.head
        rows = self.duals[0].lift(roots.flatten(0, 1), self.weights).view_as(roots)
        within = (torch.einsum("nk,in->nki", one, triangle).flatten(0, 1) for one in rows.unbind(2))
        halves = (torch.linalg.solve_triangular(self.roots[0], one, upper=False) for one in within)
        return tuple(row_gram(half.T) for half in halves)

    @cached_property
    def _matrix(self) -> FullPrecision:
        self.curvature.require_memory(_MATRICES)
        return FullPrecision(FullCurvature.from_matrix(self.curvature.values), self.weights, self.prior)

    def to_dense(self) -> Tensor:
        return self._matrix.to_dense()

    @property
    def scale(self) -> Tensor:
        return self._matrix.scale

    @property
    def covariance(self) -> Tensor:
        return self._matrix.covariance
