"""Gaussians over network outputs, draws that never fail on a singular covariance, and distributions of PyTorch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributions import (
    Categorical,
    Dirichlet,
    Distribution,
    Independent,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
)

from laplace.core.checks import is_true, require, together
from laplace.core.eigen import eigh, goes_one_by_one, root_by_products
from laplace.core.positions import unrolled
from laplace.core.precision_policy import wide_dtype, widened
from laplace.core.random_numbers import standard_normal_parts
from laplace.errors import CurvatureError, InvalidArgument, InvalidData

# Roots of covariances that rounding cannot turn, so that samples of equal seeds agree wherever they are drawn.
#
# A covariance of outputs is Σ = M Mᵀ with M = J P^(−½), often singular: more outputs than weights, one input twice. Its
# symmetric root |Mᵀ| moves by at most √2 times what M moves by (Araki and Yamagami, 1981), whatever the condition of Σ.
# A Cholesky factor moves by the condition of M times that, eigenvectors times roots of eigenvalues by anything where
# eigenvalues meet. Sums M Mᵀ are formed in float64: the root turns a relative error ε of Σ itself into √ε.


_SCALES = 1e-7
"""Share of the mean variance that is added to the squares of the units, so that an output of noise alone is small."""

_NOTHING = 4.0
"""Units of rounding, per row, up to which an eigenvalue counts as zero: its root would be noise of √ε."""

_FLAT = 1e-6
"""Eigenvalues of a root below which it has no derivative: twice the root of what float64 leaves of a zero."""


def scaled_root(covariance: Tensor) -> Tensor:
    """A root R with R Rᵀ = Σ of positive semi-definite `[..., n, n]`, in its dtype.

    R = D (D⁻¹ Σ D⁻¹)^½ with D² = diag Σ + 1e-7 · mean(diag Σ): each output is exact in units of its own standard
    deviation, unless that is far below the others. Always exists: negative eigenvalues count as zero. Any derivative
    exists; in directions without variance it is 0.
    """
    wide = widened(covariance)
    size = wide.detach().diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]  # in units of it nothing overflows
    size = size.where(size > 0, 1.0)
    wide = 0.5 * (wide / size) + 0.5 * (wide / size).mT
    variances = wide.diagonal(dim1=-2, dim2=-1).clamp(min=0)
    squares = variances + _SCALES * variances.mean(-1, keepdim=True)
    varies = squares > 0
    units = squares.where(varies, 1.0).sqrt()
    root = _symmetric_root(wide / units.unsqueeze(-1) / units.unsqueeze(-2))
    return (size.sqrt() * units.unsqueeze(-1) * root).to(covariance.dtype)


def _symmetric_root(matrix: Tensor) -> Tensor:
    """A^½ `[..., n, n]`, by products where the device would decompose one matrix after the other."""
    root = None
    if goes_one_by_one(matrix) and not (matrix.requires_grad and torch.is_grad_enabled()):
        root = root_by_products(matrix)
    return _SymmetricRoot.apply(matrix) if root is None else root  # pyright: ignore[reportReturnType]


class _SymmetricRoot(torch.autograd.Function):
    """A^½ of variances of at most 1; its derivative X solves R X + X R = dA, which equal eigenvalues leave finite."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        values, vectors = eigh(matrix)
        nothing = _NOTHING * torch.finfo(values.dtype).eps  # of variances that are 1, times their number
        roots = values.where(values / values.shape[-1] > nothing, 0.0).sqrt()
        root = (vectors * roots.unsqueeze(-2)) @ vectors.mT
        ctx.save_for_backward(root, roots, vectors)
        return root

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        root, roots, vectors = ctx.saved_tensors
        gradient = 0.5 * (gradients[0] + gradients[0].mT)
        return _Solution.apply(gradient, root, roots, vectors)  # pyright: ignore[reportReturnType]


class _Solution(torch.autograd.Function):
    """X with R X + X R = G, of symmetric matrices: X_ij = G_ij / (r_i + r_j) in the eigenbasis of R."""

    @staticmethod
    def forward(ctx: Any, right: Tensor, root: Tensor, roots: Tensor, vectors: Tensor) -> Tensor:
        sums = roots.unsqueeze(-1) + roots.unsqueeze(-2)
        # 1 / sums, but going to 0 where both eigenvalues do: there 1 / sums would be a quotient of roundings.
        inverse = sums / (sums.square() + _FLAT**2)
        solution = vectors @ (inverse * (vectors.mT @ right @ vectors)) @ vectors.mT
        ctx.save_for_backward(solution, root, roots, vectors)
        return solution

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        solution, root, roots, vectors = ctx.saved_tensors
        gradient = 0.5 * (gradients[0] + gradients[0].mT)
        right: Any = _Solution.apply(gradient, root, roots, vectors)
        return right, -(right @ solution + solution @ right), None, None


class GaussianDraws(ABC):
    """A Gaussian over the C outputs of B inputs that can be drawn from.

    Attributes:
        mean: `[B, C]`.
    """

    mean: Tensor

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draws, `[n, B, C]`: independent noise in every row, or jointly distributed rows for a joint covariance.

        Differentiable in mean and covariance (reparametrised).

        Args:
            n: Number of draws, at least 1.
            generator: Source of randomness, used on its own device; the global one if None.

        Raises:
            InvalidArgument: n is not positive.
            InvalidData: The mean is not finite.
            CurvatureError: The covariance is not finite.
        """
        parts = list(self._draws(n, generator))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def average(self, function: Callable[[Tensor], Tensor], n: int, generator: torch.Generator | None = None) -> Tensor:
        """Mean of a function over the draws of `sample`, which are held in parts: memory does not grow with n.

        Args:
            function: Maps draws `[m, B, C]` to values `[m, ...]`.
            n: Number of draws, at least 1.
            generator: As of `sample`.

        Raises:
            InvalidArgument, InvalidData, CurvatureError: As of `sample`.
        """
        sums = (function(part).sum(0) for part in self._draws(n, generator))
        return reduce(torch.add, sums) / n

    def _draws(self, n: int, generator: torch.Generator | None) -> Iterator[Tensor]:
        """Draws in consecutive parts, `[m, B, C]`."""
        if n < 1:
            raise InvalidArgument(f"n={n} samples were asked for; give an integer of at least 1.")
        with together():
            require(
                self.mean.isfinite(),
                lambda: InvalidData(
                    "The mean of the Gaussian has NaN or infinite entries: look at the network's outputs."
                ),
            )
            coloured = self._colouring()
        for noise in standard_normal_parts(n, tuple(self.mean.shape), self.mean, generator):
            yield self.mean + coloured(noise)

    @abstractmethod
    def _colouring(self) -> Callable[[Tensor], Tensor]:
        """A map of standard normal noise `[m, B, C]` to noise with this covariance."""


@dataclass(frozen=True, eq=False)
class GaussianOutputs(GaussianDraws):
    """N(mean, covariance) over the C outputs of B inputs.

    The shape of the covariance says its kind: `[B, C, C]` one block per row, rows independent; `[B, C]`
    variances, everything independent; `[B·C, B·C]` joint over all rows, row-major (the output runs
    fastest); `[B/n, n·C, n·C]` joint over groups of n rows, of which single rows are the case n = 1. Variances and
    a joint covariance have one shape only for B = C = 1, where they mean the same.

    Attributes:
        mean: `[B, C]`.
        covariance: `[B, C, C]`, `[B, C]`, `[B·C, B·C]` or `[B/n, n·C, n·C]`, in squared units of the outputs; of
            outputs in float32 it may be float64, in which it should have been summed where samples are to be drawn (see
            `scaled_root`).
        positions: Of outputs with positions, their dimensions: B is then the number of data × positions.
        outputs: Which of the network's outputs the C are, `[B, C]`; None for all of them.

    Raises:
        InvalidArgument: The shapes do not belong together.
    """

    mean: Tensor
    covariance: Tensor
    positions: tuple[int, ...] = ()
    outputs: Tensor | None = None

    def __post_init__(self) -> None:
        if self.mean.ndim != 2:
            raise InvalidArgument(f"mean has shape {list(self.mean.shape)}; [B, C] is accepted: reshape the outputs.")
        rows, outputs = self.mean.shape
        joint = rows * outputs
        accepted = [[rows, outputs, outputs], [rows, outputs], [joint, joint]]
        shape = list(self.covariance.shape)
        grouped = len(shape) == 3 and shape[1] == shape[2] and shape[0] * shape[1] == joint and shape[1] % outputs == 0
        if shape not in accepted and not grouped:
            raise InvalidArgument(
                f"covariance has shape {shape}; for a mean {[rows, outputs]} accepted are {accepted[0]} (per row), "
                f"{accepted[1]} (variances), {accepted[2]} (joint) and [{rows}/n, n·{outputs}, n·{outputs}] (groups)."
            )

    @property
    def is_diagonal(self) -> bool:
        """True if the covariance holds variances only, `[B, C]`."""
        return self.covariance.shape == self.mean.shape

    @property
    def is_joint(self) -> bool:
        """True if the covariance couples rows, `[B·C, B·C]`."""
        return self.covariance.ndim == 2 and not self.is_diagonal

    @property
    def is_grouped(self) -> bool:
        """True if the covariance couples the rows of groups, `[B/n, n·C, n·C]` with n > 1."""
        return self.covariance.ndim == 3 and len(self.covariance) < len(self.mean)

    @property
    def variance(self) -> Tensor:
        """Variances of all outputs, `[B, C]`, in the dtype of the covariance."""
        if self.is_diagonal:
            return self.covariance
        return self.covariance.diagonal(dim1=-2, dim2=-1).reshape(self.mean.shape)

    @property
    def shown(self) -> Tensor:
        """The covariance in the dtype of the mean, as users see it."""
        return self.covariance.to(self.mean.dtype)

    def plus_noise(self, sigma: Tensor) -> GaussianOutputs:
        """The Gaussian of noisy targets: σ², 0-dim or `[C]`, added to variances [Redux, appendix B, regression]."""
        noise = sigma.square().expand(self.mean.shape[1])
        if self.is_diagonal:
            return replace(self, covariance=self.covariance + noise)
        rows = self.covariance.shape[-1] // len(noise)  # that a block is of
        return replace(self, covariance=self.covariance + torch.diag(noise.repeat(rows)))

    def _colouring(self) -> Callable[[Tensor], Tensor]:
        if self.is_diagonal:
            _check_finite(self.covariance)
            deviations = _safe_sqrt(self.covariance).to(self.mean)
            return lambda noise: noise * deviations
        root = covariance_root(self.covariance).to(self.mean)
        if self.is_joint:
            return lambda noise: (noise.flatten(1) @ root.T).view_as(noise)

        def coloured(noise: Tensor) -> Tensor:
            blocks = noise.reshape(len(noise), *root.shape[:2])
            return (root @ blocks.permute(1, 2, 0)).permute(2, 0, 1).reshape(noise.shape)

        return coloured


@dataclass(frozen=True, eq=False)
class GaussianAlongAxes(GaussianDraws):
    """N(μ_b, U diag(v_b) Uᵀ) over the C outputs of B inputs: all covariances have the same axes.

    Samples are μ_b + U diag(v_b)^½ Uᵀ ε. They take no covariance `[C, C]` and no decomposition of one, and their root
    is the symmetric one, in which axes of equal variances may be turned into each other.

    Attributes:
        mean: `[B, C]`.
        variances: v, those along the axes, `[B, C]`, none of which is negative but by rounding.
        axes: U, orthonormal columns, `[C, C]`.
        positions: As of `GaussianOutputs`.
    """

    mean: Tensor
    variances: Tensor
    axes: Tensor
    positions: tuple[int, ...] = ()

    outputs = None  # all of them

    def with_covariance(self) -> GaussianOutputs:
        """The same with the covariances `[B, C, C]`."""
        return GaussianOutputs(self.mean, (self.axes * self.variances.unsqueeze(1)) @ self.axes.mT, self.positions)

    def _colouring(self) -> Callable[[Tensor], Tensor]:
        _check_finite(self.variances)
        deviations, axes = _safe_sqrt(self.variances).to(self.mean), self.axes.to(self.mean)
        return lambda noise: ((noise @ axes) * deviations) @ axes.mT


def centred(f: Tensor) -> Tensor:
    """Π f = f − mean f, over the outputs `[..., C]`; finite wherever f is."""
    largest = torch.finfo(f.dtype).max
    return (f - (f / f.shape[-1]).sum(-1, keepdim=True)).clamp(-largest, largest)


def against_others(centred_variance: Tensor) -> Tensor:
    """Variances of f_c less the mean of the other outputs, `[..., C]`, from those of f_c less the mean of all."""
    n_outputs = centred_variance.shape[-1]
    return centred_variance * (n_outputs / max(1, n_outputs - 1)) ** 2


def centred_variance(covariance: Tensor) -> Tensor:
    """Variances of f − mean f, diag(Π Σ Π) with Π = I − 11ᵀ/C, `[..., C]`, of covariances `[..., C, C]`.

    What is shared cancels, in float64.
    """
    shared = covariance.sum(-1, dtype=wide_dtype(covariance.device)) / covariance.shape[-1]
    variance = widened(covariance.diagonal(dim1=-2, dim2=-1)) - 2 * shared + shared.mean(-1, keepdim=True)
    return variance.clamp(min=0).to(covariance.dtype)


def centred_variance_of_independent(variance: Tensor) -> Tensor:
    """The same of independent outputs with variances `[..., C]`: (1 − 2/C) v + mean v / C."""
    n_outputs = variance.shape[-1]
    return (1 - 2 / n_outputs) * variance + variance.mean(-1, keepdim=True) / n_outputs


def sample_moments(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance `[B, …]` of samples `[S, B, …]`."""
    if len(samples) < 2:
        raise InvalidArgument("n_samples=1: the variance of a sampled prediction needs at least 2 samples.")
    return samples.mean(0), samples.var(0)


def covariance_root(covariance: Tensor) -> Tensor:
    """A factor R with R Rᵀ = Σ that always exists, `[..., C, C]`: one rule, `scaled_root`, with all its derivatives.

    Where outputs are independent by structure, as under a diagonal posterior of a last layer, no covariance is other
    than zero: the same root is then known without a decomposition.
    """
    _check_finite(covariance)
    variances = covariance.diagonal(dim1=-2, dim2=-1)
    if not covariance.requires_grad and is_true(covariance.count_nonzero() == variances.count_nonzero()):
        return torch.diag_embed(_safe_sqrt(variances))
    return scaled_root(covariance)


def _safe_sqrt(variance: Tensor) -> Tensor:
    """√max(v, 0) with a zero, not infinite, gradient where v ≤ 0."""
    positive = variance > 0
    return torch.where(positive, torch.where(positive, variance, 1.0).sqrt(), 0.0)


def _check_finite(covariance: Tensor) -> None:
    require(
        covariance.isfinite(),
        lambda: CurvatureError(
            "The covariance has NaN or infinite entries, so nothing can be drawn from it: look at the prior "
            "precision, the noise and the curvature it was computed from."
        ),
    )


# As distributions of PyTorch, and mixtures of them.


def normal_of(gaussian: GaussianOutputs) -> Normal | MultivariateNormal:
    """A Gaussian over rows as a distribution of PyTorch."""
    positions = gaussian.positions
    if gaussian.is_diagonal:
        scale = gaussian.covariance.clamp(min=torch.finfo(gaussian.mean.dtype).tiny).sqrt()
        return Normal(unrolled(gaussian.mean, positions), unrolled(scale, positions))
    root = _density_root(gaussian.covariance, torch.finfo(gaussian.mean.dtype).eps)
    if root is None:
        raise CurvatureError(
            "the covariance of the outputs is singular, so that they have no density; ask for diagonal_output=True, or "
            "draw samples (latent_samples), which always exist."
        )
    root = root.to(gaussian.mean)
    if gaussian.is_joint or gaussian.is_grouped:
        return MultivariateNormal(gaussian.mean.reshape(root.shape[:-1]), scale_tril=root)
    return MultivariateNormal(unrolled(gaussian.mean, positions), scale_tril=unrolled(root, positions))


def _density_root(covariance: Tensor, eps: float) -> Tensor | None:
    """Cholesky factor of `[..., n, n]`, or None where an output is known from the others but for a share of eps.

    Such a share would be the rounding of the outputs' Jacobians, and a density all of its own making.
    """
    root, info = torch.linalg.cholesky_ex(widened(covariance))
    left, all_of_it = root.diagonal(dim1=-2, dim2=-1).square(), covariance.diagonal(dim1=-2, dim2=-1)
    return None if bool((info != 0).any()) or bool((left <= eps * all_of_it).any()) else root


def mixture_of(components: Sequence[Distribution], weights: Tensor) -> Distribution:
    """Σ_k π_k p_k of Gaussians or Dirichlets of one kind and batch shape, each batch entry a mixture of its own.

    One component is returned as it is.

    Args:
        components: K of `Normal`, `MultivariateNormal`, `Dirichlet`, or `Independent` of the first.
        weights: π, `[K]`.
    """
    if len(components) == 1:
        return components[0]
    batch = components[0].batch_shape
    stacked = _stacked(components, len(batch))
    logits = weights.log().expand(*batch, len(components))
    return MixtureSameFamily(Categorical(logits=logits), stacked)


def _stacked(components: Sequence[Distribution], at: int) -> Distribution:
    """One distribution with the components along a new last batch dimension, `at`."""
    first = components[0]
    if isinstance(first, Independent):
        inner = [part.base_dist for part in components if isinstance(part, Independent)]
        return Independent(_stacked(inner, at), first.reinterpreted_batch_ndims)

    def along(name: str) -> Tensor:
        like = getattr(first, name)
        return torch.stack([getattr(part, name).to(like) for part in components], at)

    if isinstance(first, Normal):
        return Normal(along("loc"), along("scale"))
    if isinstance(first, MultivariateNormal):
        return MultivariateNormal(along("loc"), scale_tril=along("scale_tril"))
    if isinstance(first, Dirichlet):
        return Dirichlet(along("concentration"))
    raise InvalidArgument(f"components are {type(first).__name__}; give Gaussians or Dirichlets.")
