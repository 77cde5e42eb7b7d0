"""The posterior precision of a structure: what evidence, predictions and samples ask of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from laplace.core.checks import is_true
from laplace.core.gram import row_gram
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.layout import Layout
from laplace.core.pieces import bytes_at_once
from laplace.core.precision_policy import EIGENBASIS_ERROR, root_dtype, widened
from laplace.core.random_numbers import standard_normal
from laplace.errors import ApproximationWarning, CurvatureError, UnsupportedError, warn
from laplace.jacobian.blocks import Block
from laplace.jacobian.jacobian import Jacobian

Form = Literal["diagonal", "full", "joint"]
"""Covariances between outputs: none `[B, C]`, those of a datum `[B, C, C]`, or of all data `[B·C, B·C]`, data major."""


class Precision(ABC):
    """Posterior precision P = s·H + diag(δ) of one structure; immutable.

    A structure defines `power`, `logdet_ratio` and `variance`. All other queries follow, and are overridden where a
    structure has a cheaper or more exact answer. What takes a factorisation computes it once, with the graph that leads
    to the hyper-parameters where these require a gradient: every query is differentiable once, except those that are
    said to be constants. What is kept then belongs to that graph.

    Attributes:
        prior: N(μ₀, diag(δ)⁻¹).
    """

    prior: GaussianPrior

    @abstractmethod
    def power(self, vectors: Tensor, exponent: float) -> Tensor:
        """P^exponent v of vectors `[..., P]`.

        Args:
            vectors: v.
            exponent: 1 for P v, −1 for P⁻¹ v, −½ for L v with a root L Lᵀ = P⁻¹ of the structure's choice.
        """

    @abstractmethod
    def logdet_ratio(self) -> Tensor:
        """Log det P − log det P₀, 0-dim: with a scalar prior Σ log(1 + sλ/δ), which cancels nothing."""

    @abstractmethod
    def variance(self, jacobian: Jacobian, form: Form) -> Tensor:
        """J P⁻¹ Jᵀ in one of the forms; covariances are summed in float64 if `jacobian.wide`."""

    def centred_variance(self, jacobian: Jacobian) -> Tensor:
        """Variances of the outputs less their mean, diag(Π J P⁻¹ Jᵀ Π), `[B, C]`, Π = I − 11ᵀ/C: as cheap as theirs."""
        return self.variance(jacobian.centred(), "diagonal")

    @property
    def axes(self) -> Tensor | None:
        """U `[C, C]`, orthonormal, if J P⁻¹ Jᵀ = U diag(v) Uᵀ at every datum of a head; None if that is unknown."""
        return None

    def variance_along_axes(self, jacobian: Jacobian) -> Tensor:
        """Variances v along `axes`, `[B, C]`, of a precision that has some, for the Jacobian of a head."""
        raise UnsupportedError(f"a {type(self).__name__} does not know axes of its covariances; ask for `variance`.")

    # Evidence and density.

    def logdet(self) -> Tensor:
        """Log det P, 0-dim, differentiable in scale and prior."""
        return self.logdet_ratio() + self.prior.logdet()

    def slack(self) -> Tensor | float:
        """tr(P₀ P⁻¹) + tr(s·H P⁻¹) − dim θ: 0 for P = s·H + P₀; of other P a bound of the evidence lacks half of it."""
        return 0.0

    def quad(self, vectors: Tensor) -> Tensor:
        """vᵀ P v of vectors `[..., P]`, `[...]`."""
        wide = widened(vectors)
        return (self.power(wide, 1) * wide).sum(-1).to(vectors.dtype)

    # Products, and samples.

    def product(self, vectors: Tensor) -> Tensor:
        """P v of vectors `[..., P]`; a constant."""
        with torch.no_grad():
            return self.power(vectors, 1)

    def solve(self, vectors: Tensor) -> Tensor:
        """P⁻¹ v of vectors `[R, P]`; a constant."""
        with torch.no_grad():
            return self.power(vectors, -1)

    def sample(self, noise: Tensor) -> Tensor:
        """Zero-mean samples `[S, P]` from standard normal numbers `[S, P]`: linear in them, and differentiable."""
        return self.power(noise, -0.5)

    def n_noise(self, n_params: int) -> int:
        """Standard normal numbers that a sample of so many weights takes: as many, unless a structure needs more."""
        return n_params

    # Moments.

    def to_dense(self) -> Tensor:
        """P, `[P, P]`."""
        return self.power(self._identity, 1)

    @property
    def public(self) -> Any:
        """P as users see it in `la.posterior_precision`."""
        return self.to_dense()

    @property
    def scale(self) -> Tensor:
        """A root L of P⁻¹ = L Lᵀ: lower-triangular `[P, P]`, symmetric, or standard deviations `[P]`."""
        return self.power(self._identity, -0.5).T

    @property
    def covariance(self) -> Tensor:
        """P⁻¹, `[P, P]` [Redux, eq. 5]; rounding makes no variance negative."""
        inverse = self.power(self._identity, -1)
        if is_true((inverse.diagonal() < 0).any()):
            return inverse.diagonal_scatter(self.diagonal_of_inverse())
        return inverse

    def diagonal_of_inverse(self) -> Tensor:
        """Marginal variances, `[P]`."""
        return self.scale.square().sum(1)

    @property
    def _identity(self) -> Tensor:
        like = self.prior.precision
        return torch.eye(self.prior.layout.n_params, dtype=like.dtype, device=like.device)


def mean_weight(weights: Tensor) -> Tensor:
    """Mean weight of all terms `[E]`, 0-dim."""
    return weights.mean() if weights.numel() > 1 else weights.view(())


def require_positive(values: Tensor, what: str = "eigenvalue") -> Tensor:
    """The eigenvalues of P, `[n]`, if P is positive definite."""
    negative = int((values <= 0).sum())
    if negative:
        raise CurvatureError(
            f"the posterior precision s·H + δ has {negative} directions that are not positive (smallest {what} "
            f"{values.min().item():.3g}) at this prior: the exact Hessian is indefinite here. Give a larger "
            "prior_precision, train the network to a minimum, pass structure_kwargs={'indefinite': 'clamp'} or "
            "{'indefinite': 'abs'}, or use backend=NativeGGN."
        )
    return values


def warn_if_rounded(largest: float, dtype: torch.dtype) -> None:
    """Warns where the rounding of curvature that was summed in a narrow dtype exceeds the prior precision.

    Args:
        largest: λmax(P) / δ.
        dtype: Of the sums.
    """
    if not largest * torch.finfo(dtype).eps > 1:
        return
    warn(
        f"the curvature was summed in {str(dtype).removeprefix('torch.')}, and its largest eigenvalue is {largest:.1g} "
        "times the prior precision: variances in directions that the data leave open are rounding. Standardise the "
        "columns of the inputs, or call model.double() before the fit, with inputs of that dtype.",
        ApproximationWarning,
    )


def weighted(block: Block, variances: Tensor, form: Form, *, wide: bool) -> Tensor:
    """J diag(v) Jᵀ of a block for v `[p]`; covariances are summed in float64 if `wide`."""
    if form == "diagonal":
        return block.weighted_norms(variances)
    variances = widened(variances) if wide else variances
    return block.weighted_gram(variances) if form == "full" else row_gram(block.by_output(), variances)


# Many scalar priors at once, for a search: what does not depend on the prior is computed once.


class VariancesOverPriors(ABC):
    """Functional variances of P(δ) for many scalar δ."""

    @abstractmethod
    def variances(self, jacobian: Jacobian, *, diagonal: bool) -> Callable[[Tensor], Tensor]:
        """J P(δ)⁻¹ Jᵀ per datum as a function of n priors δ `[n]`, `[n, B, C, C]` or `[n, B, C]`, without gradient.

        Pieces of the Jacobian that are computed when they are asked for are so once for all n.
        """

    def centred_variances(self, jacobian: Jacobian) -> Callable[[Tensor], Tensor]:
        """The same of the outputs less their mean, `[n, B, C]`, as of `Precision.centred_variance`."""
        return self.variances(jacobian.centred(), diagonal=True)


def one_by_one(at: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of n priors `[n]` from one of a single prior `[1]`."""
    return lambda deltas: torch.stack([at(delta) for delta in deltas.split(1)])


@dataclass(frozen=True)
class SpectralScan(VariancesOverPriors):
    """Functional variances of P(δ) = U (s λ + δ) Uᵀ: the Jacobian is rotated into the eigenbasis once."""

    project: Callable[[Jacobian, torch.dtype], Jacobian]  # The Jacobian in the eigenbasis, which has this dtype
    # Eigenvalues of P per block at a scalar δ `[1]`, without gradient
    precisions: Callable[[Tensor], tuple[Tensor, ...]]
    largest: Tensor | None = None  # The largest s λ, 0-dim; None without a rotation

    def variances(self, jacobian: Jacobian, *, diagonal: bool) -> Callable[[Tensor], Tensor]:
        project = cache(partial(self._projected, jacobian))

        def at(precisions: Tensor) -> Tensor:
            dtype = self._dtype(precisions)
            values = [self.precisions(precision) for precision in precisions.split(1)]
            inverses = [1 / torch.stack(block).to(dtype) for block in zip(*values, strict=True)]
            if jacobian.wide and not diagonal:
                inverses = [widened(inverse) for inverse in inverses]
            projected = project(dtype, dtype != precisions.dtype)
            if diagonal:
                total = projected.sum_over_blocks(lambda i, block: block.weighted_norms_each(inverses[i]))
            else:
                total = projected.sum_over_blocks(lambda i, block: block.weighted_gram_each(inverses[i]))
            return total.to(precisions.dtype if diagonal else jacobian.summed_in(precisions.dtype))

        return at

    def _projected(self, jacobian: Jacobian, dtype: torch.dtype, widens: bool) -> Jacobian:
        return self.project(jacobian.cast(dtype) if widens else jacobian, dtype)

    def _dtype(self, precisions: Tensor) -> torch.dtype:
        """The type in which the smallest of some priors lets outputs be rotated."""
        if self.largest is None:
            return precisions.dtype
        smallest, largest = float(precisions.min()), float(self.largest)
        return root_dtype(precisions.dtype, largest + smallest, smallest, self.largest.device, EIGENBASIS_ERROR)


@dataclass(frozen=True)
class OneByOne(VariancesOverPriors):
    """Functional variances at many scalar priors, each by a precision of its own."""

    precision: Callable[[GaussianPrior], Precision]  # P at a prior
    layout: Layout  # The parameters

    def variances(self, jacobian: Jacobian, *, diagonal: bool) -> Callable[[Tensor], Tensor]:
        return one_by_one(lambda delta: self._at(delta).variance(jacobian, "diagonal" if diagonal else "full"))

    def centred_variances(self, jacobian: Jacobian) -> Callable[[Tensor], Tensor]:
        return one_by_one(lambda delta: self._at(delta).centred_variance(jacobian))

    def _at(self, delta: Tensor) -> Precision:
        return self.precision(GaussianPrior(delta.detach(), delta.new_zeros(()), self.layout))


# Weights drawn from a posterior, some samples at a time: what is computed on the way stays in a processor's caches.


_CHUNK_BYTES = 2**23
_LEAST_AT_ONCE = 16
"""Samples of which a matrix product is still one, not that of a matrix and a vector."""


def drawn(mean: Tensor, precision: Precision, n_samples: int, generator: torch.Generator | None) -> Tensor:
    """Samples μ + P^(−1/2) ε, `[S, P]`, for μ `[P]`.

    All random numbers are drawn before, so that samples do not depend on how many are computed at a time.
    """
    noise = standard_normal((n_samples, precision.n_noise(len(mean))), mean, generator)
    row = max(1, noise.shape[1] * noise.element_size())
    parts = noise.split(max(_LEAST_AT_ONCE, bytes_at_once(_CHUNK_BYTES, noise.device) // row))
    first = mean + precision.sample(parts[0])
    if len(parts) == 1:
        return first
    if first.requires_grad or noise.shape[1] != len(mean):
        return torch.cat([first, *(mean + precision.sample(part) for part in parts[1:])])
    parts[0].copy_(first)
    for part in parts[1:]:
        part.copy_(mean + precision.sample(part))
    return noise
