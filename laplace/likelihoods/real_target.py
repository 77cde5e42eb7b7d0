"""Real targets: y = f plus Gaussian noise, under Gaussian latents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from laplace.core import scores
from laplace.core.distributions import mixture_of, normal_of
from laplace.core.gaussian import Gaussian, sample_moments
from laplace.core.random_numbers import another, standard_normal
from laplace.likelihoods.decomposition import Decomposition, of_gaussian
from laplace.likelihoods.outputs import Component, Density, Mixture
from laplace.likelihoods.target import Score, Summary, Target, mean_of, sample_interval, variance_of


class RealTarget(Target):
    """Real numbers with the latents as mean, and noise of variance σ²."""

    kind = "real"
    mean_is_latent = True

    @property
    def scores(self) -> Mapping[str, Score]:
        return {"crps": self.crps, "entropy": self.predictive_entropy}

    def crps(self, likelihood: Density, summary: Summary, y: Tensor, sigma: Tensor) -> Tensor:
        """Continuous ranked probability scores, summed over outputs (Gneiting and Raftery, 2007)."""
        return scores.gaussian_crps(mean_of(summary), _noisy(summary, sigma), y)

    def predictive_entropy(self, likelihood: Density, summary: Summary, y: Tensor, sigma: Tensor) -> Tensor:
        """Differential entropy of outputs by themselves."""
        return scores.gaussian_entropy(_noisy(summary, sigma))

    def decompose(self, rows: Component) -> Decomposition:
        return of_gaussian(rows.per_row, rows.sigma_noise)

    def variance(self, rows: Mixture) -> Tensor:
        return rows.latent_variance + rows.sigma_noise.square()

    def entropy(self, rows: Mixture) -> Tensor:
        return self.mixed_entropy(rows, rows.latent_mean)

    def mixed_entropy(self, rows: Mixture, mean: Tensor) -> Tensor:
        """−Σ_k π_k E_k[log Σ_l π_l N(y; m_l, V_l)] over noisy targets, `[B]`; in closed form of one component."""
        if len(rows.components) == 1:
            return rows.components[0].decomposition.predictive_entropy
        noisy = [component.per_row.plus_noise(component.sigma_noise) for component in rows.components]
        density = mixture_of([_of_rows(gaussian) for gaussian in noisy], rows.weights)
        draws = [g.sample(part.n_samples, part.draws()) for g, part in zip(noisy, rows.components, strict=True)]
        return rows.average([-density.log_prob(draw.to(draws[0])).mean(0) for draw in draws])

    def interval(self, rows: Mixture, level: float, *, observation_noise: bool) -> tuple[Tensor, Tensor]:
        """Interval of y, or of f without noise: Gaussian quantiles, or of samples where f is known by those alone."""
        if rows.sampled:
            return sample_interval(rows.chosen([_samples(c, observation_noise) for c in rows.components]), level)
        noises = [c.sigma_noise.square() if observation_noise else 0.0 for c in rows.components]
        variances = [c.latent_variance + noise for c, noise in zip(rows.components, noises, strict=True)]
        return rows.gaussian_interval(variances, level)

    def distribution(self, rows: Mixture) -> Distribution:
        """Gaussian of noisy targets, or a mixture of those of the components."""
        return mixture_of([normal_of(c.latent.plus_noise(c.sigma_noise)) for c in rows.components], rows.weights)

    def reads_variances(self, likelihood: Density, link: str, *, for_scores: bool = False) -> bool:
        return for_scores

    def by_rows(self, likelihood: Density, link: str) -> bool:
        return True

    def _summary_without_link(self, mean: Tensor, covariance: Tensor, *, for_scores: bool) -> Summary:
        """Mean and (co)variances of f, without noise."""
        return mean, covariance.to(mean.dtype)

    def summary_of_samples(self, likelihood: Density, samples: Tensor, *, for_scores: bool = False) -> Summary:
        return sample_moments(samples)

    def read_by_scores(self, rows: Component) -> Summary:
        variance = rows.latent_variance  # first: the mean alone would take a pass of its own
        return rows.latent_mean, variance

    def at_outputs(self, likelihood: Density, f: Tensor) -> Summary:
        return f, torch.zeros_like(f)

    def moments_of(self, summary: Summary, sigma: Tensor) -> tuple[Tensor, Tensor]:
        return mean_of(summary), _noisy(summary, sigma)


def _noisy(summary: Summary, sigma: Tensor) -> Tensor:
    """Variances of y, `[..., B, C]`."""
    variance, noise = variance_of(summary), sigma.square()
    return noise.expand_as(mean_of(summary)) if variance is None else variance + noise


def _samples(rows: Component, observation_noise: bool) -> Tensor:
    """Samples of y, `[S, B, C]`, or of f without noise."""
    samples = rows.latent_samples
    if not observation_noise:
        return samples
    return samples + rows.sigma_noise * standard_normal(tuple(samples.shape), samples, another(rows.draws()))


def _of_rows(gaussian: Gaussian) -> Distribution:
    """Over the C outputs of each of B rows."""
    normal = normal_of(replace(gaussian, positions=()))
    return Independent(normal, 1) if isinstance(normal, Normal) else normal
