"""Targets with a noise of their own: y given (a, s), an output that decides the mean and one that decides the noise.

What a parametrisation says of y given s is a subclass of `GaussianPairs`. Densities, distribution functions and
quantiles of y follow by quadrature over s, given which y is Gaussian. Moments do not always say anything: 1/λ(s) grows
exponentially as s falls, so that under a wide Gaussian over s they are those of values of s that never occur, or no
float holds them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor
from torch.special import ndtr

from laplace.core import scores
from laplace.core.checks import numbers_are_known
from laplace.core.gaussian import sample_moments
from laplace.core.precision_policy import widened
from laplace.errors import InvalidData
from laplace.likelihoods.base import Likelihood, MomentLikelihood
from laplace.likelihoods.checks import check_outputs, check_values
from laplace.likelihoods.targets import MomentTarget, Points, Score, Summary, TargetMoments, column, stretched

_FARTHEST = 40.0
"""Standard deviations of s within which a mode is looked for."""

_HALVINGS = 45
"""Bisections that find a root to the last digits."""

_ZOOMS = 8
"""Times that the mode of a density's integrand is looked for more closely, each time by a factor of 8."""

_UNSEEN = 4.0
"""Standard deviations of s beyond which, to one side, one draw in 30,000 lies."""

_NARROW = 4.0
"""Variance of s below which moments are not decided beyond `_UNSEEN`: their integrands grow like exp(2 |s|) at most."""

_ONE_DEVIATION = (0.5 * math.erfc(0.5**0.5), 0.5, 1 - 0.5 * math.erfc(0.5**0.5))
"""Probabilities below a Gaussian's mean and one standard deviation around it."""

_ROWS = 4096
"""Targets whose quantiles are looked for at once."""

_UNIT = 1e-30
"""Size of y above which quantiles are looked for on a logarithmic scale."""


P = TypeVar("P", bound="GaussianPairs")


@dataclass(frozen=True, eq=False)
class GaussianPairs(ABC):
    """Gaussians over pairs (a, s), `[..., C]` each, in float64: s, and a given s, which is N(a(s), r).

    Attributes:
        first: E[a].
        s: E[s].
        variance: Var(s).
        slope: Cov(a, s) / Var(s).
        rest: r.
    """

    first: Tensor
    s: Tensor
    variance: Tensor
    slope: Tensor
    rest: Tensor

    @classmethod
    def from_outputs(cls: type[P], mean: Tensor, covariance: Tensor) -> P:
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

    def first_given(self, s: Tensor) -> Tensor:
        """a(s)."""
        return self.first + self.slope * (s - self.s)

    def select(self: P, where: Tensor | slice) -> P:
        """Some pairs, `[n]`, of those that are flat."""
        return type(self)(*(part[where] for part in self._parts))

    @property
    def flat(self: P) -> P:
        """The same as `[R]`."""
        return type(self)(*(part.reshape(-1) for part in self._parts))

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        return self.first, self.s, self.variance, self.slope, self.rest

    # Of y given s, element-wise.

    @abstractmethod
    def standardised(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """The k and l of (y − E[y | s]) / √Var(y | s) = k y − l."""

    @abstractmethod
    def log_given(self, y: Tensor, s: Tensor) -> Tensor:
        """Log p(y | s)."""

    @abstractmethod
    def log_square(self, s: Tensor) -> Tensor:
        """Log E[y² | s], but for what does not depend on s: what decides the second moment."""

    @abstractmethod
    def noise(self, s: Tensor) -> Tensor:
        """Variance of y given both."""

    @abstractmethod
    def moments(self) -> TargetMoments:
        """Moments of y, whatever values of s decide them."""

    @abstractmethod
    def steepness(self, y: Tensor, s: Tensor) -> Tensor:
        """About −d²/ds² log p(y | s)."""

    @abstractmethod
    def narrow_places(self, y: Tensor) -> Tensor:
        """Places z, in deviations of s, at which p(y | s) may be narrow, `[n, ...]`."""

    # Of y.

    def log_density(self, y: Tensor) -> Tensor:
        """Log p(y) = log ∫ p(y | s) N(s) ds by quadrature around the mode of the integrand, element-wise.

        Where a is almost known and far from 0, s is all but decided by y, to a small part of a standard deviation.
        """
        deviation = self.variance.sqrt()

        def log_integrand(z: Tensor) -> Tensor:
            return self.log_given(y, self.s + z * deviation) - 0.5 * z.square()

        with torch.no_grad():
            mode, step = _mode(log_integrand, self.narrow_places(y))
            steepness = self.steepness(y, self.s + mode * deviation)
            width = (1 + self.variance * steepness).rsqrt().clamp(min=step)
            z, log_steps = stretched(mode, width, 1 + mode.abs() / 9)
        return (log_integrand(z) + log_steps).logsumexp(0) - 0.5 * math.log(2 * math.pi)

    def below(self, y: Tensor) -> Tensor:
        """P(Y ≤ y) by quadrature over s, element-wise."""

        def given(s: Tensor) -> Tensor:
            slope, offset = self.standardised(s)
            return ndtr(slope * y - offset)

        return Points.of_gaussian(self.s, self.variance).mean(given)

    def quantiles(self, levels: tuple[float, ...], largest: float) -> list[Tensor]:
        """Places within ± `largest` below which y lies with these probabilities, `[R]` each, of flat pairs."""
        parts = [self.select(slice(i, i + _ROWS)) for i in range(0, len(self.s), _ROWS)]
        found = [part._quantiles(levels, largest) for part in parts]
        return [torch.cat(column) for column in zip(*found, strict=True)]

    def _quantiles(self, levels: tuple[float, ...], largest: float) -> list[Tensor]:
        """By bisection on a scale that is logarithmic above `_UNIT`; differentiable."""
        found: list[Tensor] = []
        with torch.no_grad():
            points = Points.of_gaussian(self.s, self.variance)
            slope, offset = self.standardised(points.values)
            for level in levels:
                high = torch.full_like(self.s, math.asinh(largest / _UNIT))
                low = -high
                for _ in range(_HALVINGS):
                    middle = (low + high) / 2
                    is_less = replace(points, values=ndtr(slope * (_UNIT * middle.sinh()) - offset)).mean() < level
                    low, high = torch.where(is_less, middle, low), torch.where(is_less, high, middle)
                found.append(_UNIT * ((low + high) / 2).sinh())
        if not any(part.requires_grad for part in self._parts):
            return found
        # Of F(q) = p, dq = −∂F / p(q).
        gaps = [self.below(quantile) for quantile in found]
        slopes = [self.log_density(quantile).detach().exp() for quantile in found]
        return [q - (gap - gap.detach()) / density for q, gap, density in zip(found, gaps, slopes, strict=True)]

    # What a prediction shows.

    @classmethod
    def shown(cls, mean: Tensor, covariance: Tensor) -> TargetMoments:
        """Moments of y where they say something of it; else its median, and the square of half its central 68 %.

        They do not where most of the second moment is that of s beyond `_UNSEEN` standard deviations, or where no
        number of the dtype holds them.
        """
        return cls.from_outputs(mean, covariance)._shown(mean.dtype)

    def _shown(self, dtype: torch.dtype) -> TargetMoments:
        known = self.moments()
        unheld = ~known.variance.to(dtype).isfinite() | ~known.mean.to(dtype).isfinite()
        largest = math.sqrt(torch.finfo(dtype).max / 2)
        if not numbers_are_known():
            return self._robust(known, unheld | self._is_decided_by_tail(), largest)
        may = unheld | (self.variance > _NARROW)
        if not bool(may.any()):
            return known
        unheld = unheld.clone()
        unheld[may] |= self.flat.select(may.reshape(-1))._is_decided_by_tail()
        return self._robust(known, unheld, largest) if bool(unheld.any()) else known

    def _is_decided_by_tail(self) -> Tensor:
        deviation = self.variance.sqrt()
        z = column(1.0, 601, self.s) * (13 + 2 * deviation)  # as far as exp(2 |s|) N(s) is anything
        logs = self.log_square(self.s + z * deviation) - 0.5 * z.square()
        return logs.where(z.abs() > _UNSEEN, -math.inf).logsumexp(0) > logs.logsumexp(0) - math.log(2)

    def _robust(self, known: TargetMoments, where: Tensor, largest: float) -> TargetMoments:
        """The moments, and in some places median and spread."""
        where, flat = where.reshape(-1), self.flat
        index = where.nonzero().squeeze(1) if numbers_are_known() else torch.arange(len(where), device=where.device)
        chosen = flat.select(index)
        low, middle, high = chosen.quantiles(_ONE_DEVIATION, largest)
        total = (0.5 * (high - low)).square()
        aleatoric = torch.minimum(chosen.noise(chosen.s), total)

        def put(moment: Tensor, robust: Tensor) -> Tensor:
            whole = moment.reshape(-1).index_put((index,), robust)
            return torch.where(where, whole, moment.reshape(-1)).view_as(moment)

        return TargetMoments(
            put(known.mean, middle), put(known.aleatoric, aleatoric), put(known.epistemic, total - aleatoric)
        )


@dataclass(frozen=True, kw_only=True)
class NoisyRealTarget(MomentTarget):
    """Real numbers, each with a noise of its own.

    The negative log likelihood and distribution functions read the latents: a noise that is hardly known gives y tails
    whose variance says little of its density. A summary of latents has covariances, one of y variances.

    Attributes:
        pairs: What the outputs say of y.
    """

    pairs: type[GaussianPairs]

    @property
    def scores(self) -> Mapping[str, Score]:
        """CRPS and entropy are those of Gaussians with the moments of y."""
        return {
            "nll": self.nll,
            "crps": lambda _, summary, y, sigma: scores.gaussian_crps(*self.target_moments(*pair_of(summary)), y),
            "entropy": lambda _, summary, *__: scores.gaussian_entropy(self.target_moments(*pair_of(summary))[1]),
        }

    def nll(self, likelihood: Likelihood, summary: Summary, y: Tensor, sigma: Tensor) -> Tensor:
        """−Σ_c log p(y_c), by quadrature over s_c, given which y_c is Gaussian; without latents that of its moments."""
        mean, covariance = pair_of(summary)
        if covariance.ndim == mean.ndim:
            return scores.gaussian_nll(mean, covariance, y)
        return -self.pairs.from_outputs(mean, covariance).log_density(widened(y)).sum(-1).to(mean)

    def below(self, summary: Summary, y: Tensor, sigma: Tensor) -> Tensor | None:
        """P(Y_c ≤ y_c), by quadrature over s_c; without latents that of Gaussians."""
        mean, covariance = pair_of(summary)
        if covariance.ndim == mean.ndim:
            return super().below(summary, y, sigma)
        return self.pairs.from_outputs(mean, covariance).below(widened(y))

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


def pair_of(summary: Summary) -> tuple[Tensor, Tensor]:
    """Means and (co)variances."""
    if isinstance(summary, tuple):
        return summary
    raise InvalidData(
        "a mean was given without a variance; a likelihood with a noise that the network predicts needs both."
    )


class PairLikelihood(MomentLikelihood):
    """A likelihood of targets `[B, C]` by outputs `[B, 2C]`, one pair for each, that a subclass names for messages."""

    outputs: ClassVar[str]

    def check_targets(self, f: Tensor, y: Tensor) -> Tensor:
        """Finite targets `[B, C]` of outputs `[B, 2C]`, in their dtype.

        Raises:
            InvalidData: An odd number of outputs, targets of another shape, NaN or infinite values.
        """
        check_outputs(f)
        if f.shape[1] % 2:
            raise InvalidData(
                f"Outputs have shape {list(f.shape)}; likelihood={self.name!r} accepts [B, 2C], {self.outputs} of C "
                "targets: give the last layer an even number of outputs."
            )
        shape = [len(f), f.shape[1] // 2]
        if isinstance(y, Tensor) and list(y.shape) != shape:
            raise InvalidData(
                f"Targets have shape {list(y.shape)}, outputs {list(f.shape)}, {self.outputs}: shapes of targets must "
                f"be equal to [B, C] = {shape}, nothing is broadcast."
            )
        return check_values(f[:, ::2], y)

    def predictive_nll(self, prediction: Tensor, variance: Tensor | None, y: Tensor, sigma_noise: Tensor) -> Tensor:
        """−Σ_c log N(y_c; prediction_c, variance_c), `[B]`: of the Gaussian with the moments of y.

        Raises:
            InvalidData: No variance, without which the density is not known.
        """
        if variance is None:
            raise InvalidData(f"a mean was given without a variance; likelihood={self.name!r} needs both.")
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


def exact_places(above: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """Places z within ±40 at which a condition changes, the first and the last, `[2, ...]`, by bisection."""
    grid = column(_FARTHEST, 241, like).expand(-1, *like.shape)
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
