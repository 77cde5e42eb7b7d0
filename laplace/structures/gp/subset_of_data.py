"""Curvature of a subset of the data, kept as factored Jacobians (Immer et al., 2021, appendix A.2)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from laplace.core.argument_checks import check_counts
from laplace.core.batch import Inputs
from laplace.core.checks import named
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.layout import Layout
from laplace.core.precision_policy import wide_dtype
from laplace.engines.engine import BatchSummary, CurvatureEngine
from laplace.errors import CurvatureError, InvalidArgument, UnsupportedError
from laplace.jacobian.jacobian import Jacobian
from laplace.structures.base import Curvature, DataPass, require_finite
from laplace.structures.gp.dual import Dual
from laplace.structures.gp.observed import HOLDS_INPUTS, ObservingPass, uncounted
from laplace.structures.gp.subset import SELECTIONS, Pool, Rows, make_score
from laplace.structures.gp.subset_precision import DualPrecision, DualScan, IndependentPrecision, SubsetPrecision
from laplace.structures.precision import Precision


@dataclass(frozen=True)
class SubsetOptions:
    """Options of the choice and the use of a subset.

    Attributes:
        n_subset: M.
        seed: Of random subsets.
        selection: `"random"`, `"top"` or `"leverage"`, see `laplace.structures.gp.subset.make_score`.
        independent_outputs: A Gaussian process per output, with the diagonal of Λ.
        prior_factor: What the prior precision is multiplied with; None for N/M (appendix A.2.2).

    Raises:
        InvalidArgument: A value that is not accepted.
    """

    n_subset: int
    seed: int = 0
    selection: str = "random"
    independent_outputs: bool = False
    prior_factor: float | None = None

    def __post_init__(self) -> None:
        check_counts(n_subset=self.n_subset)
        if self.selection not in SELECTIONS:
            raise InvalidArgument(f"selection={self.selection!r}; accepted are {list(SELECTIONS)}.")
        if self.prior_factor is not None and not 0 < self.prior_factor < math.inf:
            raise InvalidArgument(f"prior_factor={self.prior_factor}; it must be positive and finite, or None for N/M.")

    def at_most(self, n_data: int) -> SubsetOptions:
        """The same for so many data: a subset of more is all of them."""
        return replace(self, n_subset=min(self.n_subset, n_data))


@dataclass(frozen=True)
class SubsetCurvature(Curvature):
    """The unit curvature Σ_m J_mᵀ Λ_m J_m of M out of N data, never multiplied out.

    Attributes:
        dual: Jacobians and roots of Λ.
        n_seen: N.
        independent: Whether every output is by itself.
        factor: What the prior precision is multiplied with, or None for N/M.
        terms: 1, or C with one noise per output.
    """

    dual: Dual
    n_seen: float
    independent: bool
    factor: float | None
    terms: int
    name = "gp"
    exact_ggn = True
    weighs_data = False
    is_variational = True
    refined_by_kernels = True
    holds_inputs = True
    options = SubsetOptions

    @property
    def n_terms(self) -> int:
        return self.terms

    @property
    def n_subset(self) -> int:
        """M."""
        return len(self.dual.roots)

    @property
    def share(self) -> float:
        """M/N: the evidence is that of the subset."""
        return self.n_subset / self.n_seen

    @property
    def prior_factor(self) -> float:
        return self.n_seen / self.n_subset if self.factor is None else self.factor

    @property
    def note(self) -> str:
        outputs = "every output by itself" if self.independent else "all outputs together"
        return (
            f"subset of {self.n_subset} of {self.n_seen:g} data, {outputs}, "
            f"prior precision times {self.prior_factor:.4g}; {HOLDS_INPUTS}"
        )

    def with_roots(self, roots: Tensor) -> SubsetCurvature:
        """The curvature of the same data at other outputs, by roots of their Λ, `[M, C, K]`."""
        return replace(self, dual=Dual(self.dual.parts, roots.to(self.dual.roots)))

    def cast(self, dtype: torch.dtype) -> SubsetCurvature:
        """The same with Jacobians in another dtype."""
        return replace(self, dual=Dual(tuple(part.cast(dtype) for part in self.dual.parts), self.dual.roots))

    @cached_property
    def duals(self) -> tuple[Dual, ...]:
        """Dual forms of all outputs together, or of every output."""
        if not self.independent:
            return (self.dual,)
        return tuple(self.dual.output(c) for c in range(self.dual.roots.shape[1]))

    @classmethod
    def first_pass(cls, engine: CurvatureEngine, options: Any) -> DataPass:
        return SubsetPass(engine, options)

    @classmethod
    def before_data(cls, prior: GaussianPrior) -> Precision:
        raise UnsupportedError("a Gaussian process has no density over weights before fit; call fit(train_loader).")

    def __add__(self, other: Curvature) -> SubsetCurvature:
        if not isinstance(other, SubsetCurvature):
            return NotImplemented
        both = self.dual.roots, other.dual.roots
        if both[0].shape[1] != both[1].shape[1] or self.independent != other.independent:
            raise CurvatureError("the subsets have other outputs, or are used otherwise; fit with override=True.")
        width = max(roots.shape[2] for roots in both)  # older states hold as many columns as outputs
        roots = torch.cat([functional.pad(roots, (0, width - roots.shape[2])) for roots in both])
        dual = Dual((*self.dual.parts, *other.dual.parts), roots)
        return SubsetCurvature(dual, self.n_seen + other.n_seen, self.independent, self.factor, self.terms)

    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> DualPrecision:
        """The posterior under the prior precision times `prior_factor`.

        Raises:
            UnsupportedError: A prior that varies within a tensor.
        """
        if not prior.is_constant_per_tensor:
            raise UnsupportedError(
                "hessian_structure='gp' takes one prior precision, or one per parameter tensor: a kernel of factors "
                "knows no single weights. Use hessian_structure='full', 'diag' or 'block' for one per parameter."
            )
        scaled = GaussianPrior(self.prior_factor * prior.precision, prior.mean, prior.layout)
        kind = IndependentPrecision if self.independent else SubsetPrecision
        return kind(self.duals, weights, scaled, self.dual.roots.dtype)

    def scan(self, weights: Tensor, layout: Layout, **options: Any) -> DualScan:
        dtype, together = self.dual.roots.dtype, not self.independent
        if weights.numel() == 1:
            return DualScan(tuple(dual.unit for dual in self.duals), weights[0], self.prior_factor, dtype, together)
        one = torch.ones((), dtype=wide_dtype(weights.device), device=weights.device)
        parts = weights.split(1) if self.independent else (weights,)
        bases = tuple(dual.basis(part, None) for dual, part in zip(self.duals, parts, strict=True))
        return DualScan(bases, one, self.prior_factor, dtype, together)

    def state(self) -> dict[str, Any]:
        return {
            "parts": [part.state() for part in self.dual.parts],
            "roots": self.dual.roots,
            "n_seen": self.n_seen,
            "independent": self.independent,
            "factor": self.factor,
            "n_terms": self.terms,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> SubsetCurvature:
        dual = Dual(tuple(Jacobian.from_state(part) for part in state["parts"]), state["roots"])
        return cls(dual, state["n_seen"], state["independent"], state["factor"], state["n_terms"])

    def public(self) -> Tensor:
        """The kernel J Jᵀ of the subset, `[M·C, M·C]`."""
        size = self.n_subset * self.dual.roots.shape[1]
        return self.dual.kernel.reshape(size, size).to(self.dual.roots.dtype)


@dataclass(frozen=True, eq=False)
class Subset:
    """The data that a reading has picked.

    Attributes:
        curvature: Their curvature.
        f: Outputs of the network, `[M, C]`.
        y: Checked targets.
    """

    curvature: SubsetCurvature
    f: Tensor
    y: Tensor


class SubsetPass(ObservingPass):
    """One reading: the inputs of the subset are picked as the data pass by, and differentiated at the end.

    Args:
        engine: Computes Jacobians.
        options: How the subset is chosen.

    Attributes:
        found: The data, with what the network says of them; None before the end.
    """

    def __init__(self, engine: CurvatureEngine, options: SubsetOptions) -> None:
        super().__init__(engine)
        self.options = options
        self.found: Subset | None = None
        # The numbers that decide do not depend on the device.
        generator = torch.Generator().manual_seed(options.seed)
        self.pool = Pool(options.n_subset, make_score(options.selection, engine, generator))

    def add(self, x: Inputs, y: Tensor) -> BatchSummary:
        self.pool.add(x, y)
        return uncounted(y)

    def finish(self) -> SubsetCurvature:
        rows = [row for chunk in self.pool.chunks() for row in self._differentiated(chunk)]
        parts, roots, f, y = zip(*rows, strict=True)
        root = torch.cat(roots)
        terms = root.shape[1] if self.engine.split_outputs else 1
        curvature = SubsetCurvature(
            Dual(parts, root), self.pool.seen, self.options.independent_outputs, self.options.prior_factor, terms
        )
        self.found = Subset(curvature, torch.cat(f), torch.cat(y))
        return curvature

    def _differentiated(self, rows: Rows) -> Iterator[tuple[Jacobian, Tensor, Tensor, Tensor]]:
        """Jacobians, roots of Λ, outputs and targets of consecutive data.

        The loss is that of the subset, the number that of all data.

        Raises:
            InvalidData: A target or an output cannot be used.
        """
        with named(f"the subset, of batches {sorted(set(rows.batches))}"):
            for jacobian, f, targets in self.observed(rows.x, rows.y):
                root = self.engine.likelihood.hessian(f, targets).root().permute(1, 2, 0)
                require_finite(root.isfinite())
                yield jacobian.detached(), root.contiguous(), f, targets
