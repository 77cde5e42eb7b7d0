"""Linear heads on fixed features: the mode at many weight decays, exact covariances, and leave-one-out predictions.

A head with logits f_c(x) = w_cᵀ z(x) + b_c, a Gaussian prior N(0, 1/λ) on weights and N(0, 1/δ_b) on intercepts, and
N labels has a posterior over P = K (D + 1) parameters. Features are the same for all classes and span at most N
dimensions, so that it is found and inverted class by class, in O(K N³) instead of O(K³ N³) [Rasmussen and Williams,
2006, section 3.5]. In coordinates z̃ of an orthonormal basis of the span,

    P = diag(A_1, …, A_K) − Xᵀ X,    A_c = Σ_n m_n p_nc z̃_n z̃_nᵀ + prior,    row n of X: √m_n (p_n1 z̃_n, …, p_nK z̃_n),
    P⁻¹ = A⁻¹ + A⁻¹ Xᵀ (I − X A⁻¹ Xᵀ)⁻¹ X A⁻¹.

Outside of the span the prior stays. Everything is float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace.core.precision_policy import widened

INTERCEPT = 0.1
"""δ_b, the prior precision of intercepts: a class without a label keeps about the probability of one label in N."""

FLAT = 1e-6
"""The same of real numbers, in units of the noise: left out is a datum then whatever the mean of all was subtracted."""

POWER = 0.5
"""Of the covariance of features, in the prior covariance of weights; 0 for the same in all directions."""

DECAYS = tuple(0.03 * (100 / 0.03) ** (k / 7) for k in range(8))
"""Weight decays λ that are tried, on standardised features."""

OF_NUMBERS = tuple(0.1 * 10 ** (5 * k / 9) for k in range(10))
"""The same of real numbers, in units of the noise, which is larger than what a label of a class leaves open."""


def decays_of(n_classes: int) -> list[float]:
    """Weight decays of the rows of a softmax head, from the largest down.

    Two rows of two classes hold half of the weights of one logit each: of them it is 2λ.
    """
    return [2 * decay if n_classes == 2 else decay for decay in reversed(DECAYS)]


_ROUNDS, _STEPS, _PRODUCTS, _SEARCHED = 3, 4, 4, 6
"""Inverses per weight decay, Newton steps with each, products per step, and steps of the search along it."""

_NODES = 48
"""Nodes of the quadrature of roots of matrices: ten digits where their eigenvalues differ by a factor of 4,000."""

Coordinates = tuple[Tensor, Tensor]
"""Coordinates with a 1 at the end, `[B, R + 1]`, and the squared distance from the span, `[B]`."""


@dataclass(frozen=True, eq=False)
class FeatureBasis:
    """Standardised features in an orthonormal basis of what those of the data span, and how far the prior lets each go.

    With the covariance C of the standardised features the prior covariance of weights is that of isotropic weights on
    features (C + I)^(power/2) z, up to a factor that keeps their total variance. Directions in which the data vary are
    allowed more: on the texts of `benchmarks.quality.decisions` that predicts better than the same for all.

    Attributes:
        mean, scale: Of every feature, `[D]`.
        vectors: The basis, `[D, R]`.
        gains: Factors of the coordinates, `[R]`.
        rest: Factor of what lies outside of the span, 0-dim.
    """

    mean: Tensor
    scale: Tensor
    vectors: Tensor
    gains: Tensor
    rest: Tensor

    @classmethod
    def from_features(cls, features: Tensor, counts: Tensor, power: float = POWER) -> FeatureBasis:
        """The basis of data `[N, D]` that count `[N]` times; constant features have the scale 1."""
        x, share = widened(features), (counts / counts.sum()).unsqueeze(1)
        mean = (share * x).sum(0)
        scale = (share * (x - mean).square()).sum(0).sqrt()
        floor = len(x) * torch.finfo(x.dtype).eps * x.abs().amax(0)
        scale = torch.where(scale > floor, scale, 1.0)
        rows = share.sqrt() * (x - mean) / scale
        gram = rows @ rows.T if len(x) <= x.shape[1] else rows.T @ rows
        values, vectors = torch.linalg.eigh(gram)
        kept = values > len(values) * torch.finfo(x.dtype).eps * values.amax().clamp(min=1e-300)
        values, vectors = values[kept], vectors[:, kept]
        basis = rows.T @ (vectors / values.sqrt()) if len(x) <= x.shape[1] else vectors
        if len(x) <= x.shape[1] and basis.numel():
            basis = torch.linalg.qr(basis).Q  # small eigenvalues leave columns that are not quite orthogonal
        gains = (values + 1) ** (power / 2)
        tiny = torch.finfo(x.dtype).tiny  # 1 where nothing varies: the prior stays there
        rest = ((values.sum() + tiny) / (gains.square() @ values + tiny)).sqrt()
        return cls(mean, scale, basis, rest * gains, rest)

    def coordinates(self, features: Tensor) -> Coordinates:
        """Where features `[B, D]` are."""
        z = (widened(features) - self.mean) / self.scale
        inside = z @ self.vectors
        outside = (z.square().sum(1) - inside.square().sum(1)).clamp(min=0) * self.rest.square()
        return torch.cat([inside * self.gains, inside.new_ones(len(inside), 1)], 1), outside

    def without_each(self, features: Tensor, counts: Tensor) -> Coordinates:
        """Where the data `[N, D]` of the basis are under the prior that the others make, of the default power 1/2.

        A datum is a part of the covariance C. With fewer data than features it has a direction of its own, which C
        would let go far: left out, it would be said to differ from all others more than a new one does. With its share
        s and A₋ = C + I − s z zᵀ its products with the others are those of A₋^½ z. That is the integral of
        (2c/π) A₋ (A₋ cos²φ + c² sin²φ)⁻¹ z over φ from 0 to π/2 for any c, whose inverses differ from diagonal ones by
        rank one; the midpoint rule converges geometrically.

        Products of the others with one another stay. That is for heads of classes: of real numbers with little weight
        decay, where residuals are small, these decide, and data left out would seem better known than new ones.
        """
        share = (counts / counts.sum()).unsqueeze(1)
        z = (widened(features) - self.mean) / self.scale @ self.vectors
        own = (share * z.square()).sum(0) + 1  # C + I in its eigenvectors
        c = torch.cat([own, own.new_ones(1)]).amax().pow(0.25)
        root = torch.zeros_like(z)
        for k in range(_NODES):
            phi = 0.5 * math.pi * (k + 0.5) / _NODES
            cos, sin = math.cos(phi) ** 2, (c * math.sin(phi)).square()
            solved = z / (cos * own + sin)
            solved = solved / (1 - cos * share * (z * solved).sum(1, keepdim=True))
            root += own * solved - z * (share * (z * solved).sum(1, keepdim=True))
        root *= self.rest.square() * c / _NODES
        inside = root / self.gains
        outside = ((root * z).sum(1) - inside.square().sum(1)).clamp(min=0)
        return torch.cat([inside, inside.new_ones(len(inside), 1)], 1), outside

    def weighed(self, features: Tensor) -> Tensor:
        """Features on which the prior of weights is isotropic, `[B, D]`."""
        z = (features.to(self.mean) - self.mean) / self.scale
        return self.rest * z + (z @ self.vectors * (self.gains - self.rest)) @ self.vectors.T

    def prior(self, decay: float, intercept: float = INTERCEPT) -> Tensor:
        """Prior precisions of coordinates and intercept, `[R + 1]`."""
        n = self.vectors.shape[1]
        return self.mean.new_tensor([decay] * n + [intercept])

    def weights(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of the features `weighed`, `[K, D]`, and intercepts `[K]`, of coordinates `[R + 1, K]`."""
        return (self.vectors @ at[:-1]).T, at[-1]


@dataclass(frozen=True, eq=False)
class Marginals:
    """Means and variances of outputs, as functions of features: of few inputs the number of operations is their cost.

    With standardised features s and u = Vᵀ s they are A u + b and uᵀ F_c u + l_cᵀ u + o_c + κ |s|², at least 0: what
    κ says of the span is subtracted in F.

    Attributes:
        basis: Coordinates of the features.
        at, intercept: Aᵀ and b, `[R, K]` and `[K]`.
        forms, linear, constant: F, l and o, `[R, K R]`, `[K R]` and `[K]`.
        beyond: κ, 0-dim.
    """

    basis: FeatureBasis
    at: Tensor
    intercept: Tensor
    forms: Tensor
    linear: Tensor
    constant: Tensor
    beyond: Tensor

    @classmethod
    def in_basis(cls, basis: FeatureBasis, at: Tensor, forms: Tensor, beyond: Tensor | float) -> Marginals:
        """Of weights `[R + 1, K]`, forms `[K, R + 1, R + 1]`, and the variance of a unit away from the span."""
        kappa, gains = beyond * basis.rest.square(), basis.gains
        inside = gains.unsqueeze(1) * forms[:, :-1, :-1] * gains - kappa * torch.ones_like(gains).diag()
        linear = 2 * gains * forms[:, -1, :-1]
        return cls(
            basis, gains.unsqueeze(1) * at[:-1], at[-1], inside.movedim(0, 1).flatten(1), linear.flatten(),
            forms[:, -1, -1], kappa,
        )  # fmt: skip

    def __call__(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Means and variances `[B, K]` at features `[B, D]`."""
        s = (widened(features) - self.basis.mean) / self.basis.scale
        u = s @ self.basis.vectors
        moved = torch.addmm(self.linear, u, self.forms).view(len(u), len(self.constant), u.shape[1])
        inside = (moved @ u.unsqueeze(2)).squeeze(2) + self.constant
        variance = torch.addcmul(inside, self.beyond, s.square().sum(1, keepdim=True)).clamp(min=0)
        return torch.addmm(self.intercept, u, self.at), variance


@dataclass(frozen=True, eq=False)
class LeaveOneOutOutputs:
    """Outputs of every datum under the posterior of all others.

    Attributes:
        mean: `[N, K]`.
        covariance: `[N, K, K]`, of classes those of logits less their mean.
    """

    mean: Tensor
    covariance: Tensor

    @property
    def variance(self) -> Tensor:
        """`[N, K]`."""
        return self.covariance.diagonal(dim1=1, dim2=2)


@dataclass(frozen=True, eq=False)
class Labelled:
    """Data of a head: features that differ, with the mean of the targets of each.

    Attributes:
        z: Coordinates with a 1 at the end, `[N, R + 1]`.
        targets: Shares of the labels, `[N, K]`, or mean numbers `[N, 1]`.
        counts: How often every datum counts, m, `[N]`.
    """

    z: Tensor
    targets: Tensor
    counts: Tensor

    # Of classes.

    def objective(self, prior: Tensor, at: Tensor) -> Tensor:
        """Negative log posterior up to a constant, 0-dim."""
        f = self.z @ at
        losses = f.logsumexp(1) - (f * self.targets).sum(1)
        return self.counts @ losses + 0.5 * (prior @ at.square()).sum()

    def probabilities(self, at: Tensor) -> Tensor:
        """`[N, K]`."""
        return (self.z @ at).softmax(1)

    def gradient(self, prior: Tensor, at: Tensor, p: Tensor) -> Tensor:
        """`[R + 1, K]`."""
        return self.z.T @ (self.counts.unsqueeze(1) * (p - self.targets)) + prior.unsqueeze(1) * at

    def product(self, prior: Tensor, p: Tensor, v: Tensor) -> Tensor:
        """P v of `[R + 1, K]`."""
        moved = p * (self.z @ v)
        moved = moved - p * moved.sum(1, keepdim=True)
        return self.z.T @ (self.counts.unsqueeze(1) * moved) + prior.unsqueeze(1) * v


@dataclass(frozen=True, eq=False)
class Inverse:
    """P⁻¹ of a softmax head, class by class.

    Attributes:
        roots: L_c⁻¹ of A_c = L_c L_cᵀ, `[K, R + 1, R + 1]`.
        coupling: C⁻¹ X_c A_c⁻¹ with C Cᵀ = I − X A⁻¹ Xᵀ, `[K, N, R + 1]`.
    """

    roots: Tensor
    coupling: Tensor

    @classmethod
    def at_probabilities(cls, data: Labelled, prior: Tensor, p: Tensor) -> Inverse:
        """At probabilities `[N, K]` of the data."""
        weighted = (data.counts.unsqueeze(1) * p).T.unsqueeze(2) * data.z  # `[K, N, R + 1]`
        own = data.z.T @ weighted + prior.diag()
        roots = torch.linalg.solve_triangular(
            torch.linalg.cholesky(own), torch.eye(len(prior), dtype=prior.dtype, device=prior.device), upper=False
        )
        rows = weighted / data.counts.sqrt().unsqueeze(1)
        white = rows @ roots.mT
        white_rows = white.movedim(0, 1).flatten(1)
        left = torch.eye(len(data.z), dtype=prior.dtype, device=prior.device) - white_rows @ white_rows.T
        factor = torch.linalg.cholesky(left)
        coupling = torch.linalg.solve_triangular(factor, white, upper=False) @ roots
        return cls(roots, coupling)

    def solve(self, v: Tensor) -> Tensor:
        """P⁻¹ v of `[R + 1, K]`."""
        columns = v.T.unsqueeze(2)
        own = self.roots.mT @ (self.roots @ columns)
        shared = (self.coupling @ columns).sum(0)
        return (own + self.coupling.mT @ shared).squeeze(2).T

    def covariance(self, z: Tensor, outside: Tensor) -> Tensor:
        """Covariances of logits less their mean, `[B, K, K]`; `outside` are prior variances off the span, `[B]`."""
        images = self.images(z)
        return _between(images, images, outside)

    def images(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """What covariances are made of, `[K, R + 1, B]` and `[K, N, B]`."""
        return self.roots @ z.T, self.coupling @ z.T

    def forms(self) -> Tensor:
        """Q_c of the variances z̃ᵀ Q_c z̃ of logits less their mean, `[K, R + 1, R + 1]`."""
        n = len(self.roots)
        own = self.roots.mT @ self.roots
        shared = self.coupling - self.coupling.mean(0)
        return (1 - 2 / n) * own + own.mean(0) / n + shared.mT @ shared


def _between(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], outside: Tensor) -> Tensor:
    """Covariances of logits less their mean in pairs, `[B, K, K]`, of two images; `outside` is shared off the span."""
    own = (one[0] * other[0]).sum(1).T + outside.unsqueeze(1)
    return _centred(one[1].movedim(2, 0) @ other[1].movedim(2, 0).mT + own.diag_embed())


def _centred(covariance: Tensor) -> Tensor:
    """Π Σ Π with Π = I − 11ᵀ/K: what all classes share changes no probability, and would widen every logit."""
    rows = covariance - covariance.mean(-1, keepdim=True)
    return rows - rows.mean(-2, keepdim=True)


@dataclass(frozen=True, eq=False)
class SoftmaxHead:
    """A head of K classes at the mode of its prior, and its posterior.

    Attributes:
        decay: λ.
        at: Coordinates of the weights, `[R + 1, K]`.
        inverse: P⁻¹.
    """

    decay: float
    at: Tensor
    inverse: Inverse

    def moments(self, z: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
        """Means `[B, K]` and covariances `[B, K, K]` of logits less their mean, at coordinates of a basis."""
        f = z @ self.at
        return f - f.mean(1, keepdim=True), self.inverse.covariance(z, outside / self.decay)

    def marginals(self, basis: FeatureBasis) -> Marginals:
        """The same of logits, without covariances between them."""
        n, at = len(self.inverse.roots), self.at - self.at.mean(1, keepdim=True)
        return Marginals.in_basis(basis, at, self.inverse.forms(), (1 - 1 / n) / self.decay)

    def left_out(self, data: Labelled, others: Coordinates) -> LeaveOneOutOutputs:
        """Moments of every datum without it, by one Newton step.

        With g and Λ of its loss, S the covariance of its logits and S′ that with its logits at the coordinates
        `others`, which it has under the prior of the others: μ′ + S′ (I − ΛS)⁻¹ g and Σ′ + S′ (I − ΛS)⁻¹ Λ S′ᵀ.
        """
        p, count = data.probabilities(self.at), data.counts.view(-1, 1, 1)
        here, there = self.inverse.images(data.z), self.inverse.images(others[0])
        none, mean = torch.zeros_like(data.counts), others[0] @ self.at
        own, shared = _between(here, here, none), _between(there, here, none)
        covariance = _between(there, there, others[1] / self.decay)
        mean = mean - mean.mean(1, keepdim=True)
        hessian = count * (p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1))
        gradient = (data.counts.unsqueeze(1) * (p - data.targets)).unsqueeze(2)
        eye = torch.eye(p.shape[1], dtype=p.dtype, device=p.device)
        moved = torch.linalg.solve(eye - hessian @ own, torch.cat([gradient, hessian @ shared.mT], 2))
        covariance = covariance + shared @ moved[:, :, 1:]
        return LeaveOneOutOutputs(mean + (shared @ moved[:, :, :1]).squeeze(2), 0.5 * (covariance + covariance.mT))


def softmax_heads(data: Labelled, basis: FeatureBasis, decays: Sequence[float] | None = None) -> Iterator[SoftmaxHead]:
    """Heads at the modes of weight decays, in turn; each starts at the one before. None for those of `decays_of`.

    Steps go with an inverse that is made anew `_ROUNDS` times for every weight decay. All are counted: no last digit
    decides when they end.
    """
    at = torch.zeros(data.z.shape[1], data.targets.shape[1], dtype=data.z.dtype, device=data.z.device)
    inverse = None
    for decay in decays_of(data.targets.shape[1]) if decays is None else decays:
        prior = basis.prior(decay)
        inverse = inverse or Inverse.at_probabilities(data, prior, data.probabilities(at))
        for _ in range(_ROUNDS):
            for _ in range(_STEPS):
                step = _newton_step(data, prior, at, inverse.solve)
                at = at - _share(data, prior, at, step) * step
            inverse = Inverse.at_probabilities(data, prior, data.probabilities(at))
        yield SoftmaxHead(decay, at, inverse)


def _newton_step(data: Labelled, prior: Tensor, at: Tensor, near: Callable[[Tensor], Tensor]) -> Tensor:
    """P⁻¹ g by conjugate gradients; `near` solves with about P, and decides how exact it is."""
    p = data.probabilities(at)
    left = data.gradient(prior, at, p)
    x, tiny = torch.zeros_like(left), torch.finfo(left.dtype).tiny
    direction = solved = near(left)
    size = (left * solved).sum()
    for _ in range(_PRODUCTS):
        product = data.product(prior, p, direction)
        rate = size / (direction * product).sum().clamp(min=tiny)
        x, left = x + rate * direction, left - rate * product
        solved = near(left)
        new = (left * solved).sum()
        direction, size = solved + new / size.clamp(min=tiny) * direction, new
    return x


def _share(data: Labelled, prior: Tensor, at: Tensor, step: Tensor) -> Tensor:
    """The t at which the objective at θ − t·step is least, 0-dim, by damped Newton steps on logits alone.

    Where logits of a datum move apart by r, second derivatives grow by at most eʳ, so that log(1 + r)/r of a step
    lowers the objective from anywhere (Bach, 2010, proposition 1).
    """
    f, moved, tiny = data.z @ at, data.z @ step, torch.finfo(step.dtype).tiny
    reach = (moved.amax(1) - moved.amin(1)).amax()
    fixed = data.counts @ (data.targets * moved).sum(1) - (prior.unsqueeze(1) * at * step).sum()
    curved = (prior.unsqueeze(1) * step.square()).sum()
    t = torch.zeros_like(reach)
    for _ in range(_SEARCHED):
        p = (f - t * moved).softmax(1)
        mean = (p * moved).sum(1)
        variance = (p * (moved - mean.unsqueeze(1)).square()).sum(1)
        change = (fixed - data.counts @ mean + t * curved) / (data.counts @ variance + curved).clamp(min=tiny)
        r = (change * reach).abs().clamp(min=tiny)
        t = t - change * r.log1p() / r
    return t


# Real numbers.


@dataclass(frozen=True, eq=False)
class RidgeHead:
    """A head of one real number at the mode of its prior, and its posterior; λ is in units of the noise.

    Attributes:
        decay: λ = δ σ².
        at: Coordinates of the weights, `[R + 1, 1]`.
        root: L⁻¹ of Z̃ᵀ M Z̃ + prior = L Lᵀ with the counts M, `[R + 1, R + 1]`.
        noise: σ², 0-dim: the mean square of left-out residuals, in units of their own variance.
    """

    decay: float
    at: Tensor
    root: Tensor
    noise: Tensor

    def moments(self, z: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
        """Means `[B, 1]` and covariances `[B, 1, 1]` of the function, at coordinates of a basis."""
        share = (self.root @ z.T).square().sum(0) + outside / self.decay
        return z @ self.at, (self.noise * share).view(-1, 1, 1)

    def marginals(self, basis: FeatureBasis) -> Marginals:
        """The same in fewer operations."""
        return Marginals.in_basis(
            basis, self.at, self.noise * (self.root.mT @ self.root)[None], self.noise / self.decay
        )

    def left_out(self, data: Labelled) -> LeaveOneOutOutputs:
        """Moments of every datum without it, exactly."""
        mean, share = self._without(data)
        return LeaveOneOutOutputs(mean, (self.noise * share).view(-1, 1, 1))

    def _without(self, data: Labelled) -> tuple[Tensor, Tensor]:
        """Means `[N, 1]`, and variances in units of the noise `[N]`."""
        share = (self.root @ data.z.T).square().sum(0)
        share = share / (1 - data.counts * share)
        mean = data.z @ self.at
        return mean - (data.counts * share).unsqueeze(1) * (data.targets - mean), share


def ridge_heads(data: Labelled, y: Tensor, index: Tensor, basis: FeatureBasis) -> Iterator[RidgeHead]:
    """Heads at all weight decays; the noise is that of targets `[M, 1]`, each of the datum of its index `[M]`."""
    weighted = data.counts.unsqueeze(1) * data.z
    for decay in OF_NUMBERS:
        precision = data.z.T @ weighted + basis.prior(decay, FLAT).diag()
        eye = torch.eye(len(precision), dtype=precision.dtype, device=precision.device)
        root = torch.linalg.solve_triangular(torch.linalg.cholesky(precision), eye, upper=False)
        at = root.mT @ (root @ (weighted.T @ data.targets))
        head = RidgeHead(decay, at, root, torch.ones_like(precision[0, 0]))
        mean, share = head._without(data)
        residuals = (y - mean[index]).square().squeeze(1)
        yield replace(head, noise=(residuals / (1 + share[index])).mean())
