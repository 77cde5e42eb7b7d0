"""What a structure is: a frozen curvature that adds up over data, and the precision it gives with a prior."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from laplace.core import checks
from laplace.core.batch import Inputs
from laplace.core.layout import Layout
from laplace.core.prior import GaussianPrior
from laplace.engines.engine import BatchSummary, CurvatureEngine
from laplace.engines.profile import BatchProfile
from laplace.errors import InvalidArgument, InvalidData, UnsupportedError
from laplace.jacobian.jacobian import Jacobian
from laplace.structures.cost import Cost
from laplace.structures.variances_over_priors import VariancesOverPriors


class Precision(ABC):
    """Posterior precision P = s·H + diag(δ) of one structure; immutable.

    Queries that need a factorisation compute it once, with the graph that leads to the hyper-parameters where these
    require a gradient: all of them are differentiable, once. What is kept then belongs to that graph.
    """

    @abstractmethod
    def logdet(self) -> Tensor:
        """Log det P, 0-dim, differentiable in scale and prior."""

    @abstractmethod
    def logdet_ratio(self) -> Tensor:
        """Log det P − log det P₀, 0-dim: with a scalar prior Σ log(1 + sλ/δ), which cancels nothing."""

    def slack(self) -> Tensor | float:
        """tr(P₀ P⁻¹) + tr(s·H P⁻¹) − dim θ, 0 for P = s·H + P₀: half of it a lower bound of the evidence lacks."""
        return 0.0

    @abstractmethod
    def quad(self, vectors: Tensor) -> Tensor:
        """vᵀ P v of vectors `[..., P]`, `[...]`."""

    def product(self, vectors: Tensor) -> Tensor:
        """P v of vectors `[..., P]`, same shape, without gradient: ∇ ½ vᵀ P v where a structure has no cheaper way."""
        with torch.enable_grad():
            leaf = vectors.detach().requires_grad_()
            return torch.autograd.grad(0.5 * self.quad(leaf).sum(), leaf)[0]

    def solve(self, vectors: Tensor) -> Tensor:
        """P⁻¹ v of vectors `[R, P]`, by the root that samples are drawn with; a constant."""
        with torch.enable_grad():
            noise = torch.zeros_like(vectors).requires_grad_()
            (coloured,) = torch.autograd.grad(self.sample(noise), noise, vectors)
        with torch.no_grad():
            return self.sample(coloured)

    @abstractmethod
    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        """J_b P⁻¹ J_bᵀ, `[B, C, C]`, in float64 if `jacobian.wide`."""

    @abstractmethod
    def functional_diagonal(self, jacobian: Jacobian) -> Tensor:
        """Its diagonals, `[B, C]`, at less cost; one that cancels is summed in float64 if `jacobian.wide`."""

    @abstractmethod
    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        """J P⁻¹ Jᵀ over all data, `[B·C, B·C]`, data major and outputs minor, in float64 if `jacobian.wide`."""

    @abstractmethod
    def sample(self, noise: Tensor) -> Tensor:
        """Zero-mean samples `[S, P]` from standard normal numbers `[S, P]`: linear in them, and differentiable."""

    @abstractmethod
    def diagonal_of_inverse(self) -> Tensor:
        """Marginal variances, `[P]`."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """P, `[P, P]`."""

    @property
    @abstractmethod
    def public(self) -> Any:
        """P as users see it in `la.posterior_precision`."""

    @property
    @abstractmethod
    def covariance(self) -> Tensor:
        """P⁻¹, `[P, P]`."""

    @property
    @abstractmethod
    def scale(self) -> Tensor:
        """A root L of P⁻¹ = L Lᵀ: lower-triangular `[P, P]`, symmetric, or standard deviations `[P]`."""


class DataPass(ABC):
    """One reading of the data, batch by batch."""

    @abstractmethod
    def add(self, x: Inputs, y: Tensor) -> BatchSummary:
        """Takes in one batch.

        Raises:
            InvalidData: Its curvature is not finite.
        """

    @abstractmethod
    def finish(self) -> Curvature | DataPass:
        """The curvature after the last reading, or the next reading."""

    def counted(self, read: BatchSummary) -> BatchSummary:
        """What counts besides the curvature, of the sums over all batches that were read, after the last reading."""
        return read


@dataclass(frozen=True)
class NoOptions:
    """Of structures that leave nothing to choose."""


class Curvature(ABC):
    """Unit curvature H of the data seen so far, in one structure; frozen.

    Attributes:
        name: What users call it.
        options: Class of its options, whose fields are the keys of `structure_kwargs`.
        readings: How many times the data are read, at least.
        exact_prior: Whether a prior that varies within a tensor is added as it is, and not in an eigenbasis.
        note: What `repr` of a posterior says of it, or None.
        share: Of the data seen, how many the likelihood of the evidence counts: less than 1 for a subset.
        prior_factor: What its precisions multiply the prior precision with.
        tail: Largest absolute eigenvalue that was seen and left out; 0 where nothing is.
        needs_columns: Whether it is of factors of outer products, which curvature known by its products alone lacks.
        weighed: Whether noise and temperature scale it in the precision, and not in the bound of the evidence alone.
        n_terms: E: curvature terms kept apart, one per output under a vector noise, else 1.
    """

    name: str
    options: type[Any] = NoOptions
    readings: int = 1
    exact_prior: bool = True
    note: str | None = None
    share: float = 1.0
    prior_factor: float = 1.0
    tail: float = 0.0
    needs_columns: bool = False
    weighed: bool = True
    n_terms: int

    @classmethod
    def options_from(cls, given: dict[str, Any]) -> Any:
        """Options of this structure from `structure_kwargs`, an object of `options`.

        Raises:
            InvalidArgument: It does not know one.
        """
        known = [field.name for field in fields(cls.options)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            accepted = ", ".join(known) or "none"
            raise InvalidArgument(
                f"structure_kwargs has {unknown}, which hessian_structure={cls.name!r} does not know; accepted: "
                f"{accepted}."
            )
        return cls.options(**given)

    @classmethod
    def check(cls, layout: Layout, options: Any) -> None:
        """Refuses a choice that cannot be held, before any data are read.

        Args:
            layout: The treated tensors.
            options: An object of `options`.

        Raises:
            InvalidArgument: The structure would be too large for its options.
        """
        del layout, options  # most structures have no limit

    @classmethod
    def footprint(cls, survey: BatchProfile, options: Any) -> Cost:
        """Memory and work of a fit and of predictions.

        Args:
            survey: What a batch showed.
            options: An object of `options`.
        """
        raise UnsupportedError(f"hessian_structure={cls.name!r} does not say what it takes; it cannot be planned for.")

    @classmethod
    @abstractmethod
    def sweep(cls, engine: CurvatureEngine, options: Any) -> DataPass:
        """The first reading of the data.

        Args:
            engine: Computes the numbers of a batch.
            options: An object of `options`.
        """

    @classmethod
    @abstractmethod
    def zeros(cls, prior: GaussianPrior) -> Curvature:
        """The curvature of no data: its precision is the prior."""

    @abstractmethod
    def __add__(self, other: Curvature) -> Curvature:
        """Curvature of both sets of data."""

    def scaled(self, factor: float) -> Curvature:
        """The curvature of data that count `factor` times each.

        Raises:
            UnsupportedError: The structure is no sum over data.
        """
        raise self._no_sum("weighted anew")

    def minus(self, removed: Curvature, *, signed: bool = False) -> Curvature:
        """The curvature of the data without some of them.

        Args:
            removed: The curvature of those.
            signed: Whether it may be indefinite, as an exact Hessian; else it is positive semi-definite again.

        Raises:
            CurvatureError: It would be indefinite: the removed data are not among those of this curvature.
            UnsupportedError: The structure is no sum over data.
        """
        raise self._no_sum("subtracted")

    def _no_sum(self, verb: str) -> UnsupportedError:
        return UnsupportedError(
            f"curvature of structure {self.name!r} is no sum over data and cannot be {verb}; use "
            "hessian_structure='diag', 'kron', 'block' or 'full', or fit the data that are to count with override=True."
        )

    @abstractmethod
    def precision(self, weights: Tensor, prior: GaussianPrior, **options: Any) -> Precision:
        """Posterior precision Σ_e w_e H_e + diag(δ).

        Args:
            weights: w, `[E]`: 1/(σ²T) of every term.
            prior: δ.
            **options: The structure's own (Kron: `damping`), and what is done about an `indefinite` curvature.
        """

    def decompose(self, **options: Any) -> None:
        """Factorises at once, if that is long, what precisions factorise once per fit on first use.

        Args:
            **options: As of `precision`.
        """
        del options  # most structures have nothing that takes minutes and is kept

    @abstractmethod
    def scan(self, weights: Tensor, layout: Layout, **options: Any) -> VariancesOverPriors:
        """Functional variances at many scalar priors, after one factorisation."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Everything that `from_state` needs: tensors, numbers and strings."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: dict[str, Any]) -> Curvature:
        """The curvature of a saved state."""

    @abstractmethod
    def forms(self) -> tuple[str, ...]:
        """In which form each tensor's block is held, in words; empty where there is only one."""

    @abstractmethod
    def public(self) -> Any:
        """H as users see it in `la.H`."""


class AdditiveCurvature(Curvature):
    """Curvature whose batches simply add up: one reading."""

    @classmethod
    @abstractmethod
    def from_batch(
        cls, engine: CurvatureEngine, x: Inputs, y: Tensor, former: Curvature | None = None
    ) -> tuple[BatchSummary, AdditiveCurvature]:
        """Curvature of one batch, by the engine's primitive of this structure, added to that of former batches.

        `former` belongs to the caller's running sum: its memory may be reused.
        """

    @abstractmethod
    def is_finite(self) -> Tensor | bool:
        """True, or 0-dim, if every number is finite (of a matrix: its diagonal, which holds every square)."""

    @classmethod
    def sweep(cls, engine: CurvatureEngine, options: Any) -> DataPass:
        return _SumSweep(cls, engine)


class _SumSweep(DataPass):
    """Adds up batches."""

    def __init__(self, structure: type[AdditiveCurvature], engine: CurvatureEngine) -> None:
        self.structure = structure
        self.engine = engine
        self.total: AdditiveCurvature | None = None

    def add(self, x: Inputs, y: Tensor) -> BatchSummary:
        summary, total = self.structure.from_batch(self.engine, x, y, self.total)
        require_finite(total.is_finite())
        self.total = total
        return summary

    def finish(self) -> Curvature:
        if self.total is None:
            raise InvalidData("no batch was read.")
        return self.total


def require_finite(finite: Tensor | bool) -> None:
    """Requires that a batch's numbers are finite.

    Raises:
        InvalidData: They are not.
    """
    checks.require(
        torch.as_tensor(finite),
        lambda: InvalidData(
            "the loss or the curvature is not finite; the inputs, targets or weights hold NaN or infinity."
        ),
    )


def move(state: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """A nested state with its tensors on another device and its floating point tensors in another dtype."""
    if isinstance(state, Tensor):
        return state.to(device=device, dtype=dtype if state.is_floating_point() else None)
    if isinstance(state, dict):
        return {key: move(value, device, dtype) for key, value in state.items()}
    if isinstance(state, list):
        return [move(value, device, dtype) for value in state]
    return state
