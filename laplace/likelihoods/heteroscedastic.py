"""Regression with a noise that depends on the input: y ~ N(η / λ(s), 1 / λ(s)), in natural parameters.

(Immer, Palumbo, Marx and Vogt, 2023, "Effective Bayesian heteroscedastic regression with deep neural networks".) The
natural parameters of a Gaussian are η₁ = m/σ² and η₂ = −1/(2σ²) < 0. The network returns η₁ and an s that is free, with
η₂ = −½ softplus(s): the precision of y is λ(s) = softplus(s). It grows linearly, not exponentially, so that a Gaussian
over s gives no log-normal precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, distributions
from torch.nn.functional import softplus

from laplace.core import scores
from laplace.core.gaussian import sample_moments
from laplace.core.precision_policy import widened
from laplace.core.random_numbers import standard_normal
from laplace.errors import InvalidData
from laplace.likelihoods.base import Likelihood, MomentLikelihood, OutputHessian
from laplace.likelihoods.checks import check_outputs, check_values
from laplace.likelihoods.targets import MomentTarget, Points, Score, Summary, TargetMoments, column, stretched

_EXPONENTIAL = -40.0
"""Below it softplus(s) is exp(s) to the last digit of float64."""

_FARTHEST = 40.0
"""Standard deviations of s within which that mode is looked for."""

_HALVINGS = 45
"""Bisections that find a root to the last digits."""

_ZOOMS = 8
"""Times that the mode of a density's integrand is looked for more closely, each time by a factor of 8."""


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Gaussians over pairs (η, s), `[..., C]` each, in float64: s, and η given s, which is N(a(s), r).

    Attributes:
        first: E[η].
        s: E[s].
        variance: Var(s).
        slope: Cov(η, s) / Var(s).
        rest: r.
    """

    first: Tensor
    s: Tensor
    variance: Tensor
    slope: Tensor
    rest: Tensor

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor) -> _Pairs:
        """Those of means `[..., 2C]` with covariances `[..., 2C, 2C]` or variances `[..., 2C]`."""
        first, s = widened(mean).chunk(2, -1)
        c, whole = first.shape[-1], covariance.ndim > mean.ndim
        variances = covariance.diagonal(dim1=-2, dim2=-1) if whole else covariance
        first_variance, variance = widened(variances).clamp(min=0).chunk(2, -1)
        shared = torch.zeros_like(first)
        if whole:
            shared = widened(covariance[..., :c, c:].diagonal(dim1=-2, dim2=-1))
        slope = torch.where(variance > 0, shared / variance.where(variance > 0, 1.0), 0.0)
        return cls(first, s, variance, slope, (first_variance - slope * shared).clamp(min=0))

    @property
    def points(self) -> Points:
        """Nodes of s for functions that grow like 1/λ² as s falls, like exp(−2s).

        Their mean lies 2 standard deviations per unit of s further down.
        """
        return Points.of_gaussian(self.s, self.variance, further_below=2 * self.variance.sqrt())

    def first_given(self, s: Tensor) -> Tensor:
        """a(s)."""
        return self.first + self.slope * (s - self.s)

    def log_density(self, y: Tensor) -> Tensor:
        """Log p(y) = log ∫ p(y | s) N(s) ds by quadrature around the mode of the integrand, element-wise.

        Where η is almost known and far from 0, s is all but decided by y: λ(s) is about η/y, to a small part of a
        standard deviation of s.
        """
        deviation = self.variance.sqrt()

        def log_integrand(z: Tensor) -> Tensor:
            return self._log_given(y, self.s + z * deviation) - 0.5 * z.square()

        with torch.no_grad():
            mode, step = _mode(log_integrand, self._exact_places(y))
            s = self.s + mode * deviation
            steepness = (y * torch.sigmoid(s) - self.slope).square() / self._total(softplus(s))
            width = (1 + self.variance * steepness).rsqrt().clamp(min=step)
            z, log_steps = stretched(mode, width, 1 + mode.abs() / 9)
        return (log_integrand(z) + log_steps).logsumexp(0) - 0.5 * math.log(2 * math.pi)

    def _exact_places(self, y: Tensor) -> Tensor:
        """Places z at which y is the mean of its density given s, λ(s) y = a(s), `[n, ...]`: where they are narrow.

        λ is convex and a is linear, so that there are at most two; places that are no such are returned, too.
        """
        deviation = self.variance.sqrt()

        def above(z: Tensor) -> Tensor:
            s = self.s + z * deviation
            return softplus(s) * y > self.first_given(s)

        grid = column(_FARTHEST, 241, self.s).expand(-1, *self.s.shape)
        changes = above(grid).diff(dim=0)
        first = changes.to(torch.uint8).argmax(0, keepdim=True)
        last = len(changes) - 1 - changes.flip(0).to(torch.uint8).argmax(0, keepdim=True)
        index = torch.cat([first, last])
        low, high = grid.gather(0, index), grid.gather(0, index + 1)
        side = above(low)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            same = above(middle) == side
            low, high = torch.where(same, middle, low), torch.where(same, high, middle)
        return low

    def _log_given(self, y: Tensor, s: Tensor) -> Tensor:
        """Log N(y; a/λ, (λ + r)/λ²), whose variance has no float where λ is tiny: λ² is taken out of it."""
        precision = softplus(s)
        total = self._total(precision)
        squares = (y * precision - self.first_given(s)).square() / total
        return _log_softplus(s) - 0.5 * (squares + (2 * math.pi * total).log())

    def _total(self, precision: Tensor) -> Tensor:
        """λ + r, positive."""
        return (precision + self.rest).clamp(min=torch.finfo(precision.dtype).tiny)


def natural_moments(mean: Tensor, covariance: Tensor) -> TargetMoments:
    """Moments of y under Gaussian (η, s), float64, by quadrature over s, given which η is Gaussian.

    With η | s ~ N(a(s), r):  E[y] = E[a/λ],  E[Var(y | f)] = E[1/λ],  Var(E[y | f]) = E[(a/λ − E[y])² + r/λ²].
    Variances that no float holds, of precisions that are hardly known, are infinite.
    """
    pairs = _Pairs.of(mean, covariance)
    points = pairs.points
    conditional = points.map(lambda s: pairs.first_given(s) / softplus(s))
    expected = conditional.mean()
    epistemic = conditional.mean(lambda value: (value - expected).square())
    epistemic = epistemic + pairs.rest * points.mean(lambda s: softplus(s).pow(-2))
    aleatoric = points.mean(lambda s: 1 / softplus(s))
    return TargetMoments(expected, *(part.nan_to_num(math.inf, math.inf) for part in (aleatoric, epistemic)))


class NoisyRealTarget(MomentTarget):
    """Real numbers, each with a noise of its own.

    The negative log likelihood reads the latents: a precision that is hardly known gives y tails whose variance says
    little of its density. A summary of latents has covariances, one of y variances.
    """

    @property
    def scores(self) -> Mapping[str, Score]:
        """CRPS and entropy are those of Gaussians with the moments of y."""
        return {
            "nll": self.nll,
            "crps": lambda _, summary, y, sigma: scores.gaussian_crps(*self.target_moments(*_pair(summary)), y),
            "entropy": lambda _, summary, *__: scores.gaussian_entropy(self.target_moments(*_pair(summary))[1]),
        }

    def nll(self, likelihood: Likelihood, summary: Summary, y: Tensor, sigma: Tensor) -> Tensor:
        """−Σ_c log p(y_c), by quadrature over s_c, given which y_c is Gaussian; without latents that of its moments."""
        mean, covariance = _pair(summary)
        if covariance.ndim == mean.ndim:
            return scores.gaussian_nll(mean, covariance, y)
        return -_Pairs.of(mean, covariance).log_density(widened(y)).sum(-1).to(mean)

    def _summary_without_link(self, mean: Tensor, covariance: Tensor, *, for_scores: bool) -> tuple[Tensor, Tensor]:
        """E[y] and Var(y); for scores the latents with their covariances."""
        if for_scores:
            return mean, covariance.to(mean.dtype)
        return super()._summary_without_link(mean, covariance, for_scores=False)

    def summary_of_samples(self, likelihood: Likelihood, samples: Tensor, *, for_scores: bool = False) -> Summary:
        """The same of samples; their outputs have the covariances of the samples."""
        if not for_scores:
            return super().summary_of_samples(likelihood, samples)
        mean, _ = sample_moments(samples)
        centred = samples - mean
        return mean, torch.einsum("sbi,sbj->bij", centred, centred) / (len(samples) - 1)


@dataclass(frozen=True)
class Heteroscedastic(MomentLikelihood):
    """p(y | f) = Π_c N(y_c; η_c / λ_c, 1 / λ_c) with outputs f = [η | s], `[B, 2C]`, and λ = softplus(s).

    −log p(y | f) = Σ_c ½ λ_c (y_c − η_c/λ_c)² − ½ log λ_c + ½ log 2π. The curvature is the Fisher information with
    respect to f, which does not depend on y. `la(x)` is (E[y], Var(y)), `[B, C]` each, with the noise.
    """

    name = "heteroscedastic"
    target = NoisyRealTarget(natural_moments, "real")

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """Finite targets `[B, C]` of outputs `[B, 2C]`, in their dtype.

        Raises:
            InvalidData: An odd number of outputs, targets of another shape, NaN or infinite values.
        """
        check_outputs(f)
        if f.shape[1] % 2:
            raise InvalidData(
                f"Outputs have shape {list(f.shape)}; likelihood='heteroscedastic' accepts [B, 2C], natural parameters "
                "[eta | s] of C targets: give the last layer an even number of outputs."
            )
        shape = [len(f), f.shape[1] // 2]
        if isinstance(y, Tensor) and list(y.shape) != shape:
            raise InvalidData(
                f"Targets have shape {list(y.shape)}, outputs {list(f.shape)}, natural parameters [eta | s]: shapes of "
                f"targets must be equal to [B, C] = {shape}, nothing is broadcast."
            )
        return check_values(f[:, ::2], y)

    def loss_terms(self, f: Tensor, y: Tensor) -> Tensor:
        """Σ_b −log p(y_b | f_b), `[1]`."""
        mean, precision, _ = _parameters(f)
        terms = 0.5 * (precision * (y - mean).square() - precision.log() + math.log(2 * math.pi))
        return terms.sum().reshape(1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        """[m − y | ½ σ(s) (y² − m² − 1/λ)] with m = η/λ and λ' = σ(s), `[B, 2C]`."""
        mean, precision, slope = _parameters(f)
        return torch.cat([mean - y, 0.5 * slope * ((y - mean) * (y + mean) - 1 / precision)], 1)

    def hessian(self, f: Tensor, y: Tensor | None = None) -> OutputHessian:
        """The Fisher information, of every pair (η, s) [[1, −σ m], [−σ m, σ² (m² + 1/(2λ))]] / λ."""
        mean, precision, slope = _parameters(f)
        diag = torch.cat([1 / precision, slope.square() * (mean.square() + 0.5 / precision) / precision], 1)
        mixed = torch.diag_embed(-slope * mean / precision)
        zeros = torch.zeros_like(mixed)
        off = torch.cat([torch.cat([zeros, mixed], 2), torch.cat([mixed, zeros], 2)], 1)
        return OutputHessian(diag, dense=torch.diag_embed(diag) + off)

    def sample_gradients(
        self, f: Tensor, y: Tensor | None, n_samples: int, generator: Generator | None = None
    ) -> Tensor:
        """Gradients at ŷ = m + ε/√λ with ε ~ N(0, 1), `[S, B, 2C]`."""
        mean, precision, slope = _parameters(f)
        noise = standard_normal((n_samples, *mean.shape), mean, generator)
        step = noise * precision.rsqrt()
        second = 0.5 * slope * (2 * mean * step + (noise.square() - 1) / precision)
        return torch.cat([-step, second], 2)

    def inverse_link(self, f: Tensor) -> Tensor:
        """E[y | f] = η / λ, `[..., C]` of outputs `[..., 2C]`."""
        return _parameters(f)[0]

    def conditional(self, f: Tensor) -> distributions.Distribution:
        """C independent Gaussians."""
        mean, precision, _ = _parameters(f)
        return distributions.Independent(distributions.Normal(mean, precision.rsqrt(), validate_args=False), 1)

    def predictive_nll(self, prediction: Tensor, variance: Tensor | None, y: Tensor, sigma_noise: Tensor) -> Tensor:
        """−Σ_c log N(y_c; prediction_c, variance_c), `[B]`: of the Gaussian with the moments of y.

        Raises:
            InvalidData: No variance, without which the density is not known.
        """
        if variance is None:
            raise InvalidData("a mean was given without a variance; likelihood='heteroscedastic' needs both.")
        return scores.gaussian_nll(prediction, variance, y)


def _mode(log_integrand: Callable[[Tensor], Tensor], candidates: Tensor) -> tuple[Tensor, float]:
    """Place within ±40 where an integrand is largest, by a grid and candidates, then closer; and how exactly."""
    step = 2 * _FARTHEST / 120
    grid = column(_FARTHEST, 121, candidates[0]).expand(-1, *candidates.shape[1:])
    best = _best(log_integrand, torch.cat([grid, candidates]))
    for _ in range(_ZOOMS):
        best, step = _best(log_integrand, best + column(step, 17, candidates[0])), step / 8
    return best, step


def _best(log_integrand: Callable[[Tensor], Tensor], places: Tensor) -> Tensor:
    """The best of some places `[n, ...]`."""
    values = log_integrand(places)
    return places.expand_as(values).gather(0, values.argmax(0, keepdim=True))[0]


def _parameters(f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """M = η/λ, λ = softplus(s) and dλ/ds = σ(s), `[..., C]` each, of outputs `[..., 2C]`."""
    first, s = f.chunk(2, -1)
    precision = softplus(s)
    return first / precision, precision, torch.sigmoid(s)


def _log_softplus(s: Tensor) -> Tensor:
    """Log softplus(s), which is s where the exponential is all there is of it."""
    return torch.where(s < _EXPONENTIAL, s, softplus(s.clamp(min=_EXPONENTIAL)).log())


def _pair(summary: Summary) -> tuple[Tensor, Tensor]:
    """Means and (co)variances."""
    if isinstance(summary, tuple):
        return summary
    raise InvalidData("a mean was given without a variance; likelihood='heteroscedastic' needs both.")
