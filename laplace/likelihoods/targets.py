"""Targets: what a prediction of the outputs f says of y. Every kind of target is a class, and knows its quantities.

Expectations by points stand first, then the two parts of predictive uncertainty, then the targets.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Generator, Tensor
from torch.distributions import Bernoulli, Categorical, Dirichlet, Distribution, Independent, MixtureSameFamily, Normal
from torch.special import digamma

from laplace.core import scores
from laplace.core.gaussian import GaussianOutputs, mixture_of, normal_of, sample_moments
from laplace.core.positions import unrolled
from laplace.core.precision_policy import exponent_share, wide_dtype, widened
from laplace.core.random_numbers import another, global_numbers, standard_normal
from laplace.core.scores import class_entropy
from laplace.enums import LinkApprox
from laplace.errors import CurvatureError, UnsupportedError
from laplace.likelihoods.links import LINKS

if TYPE_CHECKING:
    from laplace.likelihoods.base import Likelihood
    from laplace.predictive.prediction import PosteriorOutputs, Prediction


# Expectations over a distribution by points: its samples, or the nodes of a quadrature.


_REACH = 9.0
_NODES = 361
"""Nodes of the trapezoidal rule over ±9 standard deviations: as exact as float64 for smooth functions."""


@dataclass(frozen=True, eq=False)
class Points:
    """Points with weights, in place of a distribution.

    Attributes:
        values: `[S, ...]`.
        weights: `[S]`, or `[S, ...]` where every entry has its own, sum 1; None where all points weigh alike, as
            samples do.
    """

    values: Tensor
    weights: Tensor | None = None

    @classmethod
    def of_gaussian(cls, mean: Tensor, variance: Tensor, further_below: Tensor | None = None) -> Points:
        """Nodes for expectations of functions that act on every entry of f ~ N(mean, variance) alone, in float64.

        The trapezoidal rule converges exponentially for smooth functions (Trefethen and Weideman, 2014); for one that
        changes within 1/k of a standard deviation (a sigmoid under a variance of k²) the error is below 1e-8 up to
        k = 20 and below 1e-3 beyond. For functions that grow as f falls, nodes reach `further_below` (in deviations).
        """
        deviation = widened(variance).clamp(min=0).sqrt()
        columns = column(_REACH, _NODES, mean)
        if further_below is None:
            return cls(widened(mean) + columns * deviation, torch.softmax(-0.5 * columns.flatten().square(), 0))
        columns = columns - further_below * (_REACH - columns) / (2 * _REACH)
        return cls(widened(mean) + columns * deviation, torch.softmax(-0.5 * columns.square(), 0))

    def map(self, function: Callable[[Tensor], Tensor]) -> Points:
        """Points of a function of what these are points of."""
        return Points(function(self.values), self.weights)

    def mean(self, function: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """E[function], or the mean of the points themselves."""
        values = self.values if function is None else function(self.values)
        if self.weights is None:
            return values.mean(0)
        return torch.tensordot(self.weights, values, 1) if self.weights.ndim == 1 else (self.weights * values).sum(0)


def stretched(mode: Tensor, width: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes around the mode of an integrand, and the logarithms of the steps between them, `[S, ...]` each.

    In mode + width · sinh(a t) / a equidistant t are close where the integrand is narrow, and come to about 9
    deviations on either side. The map is smooth, so that the trapezoidal rule converges exponentially. The integrand
    falls over a distance `width` at its mode, and over `deviation`, at least as large, elsewhere.
    """
    ratio = (2 * deviation / width).log()
    stretch = (ratio + ratio.log1p() + 0.3) / _REACH  # sinh(9a) / 9a is about deviation / width
    t = column(_REACH, _NODES, mode)
    steps = (2 * _REACH / (_NODES - 1)) * width * (stretch * t).cosh()
    return mode + width * (stretch * t).sinh() / stretch, steps.log()


def column(reach: float, n: int, like: Tensor) -> Tensor:
    """Equidistant numbers from −reach to reach, `[n, 1, ...]`, that broadcast with a tensor, on its device."""
    line = torch.linspace(-reach, reach, n, dtype=wide_dtype(like.device), device=like.device)
    return line.view(-1, *(1,) * like.ndim)


# Predictive uncertainty in two parts: what more data cannot remove (aleatoric), and what it can (epistemic).


@dataclass(frozen=True, eq=False)
class Decomposition:
    """Var(y) = E[Var(y | f)] + Var(E[y | f]) over the posterior of f, and the same in entropies.

    The first is [Linearization, eq. B.1] (Kwon et al., 2020), of every output: of the 0/1 indicator of a class or
    label, or of a real target. Variances are in squared units of the target, entropies in nats.

    Attributes:
        aleatoric: E[Var(y | f)], `[B, C]`.
        epistemic: Var(E[y | f]), `[B, C]`.
        predictive_entropy: Entropy of the predictive distribution p(y), `[B]`; of real targets the differential
            entropy, of labels that are independent given f the sum of their entropies.
        expected_entropy: Mean of the entropy of p(y | f), `[B]`: the aleatoric part of the former.
        mean: E[y], `[B, C]`, by the same expectation.
    """

    aleatoric: Tensor
    epistemic: Tensor
    predictive_entropy: Tensor
    expected_entropy: Tensor
    mean: Tensor

    @property
    def total(self) -> Tensor:
        """Variance of y, `[B, C]`: aleatoric + epistemic."""
        return self.aleatoric + self.epistemic

    @property
    def mutual_information(self) -> Tensor:
        """Mutual information I(y; f), `[B]`: predictive − expected entropy, the epistemic part, never negative.

        It is the score of Bayesian active learning by disagreement, BALD (Houlsby et al., 2011).
        """
        return (self.predictive_entropy - self.expected_entropy).clamp(min=0)

    def to(self, dtype: torch.dtype) -> Decomposition:
        """The same in another dtype."""
        return self.map(lambda part: part.to(dtype))

    def map(self, function: Callable[[Tensor], Tensor]) -> Decomposition:
        """A function of every part."""
        return Decomposition(*(function(getattr(self, field.name)) for field in fields(self)))


def of_probabilities(probabilities: Points, entropy: Callable[[Tensor], Tensor]) -> Decomposition:
    """Decomposition of labels, from points of their probabilities p under the posterior."""
    mean = probabilities.mean()
    return Decomposition(
        probabilities.mean(lambda p: p * (1 - p)),
        probabilities.mean(lambda p: (p - mean).square()),
        entropy(mean),
        probabilities.mean(entropy),
        mean,
    )


def of_dirichlet(log_concentrations: Tensor, dtype: torch.dtype) -> Decomposition:
    """Decomposition of one label with probabilities p ~ Dirichlet(α), from log α `[B, C]`, in closed form, in a dtype.

    With A = Σ α and m = α / A: E[p (1 − p)] = m (1 − m) A / (A + 1), Var(p) = m (1 − m) / (A + 1), and
    E[H(p)] = Σ_k m_k (ψ(A + 1) − ψ(α_k + 1)).
    """
    alpha = bounded(log_concentrations)
    total = alpha.sum(1, keepdim=True)
    mean = torch.softmax(widened(log_concentrations), 1)
    variance = mean * (1 - mean)
    expected = (mean * (digamma(total + 1) - digamma(alpha + 1))).sum(1)
    aleatoric, epistemic = variance * total / (total + 1), variance / (total + 1)
    return Decomposition(aleatoric, epistemic, class_entropy(mean), expected, mean).to(dtype)


def of_gaussian(latent: GaussianOutputs, sigma_noise: Tensor) -> Decomposition:
    """Decomposition of real targets y = f + noise: σ² and the variance of f, and differential entropies.

    With V the covariance of f (of a datum, `[B, C, C]` or `[B, C]`) and N = diag(σ²): H(y) = ½ log det 2πe (V + N),
    E[H(y | f)] = ½ log det 2πe N.
    """
    epistemic = latent.variance.to(latent.mean)
    noise = sigma_noise.square().expand(latent.mean.shape[1])
    constant = latent.mean.shape[1] * math.log(2 * math.pi * math.e)
    if latent.is_diagonal:
        logdet = (epistemic + noise).log().sum(1)
    else:
        root, info = torch.linalg.cholesky_ex(widened(latent.covariance) + torch.diag(noise))
        if bool((info != 0).any()):
            raise CurvatureError("the predictive covariance is not positive definite: look at the prior precision.")
        logdet = 2 * root.diagonal(dim1=1, dim2=2).log().sum(1).to(epistemic)
    expected = 0.5 * (constant + noise.log().sum()).expand(len(latent.mean))
    return Decomposition(noise.expand_as(epistemic), epistemic, 0.5 * (constant + logdet), expected, latent.mean)


def bounded(log_concentrations: Tensor) -> Tensor:
    """α from log α, float64, kept within what its sums and gamma functions can hold."""
    wide = widened(log_concentrations)
    limit = 650 * exponent_share(wide.dtype)
    return wide.clamp(-limit, limit).exp()


Summary = Tensor | tuple[Tensor, Tensor]
"""E[y] `[..., B, C]`, or a mean and (co)variances: what losses and scores read of a prediction."""

Score = Callable[["Likelihood", Summary, Tensor, Tensor], Tensor]
"""`(likelihood, summary, y, sigma) -> [..., B]`, a score of every datum."""


class Target:
    """Quantities and scores of y in a prediction. One that has no meaning is refused, as all of them are here.

    Quantities of a posterior are those of a mixture of one component.

    Attributes:
        kind: Name of the kind, for messages.
        subject: Name of what is predicted, for messages; None for that of the likelihood.
        mean_is_latent: True if E[y] = E[f], so that no link is needed.
        labels_vary: True if data with one label alone are no sample of the targets.
    """

    kind: str = "other"
    subject: str | None = None
    mean_is_latent: bool = False
    labels_vary: bool = False

    @property
    def scores(self) -> Mapping[str, Score]:
        """Scores of predictions by name, besides the negative log likelihood, which every target has."""
        return {}

    def with_outputs(self, rows: Prediction) -> Target:
        """The target that these rows have: itself, unless it depends on their number of outputs."""
        return self

    # Of one posterior, and of a mixture.

    def decompose(self, rows: PosteriorOutputs) -> Decomposition:
        """Aleatoric and epistemic parts under one posterior."""
        self.refuse("decomposition", rows.likelihood)

    def moments_under(self, latent: GaussianOutputs, likelihood: Likelihood) -> TargetMoments:
        """Moments of y, of targets whose prediction they are."""
        self.refuse("target_moments", likelihood)

    def require_probabilities(self, what: str, rows: Prediction) -> None:
        """Raises where E[y] is no probability."""
        self.refuse(what, rows.likelihood)

    def variance(self, rows: Prediction) -> Tensor:
        """Var(y), `[B, C]`."""
        self.refuse("variance", rows.likelihood)

    def entropy(self, rows: Prediction) -> Tensor:
        """Entropy of y in nats, `[B]`."""
        self.refuse("entropy", rows.likelihood)

    def mixed_entropy(self, rows: Prediction, mean: Tensor) -> Tensor:
        """Entropy of y under a mixture whose components' parts have this mean, `[B]`."""
        self.refuse("entropy", rows.likelihood)

    def decomposition(self, rows: Prediction) -> Decomposition:
        """Parts within the components, and what they disagree by, which is epistemic.

        E[Var(y | f)] = Σ_k π_k E_k[Var(y | f)],  Var(E[y | f]) = Σ_k π_k (Var_k(E[y | f]) + (m_k − m)²).
        """
        parts = [component.decomposition for component in rows.components]
        if len(parts) == 1:
            return parts[0]
        mean, epistemic = rows.moments([part.mean for part in parts], [part.epistemic for part in parts])
        return Decomposition(
            rows.average([part.aleatoric for part in parts]),
            epistemic,
            self.mixed_entropy(rows, mean),
            rows.average([part.expected_entropy for part in parts]),
            mean,
        )

    def interval(self, rows: Prediction, level: float, *, observation_noise: bool) -> tuple[Tensor, Tensor]:
        """Lower and upper ends of a central credible interval, `[B, C]` each."""
        self.refuse("interval", rows.likelihood)

    def distribution(self, rows: Prediction) -> Distribution:
        """The predictive distribution of y."""
        self.refuse("distribution", rows.likelihood)

    def probability_distribution(self, rows: Prediction) -> Distribution:
        """The distribution of the probabilities."""
        self.refuse("distribution('probabilities')", rows.likelihood)

    # What losses read.

    def reads_variances(self, likelihood: Likelihood, link: str, *, for_scores: bool = False) -> bool:
        """True if `summary` reads variances of f alone, no covariances between outputs."""
        return LINKS[link].serving(independent=likelihood.independent_outputs)[1]

    def centred_link(self, likelihood: Likelihood, link: str) -> str | None:
        """The link of f − mean f that this one is, of which variances of f − mean f are enough; None of other links."""
        of_all = link in likelihood.links and not likelihood.independent_outputs
        return LINKS[link].centred if of_all else None

    def by_rows(self, likelihood: Likelihood, link: str) -> bool:
        """True if `summary` treats rows alike, without random numbers."""
        return link in likelihood.links and link != LinkApprox.MC

    def summary(
        self, likelihood: Likelihood, mean: Tensor, covariance: Tensor, link: str, n_samples: int = 100,
        generator: Generator | None = None, *, for_scores: bool = False,
    ) -> Summary:  # fmt: skip
        """Summary of f ~ N(mean, covariance): for users' losses what `la(x)` shows, or what `scores` read."""
        known = self._summary_without_link(mean, covariance, for_scores=for_scores)
        return likelihood.predict(mean, covariance, link, n_samples, generator) if known is None else known

    def _summary_without_link(self, mean: Tensor, covariance: Tensor, *, for_scores: bool) -> Summary | None:
        """The same where no link is needed; None where one is. The arguments are those of `summary`."""
        return None

    def summary_of_samples(self, likelihood: Likelihood, samples: Tensor, *, for_scores: bool = False) -> Summary:
        """The same of samples of f, `[S, B, C]`."""
        return likelihood.inverse_link(samples).mean(0)

    # What comparisons of a network with its posterior read.

    def read_by_scores(self, rows: PosteriorOutputs) -> Summary:
        """Summary of a prediction of f for `scores`."""
        return rows.mean

    def at_outputs(self, likelihood: Likelihood, f: Tensor) -> Summary:
        """Summary of outputs f `[B, C]` that are known, for `scores`: of p(y | f) itself."""
        return likelihood.inverse_link(f)

    def decisions(self, summary: Summary, y: Tensor) -> tuple[Tensor, Tensor] | None:
        """Confidence in the predicted labels, and 1 where they are right, `[B, L]` each; None of what is no label."""
        return None

    def moments_of(self, summary: Summary, sigma: Tensor) -> tuple[Tensor, Tensor] | None:
        """E[y] and Var(y) in a summary for `scores`, `[B, C]` each; None of targets that are no numbers."""
        return None

    def chance(self, n_outputs: int) -> float | None:
        """Negative log likelihood of a guess that knows nothing of the labels; None of what is no label."""
        return None

    def below(self, summary: Summary, y: Tensor, sigma: Tensor) -> Tensor | None:
        """P(Y ≤ y) of every target, `[B, C]`, float64: of Gaussians with these moments; None of what is no number."""
        moments = self.moments_of(summary, sigma)
        if moments is None:
            return None
        mean, variance = map(widened, moments)
        return torch.special.ndtr((widened(y) - mean) / variance.sqrt())

    def refuse(self, what: str, likelihood: Likelihood) -> NoReturn:
        """Raises where a quantity has no meaning."""
        given = self.subject or f"likelihood={likelihood.name!r} (target_kind={self.kind!r})"
        raise UnsupportedError(
            f"{what} has no meaning for {given}; mean, latent_mean, latent_covariance and latent_samples always have "
            "one."
        )


def mean_of(summary: Summary) -> Tensor:
    """The mean in a summary, `[..., B, C]`."""
    return summary[0] if isinstance(summary, tuple) else summary


def variance_of(summary: Summary) -> Tensor | None:
    """The variances in a summary, `[..., B, C]`; None if it has none."""
    if not isinstance(summary, tuple):
        return None
    mean, variance = summary
    return variance.diagonal(dim1=-2, dim2=-1) if variance.ndim > mean.ndim else variance


def sample_interval(samples: Tensor, level: float, *, outward: bool = False) -> tuple[Tensor, Tensor]:
    """Central quantiles of samples `[S, B, C]`, `[B, C]` each; `outward` ends at samples, of counts at counts."""
    low, high = 0.5 - 0.5 * level, 0.5 + 0.5 * level
    if outward:
        ordered, last = samples.sort(0).values, len(samples) - 1
        return ordered[math.floor(low * last)], ordered[math.ceil(high * last)]
    lower, upper = torch.quantile(samples, samples.new_tensor([low, high]), dim=0).unbind(0)
    return lower, upper


# Labels: one of C classes, or C labels that are independent given f. Their mean, a probability, is all there is.


N_BINS = 15
"""Bins of the calibration error, as in `laplace.metrics.expected_calibration_error`."""


class LabelTarget(Target):
    """Labels, whose predictive distribution is their probabilities."""

    labels_vary = True

    @abstractmethod
    def entropy_of(self, probabilities: Tensor) -> Tensor:
        """Entropy of labels with probabilities `[..., C]`, `[...]`."""

    def require_probabilities(self, what: str, rows: Prediction) -> None:
        """Their mean is one."""

    def variance(self, rows: Prediction) -> Tensor:
        """P (1 − p), of an indicator."""
        return rows.mean * (1 - rows.mean)

    def entropy(self, rows: Prediction) -> Tensor:
        return self.entropy_of(rows.mean)

    def mixed_entropy(self, rows: Prediction, mean: Tensor) -> Tensor:
        return self.entropy_of(mean)

    def decompose(self, rows: PosteriorOutputs) -> Decomposition:
        return of_probabilities(Points(rows.mean_samples), self.entropy_of)

    def interval(self, rows: Prediction, level: float, *, observation_noise: bool) -> tuple[Tensor, Tensor]:
        """Interval of the probabilities: quantiles of their samples."""
        return sample_interval(rows.mean_samples, level)

    def probability_distribution(self, rows: Prediction) -> Distribution:
        """Dirichlet of the link, or a mixture of those of the components."""
        logs = [component.log_concentrations for component in rows.components]
        dirichlets = [Dirichlet(unrolled(bounded(log), rows.positions)) for log in logs if log is not None]
        if len(dirichlets) < len(logs):
            raise UnsupportedError(
                f"there is no distribution of the probabilities for likelihood={rows.likelihood.name!r} with "
                f"link_approx={rows.options.link!r}; classification with pred_type='glm' has a Dirichlet with "
                "link_approx='bridge' or 'bridge_norm', and probability_samples otherwise."
            )
        return mixture_of(dirichlets, rows.weights)


class ClassTarget(LabelTarget):
    """One label per row, of C classes, or their probabilities."""

    kind = "class"

    @property
    def scores(self) -> Mapping[str, Score]:
        """`"ece"` gives gaps between accuracy and confidence, `[..., B, M]`, whose sums make the calibration error."""
        return {
            "brier": lambda likelihood, p, y, _: scores.class_brier(mean_of(p), y, likelihood.ignore_index),
            "confidence": lambda _likelihood, p, *_: scores.class_confidence(mean_of(p)),
            "entropy": lambda _likelihood, p, *_: scores.class_entropy(mean_of(p)),
            "ece": lambda _likelihood, p, y, _: scores.binned_gaps(mean_of(p), y, N_BINS),
        }

    def chance(self, n_outputs: int) -> float:
        """Log C."""
        return math.log(n_outputs)

    def decisions(self, summary: Summary, y: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the most probable class, `[B, 1]`."""
        confidence, predicted = mean_of(summary).max(-1, keepdim=True)
        return confidence, scores.class_agreement(predicted.squeeze(-1), y).to(confidence).unsqueeze(-1)

    def entropy_of(self, probabilities: Tensor) -> Tensor:
        return scores.class_entropy(probabilities)

    def decompose(self, rows: PosteriorOutputs) -> Decomposition:
        """In closed form where the link has a Dirichlet, else over samples."""
        if rows.log_concentrations is not None:
            return of_dirichlet(rows.log_concentrations, rows.latent_mean.dtype)
        return super().decompose(rows)

    def distribution(self, rows: Prediction) -> Distribution:
        return Categorical(probs=unrolled(rows.mean, rows.positions))


class BinaryTarget(LabelTarget):
    """C labels per row, each 0 or 1, independent given f."""

    kind = "binary"

    @property
    def scores(self) -> Mapping[str, Score]:
        return {
            "brier": lambda _likelihood, p, y, _: scores.binary_brier(mean_of(p), y),
            "confidence": lambda _likelihood, p, *_: scores.binary_confidence(mean_of(p)),
            "entropy": lambda _likelihood, p, *_: scores.binary_entropy(mean_of(p)),
        }

    def chance(self, n_outputs: int) -> float:
        """C log 2."""
        return n_outputs * math.log(2)

    def decisions(self, summary: Summary, y: Tensor) -> tuple[Tensor, Tensor]:
        """Those of every label, `[B, C]`; of a probability of ½ each label is right as often as the other."""
        probabilities = mean_of(summary)
        share = torch.where(probabilities > 0.5, 1.0, torch.where(probabilities < 0.5, 0.0, 0.5)).to(probabilities)
        return torch.maximum(probabilities, 1 - probabilities), share * y + (1 - share) * (1 - y)

    def entropy_of(self, probabilities: Tensor) -> Tensor:
        return scores.binary_entropy(probabilities)

    def decompose(self, rows: PosteriorOutputs) -> Decomposition:
        """Decomposition by quadrature where f is Gaussian: nothing is drawn."""
        if rows.sampled:
            return super().decompose(rows)
        latent = rows.marginals
        points = Points.of_gaussian(latent.mean, latent.covariance).map(rows.likelihood.inverse_link)
        return of_probabilities(points, self.entropy_of).to(latent.mean.dtype)

    def interval(self, rows: Prediction, level: float, *, observation_noise: bool) -> tuple[Tensor, Tensor]:
        """Interval of the probabilities: the sigmoid carries quantiles of f over."""
        if rows.sampled:
            return super().interval(rows, level, observation_noise=observation_noise)
        ends = rows.gaussian_interval([component.latent_variance for component in rows.components], level)
        return rows.likelihood.inverse_link(ends[0]), rows.likelihood.inverse_link(ends[1])

    def distribution(self, rows: Prediction) -> Distribution:
        return Bernoulli(probs=unrolled(rows.mean, rows.positions).clamp(0, 1))


# Real targets: y = f plus Gaussian noise, under Gaussian latents.


class RealTarget(Target):
    """Real numbers with the latents as mean, and noise of variance σ²."""

    kind = "real"
    mean_is_latent = True

    @property
    def scores(self) -> Mapping[str, Score]:
        """CRPS summed over outputs (Gneiting and Raftery, 2007), and the entropy of outputs by themselves."""
        return {
            "crps": lambda _, f, y, sigma: scores.gaussian_crps(mean_of(f), _noisy(f, sigma), y),
            "entropy": lambda _likelihood, f, _, sigma: scores.gaussian_entropy(_noisy(f, sigma)),
        }

    def decompose(self, rows: PosteriorOutputs) -> Decomposition:
        return of_gaussian(rows.per_row, rows.sigma_noise)

    def variance(self, rows: Prediction) -> Tensor:
        return rows.latent_variance + rows.sigma_noise.square()

    def entropy(self, rows: Prediction) -> Tensor:
        return self.mixed_entropy(rows, rows.latent_mean)

    def mixed_entropy(self, rows: Prediction, mean: Tensor) -> Tensor:
        """−Σ_k π_k E_k[log Σ_l π_l N(y; m_l, V_l)] over noisy targets, `[B]`; in closed form of one component."""
        if len(rows.components) == 1:
            return rows.components[0].decomposition.predictive_entropy
        noisy = [component.per_row.plus_noise(component.sigma_noise) for component in rows.components]
        density = mixture_of([_of_rows(gaussian) for gaussian in noisy], rows.weights)
        draws = [g.sample(part.options.n_samples, part.draws()) for g, part in zip(noisy, rows.components, strict=True)]
        return rows.average([-density.log_prob(draw.to(draws[0])).mean(0) for draw in draws])

    def interval(self, rows: Prediction, level: float, *, observation_noise: bool) -> tuple[Tensor, Tensor]:
        """Interval of y, or of f without noise: Gaussian quantiles, or of samples where f is known by those alone."""
        if rows.sampled:
            return sample_interval(rows.chosen([_samples(c, observation_noise) for c in rows.components]), level)
        noises = [c.sigma_noise.square() if observation_noise else 0.0 for c in rows.components]
        variances = [c.latent_variance + noise for c, noise in zip(rows.components, noises, strict=True)]
        return rows.gaussian_interval(variances, level)

    def distribution(self, rows: Prediction) -> Distribution:
        """Gaussian of noisy targets, or a mixture of those of the components."""
        return mixture_of([normal_of(c.latent.plus_noise(c.sigma_noise)) for c in rows.components], rows.weights)

    def reads_variances(self, likelihood: Likelihood, link: str, *, for_scores: bool = False) -> bool:
        return for_scores

    def by_rows(self, likelihood: Likelihood, link: str) -> bool:
        return True

    def _summary_without_link(self, mean: Tensor, covariance: Tensor, *, for_scores: bool) -> Summary:
        """Mean and (co)variances of f, without noise."""
        return mean, covariance.to(mean.dtype)

    def summary_of_samples(self, likelihood: Likelihood, samples: Tensor, *, for_scores: bool = False) -> Summary:
        return sample_moments(samples)

    def read_by_scores(self, rows: PosteriorOutputs) -> Summary:
        variance = rows.latent_variance  # first: the mean alone would take a pass of its own
        return rows.latent_mean, variance

    def at_outputs(self, likelihood: Likelihood, f: Tensor) -> Summary:
        return f, torch.zeros_like(f)

    def moments_of(self, summary: Summary, sigma: Tensor) -> tuple[Tensor, Tensor]:
        return mean_of(summary), _noisy(summary, sigma)


def _noisy(summary: Summary, sigma: Tensor) -> Tensor:
    """Variances of y, `[..., B, C]`."""
    variance, noise = variance_of(summary), sigma.square()
    return noise.expand_as(mean_of(summary)) if variance is None else variance + noise


def _samples(rows: PosteriorOutputs, observation_noise: bool) -> Tensor:
    """Samples of y, `[S, B, C]`, or of f without noise."""
    samples = rows.latent_samples
    if not observation_noise:
        return samples
    return samples + rows.sigma_noise * standard_normal(tuple(samples.shape), samples, another(rows.draws()))


def _of_rows(gaussian: GaussianOutputs) -> Distribution:
    """Over the C outputs of each of B rows."""
    normal = normal_of(replace(gaussian, positions=()))
    return Independent(normal, 1) if isinstance(normal, Normal) else normal


# The target of a likelihood that says no more: everything follows from samples of f and of y given f.


class SampledTarget(Target):
    """y by samples: one of p(y | f) for every sample of f.

    p(y | f) is `Likelihood.conditional`, which an error names where it is not written. Entropies are means over samples
    of y of log p(y), which is a mean over all samples of f: their time grows with the square of the number of samples.
    """

    def variance(self, rows: Prediction) -> Tensor:
        """E[Var(y | f)] + Var(E[y | f])."""
        return _expected_variance(rows) + rows.mean_samples.var(0, correction=0)

    def entropy(self, rows: Prediction) -> Tensor:
        return self.mixed_entropy(rows, rows.mean)

    def mixed_entropy(self, rows: PosteriorOutputs | Prediction, mean: Tensor) -> Tensor:
        """−E[log p(y)] over samples of y, with p(y) the mean of p(y | f) over the samples of f."""
        conditional, y = rows.likelihood.conditional(rows.latent_samples), target_samples(rows)
        logs = torch.stack([conditional.log_prob(one.expand_as(y)).logsumexp(0) for one in y])
        return math.log(len(y)) - logs.mean(0)

    def decompose(self, rows: PosteriorOutputs) -> Decomposition:
        mean = rows.mean_samples.mean(0)
        epistemic = rows.mean_samples.var(0, correction=0)
        expected = -rows.likelihood.conditional(rows.latent_samples).log_prob(target_samples(rows)).mean(0)
        return Decomposition(_expected_variance(rows), epistemic, self.mixed_entropy(rows, mean), expected, mean)

    def interval(self, rows: Prediction, level: float, *, observation_noise: bool) -> tuple[Tensor, Tensor]:
        """Interval of y, or of E[y | f] without noise: quantiles of samples."""
        if not observation_noise:
            return sample_interval(rows.mean_samples, level)
        return sample_interval(target_samples(rows), level, outward=True)

    def distribution(self, rows: Prediction) -> Distribution:
        """The mixture of p(y | f) over the samples of f."""
        f = unrolled(rows.latent_samples.movedim(0, -2), rows.positions)
        conditional = rows.likelihood.conditional(f)
        return MixtureSameFamily(Categorical(logits=f.new_zeros(conditional.batch_shape)), conditional)


def target_samples(rows: PosteriorOutputs | Prediction) -> Tensor:
    """Samples of y, one for every sample of f, `[S, B, C]`."""
    conditional = rows.likelihood.conditional(rows.latent_samples)
    with global_numbers(another(rows.draws())):
        return conditional.sample()


def _expected_variance(rows: PosteriorOutputs | Prediction) -> Tensor:
    """E[Var(y | f)] over the samples of f, `[B, C]`."""
    conditional = rows.likelihood.conditional(rows.latent_samples)
    with global_numbers(another(rows.draws())):
        return conditional.variance.mean(0)


# Targets whose mean and variance under Gaussian outputs are known; a prediction is both of them.


@dataclass(frozen=True, eq=False)
class TargetMoments:
    """Moments of y over the posterior of f, `[B, C]` each.

    Attributes:
        mean: E[y].
        aleatoric: E[Var(y | f)].
        epistemic: Var(E[y | f]).
    """

    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor

    @property
    def variance(self) -> Tensor:
        """Var(y)."""
        return self.aleatoric + self.epistemic

    def to(self, dtype: torch.dtype) -> TargetMoments:
        """The same in another dtype."""
        return TargetMoments(self.mean.to(dtype), self.aleatoric.to(dtype), self.epistemic.to(dtype))


@dataclass(frozen=True)
class MomentTarget(SampledTarget):
    """y with known moments; entropies, intervals and distributions are by samples.

    Attributes:
        moments: Of means `[B, C]` and covariances `[B, C, C]`, or variances `[B, C]`, of f.
        kind: Name of the kind, for messages.
        variances_only: True if no covariance between outputs is read.
    """

    moments: Callable[[Tensor, Tensor], TargetMoments]
    kind: str
    variances_only: bool = False

    def variance(self, rows: Prediction) -> Tensor:
        """Variance by the law of total variance, over f and over the components."""
        if rows.sampled:
            return super().variance(rows)
        parts = [component.target_moments for component in rows.components]
        if len(parts) == 1:
            return parts[0].variance
        return rows.moments([part.mean for part in parts], [part.variance for part in parts])[1]

    def decompose(self, rows: PosteriorOutputs) -> Decomposition:
        by_samples = super().decompose(rows)
        if rows.sampled:
            return by_samples
        known = rows.target_moments
        return replace(by_samples, aleatoric=known.aleatoric, epistemic=known.epistemic, mean=known.mean)

    def moments_under(self, latent: GaussianOutputs, likelihood: Likelihood) -> TargetMoments:
        return self.moments(latent.mean, latent.covariance).to(latent.mean.dtype)

    def reads_variances(self, likelihood: Likelihood, link: str, *, for_scores: bool = False) -> bool:
        return self.variances_only

    def by_rows(self, likelihood: Likelihood, link: str) -> bool:
        return True

    def _summary_without_link(self, mean: Tensor, covariance: Tensor, *, for_scores: bool) -> tuple[Tensor, Tensor]:
        """E[y] and Var(y)."""
        known = self.moments(mean, covariance)
        return known.mean.to(mean), known.variance.to(mean)

    def summary_of_samples(self, likelihood: Likelihood, samples: Tensor, *, for_scores: bool = False) -> Summary:
        conditional = likelihood.conditional(samples)
        means = conditional.mean
        return means.mean(0), conditional.variance.mean(0) + means.var(0, correction=0)

    def read_by_scores(self, rows: PosteriorOutputs) -> Summary:
        if rows.sampled:
            return self.summary_of_samples(rows.likelihood, rows.latent_samples, for_scores=True)
        latent = rows.link_input
        return self._summary_without_link(latent.mean, latent.covariance, for_scores=True)

    def at_outputs(self, likelihood: Likelihood, f: Tensor) -> Summary:
        return self._summary_without_link(f, torch.diag_embed(torch.zeros_like(f)), for_scores=True)

    def moments_of(self, summary: Summary, sigma: Tensor) -> tuple[Tensor, Tensor] | None:
        return self.target_moments(*summary) if isinstance(summary, tuple) else None

    def target_moments(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """E[y] and Var(y): what is given, or what latents with covariances `[B, C, C]` lead to."""
        if covariance.ndim == mean.ndim:
            return mean, covariance
        return self._summary_without_link(mean, covariance, for_scores=False)


TARGETS: dict[str, Target] = {
    target.kind: target for target in (ClassTarget(), BinaryTarget(), RealTarget(), SampledTarget())
}
"""Targets by kind."""
