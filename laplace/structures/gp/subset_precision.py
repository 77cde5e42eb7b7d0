"""Posterior precisions of M data, by kernels between them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from laplace.core.hyperparameters import GaussianPrior
from laplace.core.precision_policy import wide_dtype, widened
from laplace.errors import UnsupportedError
from laplace.jacobian.jacobian import Jacobian, Scales, kernel, kernel_at, kernel_diagonal
from laplace.structures import algebra
from laplace.structures.gp.dual import Basis, Projected, Span, each_output, pulled
from laplace.structures.powers import shrinking_slopes
from laplace.structures.precision import Precision
from laplace.structures.variances_over_priors import VariancesOverPriors


@dataclass(frozen=True, eq=False)
class DualPrecision(Precision):
    """P = w Σ_m J_mᵀ Λ_m J_m + D, where D is one precision, or one per tensor.

    Attributes:
        duals: The data: of all outputs together, or of every output by itself.
        weights: w, `[1]`, or `[C]` of every output.
        prior: D.
        dtype: Of what is returned.
    """

    duals: tuple[Span, ...]
    weights: Tensor
    prior: GaussianPrior
    dtype: torch.dtype

    @property
    def is_scalar(self) -> bool:
        """True if P is a rescaling of what one eigendecomposition per fit knows."""
        return self.prior.is_scalar and self.weights.numel() == 1

    @abstractmethod
    def weights_of(self, i: int) -> Tensor:
        """W of the outputs of a dual."""

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """Prior variance of every tensor."""
        return tuple(1 / delta for delta in self.prior.per_block())

    def logdet_ratio(self) -> Tensor:
        """Log det(I + G), differentiable."""
        total = torch.zeros((), dtype=wide_dtype(self.weights.device), device=self.weights.device)
        for i, dual in enumerate(self.duals):
            if self.is_scalar:
                total = total + (self.weights / self.prior.precision * dual.unit.values).log1p().sum()
            else:
                values = torch.linalg.eigvalsh(dual.gram(self.weights_of(i), self.scales))
                total = total + values.clamp(min=0).log1p().sum()
        return total

    @property
    def moves(self) -> bool:
        """True if the span of the data, as `bases` hold it, depends on a hyper-parameter that requires a gradient."""
        follows = self.weights.requires_grad or self.prior.precision.requires_grad
        return not self.is_scalar and torch.is_grad_enabled() and follows

    def root(self, i: int) -> Tensor:
        """Cholesky factor of I + G, `[R, R]`, float64, differentiable."""
        gram = self.duals[i].gram(self.weights_of(i), self.scales)
        return torch.linalg.cholesky(gram + torch.eye(len(gram), dtype=gram.dtype, device=gram.device))

    def moved(self, i: int, jacobian: Jacobian, constant: Tensor, form: str) -> Tensor:
        """Covariances in a fixed basis, with the gradient of K** − K*M S (I + G)⁻¹ Sᵀ K_M*."""
        if not self.moves:
            return constant
        outside = {"full": kernel_at, "diagonal": kernel_diagonal, "joint": _joint_kernel}[form](jacobian, self.scales)
        cross = torch.cat([kernel(jacobian, part, self.scales) for part in self.duals[i].parts], 2)
        rows = self.duals[i].lower(cross.flatten(0, 1), self.weights_of(i))
        inside = torch.linalg.solve_triangular(self.root(i), rows.T, upper=False).T
        if form == "joint":
            value = outside - inside @ inside.T
        else:
            each = inside.unflatten(0, cross.shape[:2])
            value = outside - (each @ each.mT if form == "full" else each.square().sum(2))
        return constant + (value - value.detach())

    @cached_property
    def bases(self) -> tuple[Basis, ...]:
        """Bases of the span of the data, in units in which `setting` are scalars."""
        if self.is_scalar:
            return tuple(dual.unit for dual in self.duals)
        scales = tuple(scale.detach() for scale in self.scales)
        return tuple(dual.basis(self.weights_of(i).detach(), scales) for i, dual in enumerate(self.duals))

    @property
    def setting(self) -> tuple[Tensor, Tensor]:
        """W and δ, 0-dim, in the units of `bases`."""
        if self.is_scalar:
            return self.weights[0], self.prior.precision[0]
        one = torch.ones((), dtype=wide_dtype(self.weights.device), device=self.weights.device)
        return one, one


@dataclass(frozen=True)
class SubsetPrecision(DualPrecision):
    """All outputs together: the posterior is one over weights, and everything of it can be asked for."""

    def weights_of(self, i: int) -> Tensor:
        return self.weights

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        variance = self.bases[0].variance(jacobian).at(*self.setting)
        return self.moved(0, jacobian, variance, "full").to(jacobian.summed_in(self.dtype))

    def functional_diagonal(self, jacobian: Jacobian) -> Tensor:
        variances = self.bases[0].diagonal(jacobian).at(*self.setting)
        return self.moved(0, jacobian, variances, "diagonal").to(self.dtype)

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        covariance = self.bases[0].covariance(jacobian).at(*self.setting)
        return self.moved(0, jacobian, covariance, "joint").to(jacobian.summed_in(self.dtype))

    # Weights: products with A = √w Sᵀ J and its transpose, block by block.

    def _push(self, vectors: Tensor) -> Tensor:
        """A v of `[S, P]`, `[S, R]`."""
        dual = self.duals[0]
        return dual.lower(torch.cat([part.apply(vectors) for part in dual.parts], 1), self.weights)

    def _pull(self, rows: Tensor) -> Tensor:
        """Aᵀ u of `[S, R]`, `[S, P]`."""
        dual = self.duals[0]
        n_data = sum(part.n_data for part in dual.parts)
        outputs = dual.lift(rows.T, self.weights).T.unflatten(1, (n_data, -1))
        return torch.stack([pulled(dual.parts, row) for row in outputs])

    def quad(self, vectors: Tensor) -> Tensor:
        rows = vectors.reshape(-1, vectors.shape[-1])
        values = self._push(rows).square().sum(1) + (rows.square() * self.prior.diagonal()).sum(1)
        return values.view(vectors.shape[:-1])

    def sample(self, noise: Tensor) -> Tensor:
        """D^(−½) (I + Bᵀ B)^(−½) ε with B = A D^(−½): I − Bᵀ U (1 − (1 + λ)^(−½))/λ Uᵀ B is that root."""
        root = self.prior.diagonal().rsqrt().to(noise)
        values, vectors = self._spectrum
        factor = (1 - (1 + values).rsqrt()) / values
        pushed = widened(self._push(root * noise))
        inner = (pushed @ vectors * factor) @ vectors.T
        if self.moves:
            inner = inner + pushed @ self._shrinking_slope()
        return root * (noise - root * self._pull(inner.to(noise)))

    def _shrinking_slope(self) -> Tensor:
        """(1 − (1 + λ)^(−½))/λ of G less what it is, `[R, R]`: zero, with its gradient; null directions count too."""
        gram = self.duals[0].gram(self.weights, self.scales)
        with torch.no_grad():
            values, vectors = algebra.eigh(0.5 * (gram + gram.T))
        drift = vectors.T @ (gram - gram.detach()) @ vectors
        return vectors @ (shrinking_slopes(1 + values) * drift) @ vectors.T

    @property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues of G, and its eigenvectors."""
        weight, prior = (widened(value) for value in self.setting)
        return weight / prior * self.bases[0].values, self.bases[0].vectors

    def diagonal_of_inverse(self) -> Tensor:
        variance = 1 / self.prior.diagonal()
        removed = torch.zeros_like(variance)
        if self.moves:  # Aᵀ (I + G)⁻¹ A without eigenvectors, which move
            root = self.root(0)
            eye = torch.eye(len(root), dtype=root.dtype, device=root.device)
            for row in torch.linalg.solve_triangular(root, eye, upper=False):
                removed = removed + self._pull(row.unsqueeze(0).to(self.dtype))[0].square()
            return variance - variance.square() * removed
        values, vectors = self._spectrum
        for value, vector in zip(values, vectors.T, strict=True):  # one pull each: no [R, P]
            row = self._pull(vector.unsqueeze(0).to(self.dtype))[0]
            removed = removed + row.square() / (1 + value).to(row)
        return variance - variance.square() * removed

    def to_dense(self) -> Tensor:
        rows = self._push(torch.eye(self.prior.layout.n_params, dtype=self.dtype, device=self.weights.device)).T
        return rows.T @ rows + torch.diag(self.prior.diagonal())


def _joint_kernel(jacobian: Jacobian, scales: Scales) -> Tensor:
    """K between all outputs of all data, `[B·C, B·C]`, float64."""
    n = jacobian.n_data * jacobian.n_cotangents
    return kernel(jacobian, jacobian, scales).reshape(n, n)


def _side_by_side(blocks: list[Tensor]) -> Tensor:
    """Covariances `[..., n, n]` of C independent outputs as one, `[..., n·C, n·C]`, rows major."""
    return torch.diag_embed(torch.stack(blocks, -1)).transpose(-3, -2).flatten(-2).flatten(-3, -2)


@dataclass(frozen=True)
class IndependentPrecision(DualPrecision):
    """Every output by itself, a Gaussian process of its own: no Gaussian over weights belongs to it."""

    def weights_of(self, i: int) -> Tensor:
        return self.weights[i].unsqueeze(0) if self.weights.numel() > 1 else self.weights

    def _outputs(self, jacobian: Jacobian) -> Iterator[tuple[Basis, Jacobian]]:
        yield from zip(self.bases, each_output(jacobian), strict=True)

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        if jacobian.group_size == 1:  # an output of one row: variances say everything
            return torch.diag_embed(self.functional_diagonal(jacobian))
        blocks = [
            self.moved(i, part, basis.variance(part).at(*self.setting), "full")
            for i, (basis, part) in enumerate(self._outputs(jacobian))
        ]
        return _side_by_side(blocks).to(jacobian.summed_in(self.dtype))

    def functional_diagonal(self, jacobian: Jacobian) -> Tensor:
        variances = [
            self.moved(i, part, basis.diagonal(part).at(*self.setting), "diagonal")
            for i, (basis, part) in enumerate(self._outputs(jacobian))
        ]
        return torch.cat(variances, 1).to(self.dtype)

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        blocks = [
            self.moved(i, part, basis.covariance(part).at(*self.setting), "joint")
            for i, (basis, part) in enumerate(self._outputs(jacobian))
        ]
        return _side_by_side(blocks).to(jacobian.summed_in(self.dtype))

    def quad(self, vectors: Tensor) -> Tensor:
        raise self._no_weights()

    def sample(self, noise: Tensor) -> Tensor:
        raise self._no_weights()

    def diagonal_of_inverse(self) -> Tensor:
        raise self._no_weights()

    def to_dense(self) -> Tensor:
        raise self._no_weights()

    @property
    def scale(self) -> Tensor:
        raise self._no_weights()

    def _no_weights(self) -> UnsupportedError:
        return UnsupportedError(
            "independent_outputs=True makes a Gaussian process of every output, to which no Gaussian over weights "
            "belongs: there are no weights to sample, and no gradients of validation losses (use method='grid' or "
            "'gridsearch'). Use independent_outputs=False for these."
        )


@dataclass(frozen=True, eq=False)
class DualScan(VariancesOverPriors):
    """Functional variances at many scalar priors: kernels and coordinates once.

    Attributes:
        bases: Of all outputs together, or of every output by itself.
        weight: W, 0-dim, in the units of the bases.
        factor: What the prior precision is multiplied with.
        dtype: Of what is returned.
        together: Whether there is one basis, of all outputs.
    """

    bases: tuple[Basis, ...]
    weight: Tensor
    factor: float
    dtype: torch.dtype
    together: bool

    def variances(self, jacobian: Jacobian, *, diagonal: bool) -> Callable[[Tensor], Tensor]:
        if self.together:
            basis = self.bases[0]
            projected = basis.diagonal(jacobian) if diagonal else basis.variance(jacobian)
            dtype = self.dtype if diagonal else jacobian.summed_in(self.dtype)
            return lambda deltas: torch.stack([self._at(projected, delta) for delta in deltas]).to(dtype)
        parts = [basis.diagonal(one) for basis, one in zip(self.bases, each_output(jacobian), strict=True)]

        def at(deltas: Tensor) -> Tensor:
            variances = torch.stack([torch.cat([self._at(part, delta) for part in parts], 1) for delta in deltas])
            return (variances if diagonal else torch.diag_embed(variances)).to(self.dtype)

        return at

    def _at(self, projected: Projected, delta: Tensor) -> Tensor:
        return projected.at(self.weight, self.factor * delta)
