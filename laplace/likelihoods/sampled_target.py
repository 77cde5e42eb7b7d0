"""The target of a likelihood that says no more: everything follows from samples of f and of y given f."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, MixtureSameFamily

from laplace.core.positions import unrolled
from laplace.core.random_numbers import another
from laplace.likelihoods.decomposition import Decomposition
from laplace.likelihoods.outputs import Component, Mixture, Outputs
from laplace.likelihoods.target import Target, sample_interval


class SampledTarget(Target):
    """y by samples: one of p(y | f) for every sample of f.

    What is read of p(y | f) are `Likelihood.sample_targets`, `target_variance` and `log_density`, which follow from
    `Likelihood.conditional`; one that is not written is named by an error.
    """

    def variance(self, rows: Mixture) -> Tensor:
        """E[Var(y | f)] + Var(E[y | f]) over samples."""
        aleatoric = rows.likelihood.target_variance(rows.latent_samples, another(rows.draws()))
        return aleatoric.mean(0) + rows.mean_samples.var(0, correction=0)

    def entropy(self, rows: Mixture) -> Tensor:
        return self.mixed_entropy(rows, rows.mean)

    def mixed_entropy(self, rows: Outputs, mean: Tensor) -> Tensor:
        """−E[log p(y)] over samples of y, with p(y) the mean of p(y | f) over the samples of f."""
        f, y = rows.latent_samples, target_samples(rows)
        densities = torch.stack([_log_mean(rows.likelihood.log_density(f, one.expand_as(y))) for one in y])
        return -densities.mean(0)

    def decompose(self, rows: Component) -> Decomposition:
        f, means = rows.latent_samples, rows.mean_samples
        aleatoric = rows.likelihood.target_variance(f, another(rows.draws())).mean(0)
        expected = -rows.likelihood.log_density(f, target_samples(rows)).mean(0)
        mean = means.mean(0)
        return Decomposition(aleatoric, (means - mean).square().mean(0), self.mixed_entropy(rows, mean), expected, mean)

    def interval(self, rows: Mixture, level: float, *, observation_noise: bool) -> tuple[Tensor, Tensor]:
        """Of y, or of E[y | f] without noise: quantiles of samples."""
        return sample_interval(target_samples(rows) if observation_noise else rows.mean_samples, level)

    def distribution(self, rows: Mixture) -> Distribution:
        """The mixture of p(y | f) over the samples of f."""
        f = unrolled(rows.latent_samples.movedim(0, -2), rows.positions)
        conditional = rows.likelihood.conditional(f)
        logits = f.new_zeros(conditional.batch_shape)
        return MixtureSameFamily(Categorical(logits=logits), conditional)


def target_samples(rows: Outputs) -> Tensor:
    """Samples of y, one for every sample of f, `[S, B, C]`."""
    return rows.likelihood.sample_targets(rows.latent_samples, another(rows.draws()))


def _log_mean(logs: Tensor) -> Tensor:
    """Log (1/S) Σ_s exp l_s of `[S, B]`, `[B]`."""
    return logs.logsumexp(0) - math.log(len(logs))
