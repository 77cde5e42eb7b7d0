"""The linearised network as a convex model of its weights, with expectations under a Gaussian over the outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from laplace.core.gaussian import covariance_root
from laplace.core.precision_policy import wide_dtype, widened
from laplace.core.random_numbers import standard_normal
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.output_hessian import OutputHessian

if TYPE_CHECKING:
    from laplace.refinement.process import KernelData
    from laplace.refinement.weight_space import LinearData

_HERMITE = 32
_WIDE = 2.0
"""Standard deviation of an output up to which `_HERMITE` points, half of one from each other, are exact enough."""
_REACH = 8.0
_MOST = 513


@dataclass(frozen=True, eq=False)
class Smoothing:
    """Points of a standard normal with weights: the same for all data, so that results depend on no order.

    Where the likelihood acts on every output alone one dimension is enough: Gauss–Hermite points, or, for outputs with
    a large standard deviation, those of the trapezoidal rule at steps of one unit of f. With a sigmoid's poles at ±iπ
    its error is about exp(−2π²) (Trefethen and Weideman, 2014). Else pairs ε, −ε of random numbers, scaled to second
    moments of 1.

    Attributes:
        points: `[S, 1]` (shared by the outputs) or `[S, C]`.
        weights: `[S]`, sum 1.
        independent: Whether the likelihood acts on every output alone: roots are standard deviations then.
    """

    points: Tensor
    weights: Tensor
    independent: bool

    @classmethod
    def of(
        cls,
        likelihood: Likelihood,
        n_outputs: int,
        n_samples: int,
        generator: torch.Generator | None,
        like: Tensor,
        widest: float = 1.0,
    ) -> Smoothing:
        """Points for a likelihood.

        Args:
            likelihood: p(y | f).
            n_outputs: C.
            n_samples: Random points, where they are random.
            generator: Their source; None for seed 0.
            like: A tensor of the device.
            widest: The largest standard deviation of an output that is to be expected.
        """
        if likelihood.independent_outputs:
            return cls(*_quadrature(widest, like.device), independent=True)
        source = generator or torch.Generator(device=like.device).manual_seed(0)
        half = standard_normal((-(-n_samples // 2), n_outputs), widened(like), source)
        if len(half) > n_outputs:  # unit second moments: expectations of quadratic functions are exact
            root = torch.linalg.cholesky(half.mT @ half / len(half))
            half = torch.linalg.solve_triangular(root, half.mT, upper=False).mT
        points = torch.cat([half, -half])
        return cls(points, points.new_full((len(points),), 1 / len(points)), independent=False)

    def root(self, covariance: Tensor) -> Tensor:
        """Factor that colours the points: standard deviations `[B, C]` of variances, or roots `[B, C, C]`."""
        return widened(covariance).clamp(min=0).sqrt() if self.independent else covariance_root(widened(covariance))

    def around(self, f: Tensor, root: Tensor | None) -> list[tuple[float, Tensor]]:
        """Weighted outputs `[B, C]` around f; f alone without a root."""
        if root is None:
            return [(1.0, f)]
        moved = self.points.unsqueeze(1) * root if self.independent else torch.einsum("bcd,sd->sbc", root, self.points)
        return list(zip(self.weights.tolist(), f + moved, strict=True))

    def losses(self, likelihood: Likelihood, f: Tensor, root: Tensor | None, y: Tensor) -> Tensor:
        """`Likelihood.loss_terms` at every point, `[S, 1]` or `[S, C]`."""
        return torch.stack([likelihood.loss_terms(h, y) for _, h in self.around(f, root)])

    def mean(self, values: Tensor) -> Tensor:
        """The expectation of values `[S, …]` at every point; of one point, that value."""
        return values[0] if len(values) == 1 else torch.tensordot(self.weights.to(values), values, 1)

    def standard_error(self, values: Tensor) -> float:
        """Standard error of the expectation of values `[S]`; 0 where points are no random ones.

        Pairs ε, −ε have one mean. Where the second moments of the points are those of a normal, the expectation of what
        is quadratic in ε has no error: what is left beside it counts. Too few points for that overstate the error.
        """
        if self.independent or len(values) == 1:
            return 0.0
        half = len(values) // 2
        pairs, points = 0.5 * (values[:half] + values[half:]), self.points[:half]
        row, column = torch.triu_indices(points.shape[1], points.shape[1], device=points.device)
        one = torch.ones_like(points[:, :1])
        for products in (points[:, row] * points[:, column], points.square(), points[:, :0]):
            known = torch.cat([one, products], 1)
            if half > 2 * known.shape[1]:
                break
        if half <= known.shape[1]:
            return math.inf
        basis = torch.linalg.qr(known).Q
        rest = pairs - basis @ (basis.T @ pairs)
        # What is left at far points, where products are large, was fitted most and would be largest (White, 1980; HC2).
        freedom = (1 - basis.square().sum(1)).clamp(min=torch.finfo(rest.dtype).eps)
        return float((rest.square() / freedom).sum().sqrt() / half)

    def gradient(self, likelihood: Likelihood, f: Tensor, root: Tensor | None, y: Tensor) -> Tensor:
        """E of `Likelihood.gradient`, `[B, C]`."""
        return torch.stack([w * likelihood.gradient(h, y) for w, h in self.around(f, root)]).sum(0)

    def hessian(self, likelihood: Likelihood, f: Tensor, root: Tensor | None, y: Tensor) -> OutputHessian:
        """E of `Likelihood.hessian`."""
        if root is None:
            return likelihood.hessian(f, y)
        if self.independent:
            parts = [w * likelihood.hessian(h, y).diagonal() for w, h in self.around(f, root)]
            return OutputHessian(torch.stack(parts).sum(0))
        dense = torch.zeros_like(root)
        for weight, h in self.around(f, root):
            # As squares: diag(p) − p pᵀ of a p close to 1 is rounding, and not even positive semi-definite.
            columns = likelihood.hessian(h, y).root()
            dense = dense + weight * torch.einsum("kbc,kbd->bcd", columns, columns)
        return OutputHessian(diag=dense.diagonal(dim1=1, dim2=2), dense=dense)


def _quadrature(widest: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Points `[S, 1]` and weights `[S]` of a standard normal; above `widest` = 32 steps exceed one unit of f."""
    if widest <= _WIDE:
        nodes, masses = np.polynomial.hermite_e.hermegauss(_HERMITE)
        masses = masses / math.sqrt(2 * math.pi)
    else:
        count = min(_MOST, math.ceil(2 * _REACH * max(widest, 2 * _WIDE))) | 1
        nodes = np.linspace(-_REACH, _REACH, count)
        masses = np.exp(-(nodes**2) / 2)
        masses = masses / masses.sum()
    points = torch.as_tensor(nodes, dtype=wide_dtype(device), device=device).unsqueeze(1)
    return points, torch.as_tensor(masses, dtype=wide_dtype(device), device=device)


NOWHERE = Smoothing(torch.zeros(1, 1), torch.ones(1), independent=True)
"""The values themselves, without an expectation."""


# The generalised linear model p(D | f_lin(x, θ)) p(θ) as a convex function of θ.


@dataclass(frozen=True, eq=False)
class LinearModel:
    """−log p(D | f_lin) − log p(θ) up to constants, f_lin = f(x, θ*) + J (θ − θ*), as a function of θ − θ*, `[P]`.

    With a covariance of the outputs the loss is its expectation under N(f_lin, V): the part of the evidence lower
    bound that depends on the mean.

    Attributes:
        data: The data as the model sees them: outputs where its parameters are zero, products with J and Jᵀ.
        likelihood: p(y | f).
        scale: 1/(σ²T), 0-dim or `[C]`.
        prior_precision: δ, `[P]`, float64.
        offset: θ* − μ₀, `[P]`, float64.
        smoothing: Points of the expectation.
        roots: A root of V for every batch, or None.
    """

    data: LinearData | KernelData
    likelihood: Likelihood
    scale: Tensor
    prior_precision: Tensor
    offset: Tensor
    smoothing: Smoothing = NOWHERE
    roots: Sequence[Tensor] | None = None

    @classmethod
    def standard(cls, data: LinearData | KernelData, likelihood: Likelihood, scale: Tensor, n: int) -> LinearModel:
        """A model with n parameters and a standard normal prior."""
        zero = torch.zeros(n, dtype=data.batches[0].f.dtype, device=data.batches[0].f.device)
        return cls(data, likelihood, scale, torch.ones_like(zero), zero)

    @property
    def n_outputs(self) -> int:
        """C."""
        return self.data.batches[0].f.shape[1]

    def _each(self, at: Tensor) -> list[tuple[Tensor, Tensor | None, Tensor]]:
        """Outputs of the linearised network, root and targets of every batch."""
        roots = [None] * len(self.data.batches) if self.roots is None else self.roots
        pushed = self.data.push(at)
        return [(b.f + s, root, b.y) for b, s, root in zip(self.data.batches, pushed, roots, strict=True)]

    def loss_terms(self, at: Tensor) -> Tensor:
        """Summed (expected) unit negative log likelihood, `[1]` or `[C]`."""
        return self.smoothing.mean(self.losses(at))

    def losses(self, at: Tensor) -> Tensor:
        """The same at every point of the expectation, `[S, 1]` or `[S, C]`."""
        return torch.stack([self.smoothing.losses(self.likelihood, *one) for one in self._each(at)]).sum(0)

    def value(self, at: Tensor) -> float:
        """The function."""
        theta = self.offset + at
        return float((self.scale * self.loss_terms(at)).sum() + 0.5 * (self.prior_precision * theta) @ theta)

    def gradient(self, at: Tensor) -> Tensor:
        """Its gradient, `[P]`."""
        residuals = [self.scale * self.smoothing.gradient(self.likelihood, *one) for one in self._each(at)]
        return self.data.pull(residuals) + self.prior_precision * (self.offset + at)

    def hessians(self, at: Tensor) -> list[OutputHessian]:
        """(Expected) output Hessians of every batch."""
        return [self.smoothing.hessian(self.likelihood, *one) for one in self._each(at)]

    def hessian_at(self, at: Tensor) -> Callable[[Tensor], Tensor]:
        """Products of its Hessian with vectors."""
        inner = self.hessians(at)

        def product(vector: Tensor) -> Tensor:
            curved = self.data.curvature_product(inner, self.scale, vector)
            return curved + self.prior_precision * vector

        return product
