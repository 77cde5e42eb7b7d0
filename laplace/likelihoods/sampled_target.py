"""The target of a likelihood that says no more: everything follows from samples of f and of y given f."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, MixtureSameFamily

from laplace.core.positions import unrolled
from laplace.core.random_numbers import another, global_numbers
from laplace.likelihoods.decomposition import Decomposition
from laplace.likelihoods.outputs import Component, Mixture, Outputs
from laplace.likelihoods.target import Target, sample_interval


class SampledTarget(Target):
    """y by samples: one of p(y | f) for every sample of f.

    p(y | f) is `Likelihood.conditional`, which an error names where it is not written. Entropies are means over samples
    of y of log p(y), which is a mean over all samples of f: their time grows with the square of the number of samples.
    """

    def variance(self, rows: Mixture) -> Tensor:
        """E[Var(y | f)] + Var(E[y | f])."""
        return _expected_variance(rows) + rows.mean_samples.var(0, correction=0)

    def entropy(self, rows: Mixture) -> Tensor:
        return self.mixed_entropy(rows, rows.mean)

    def mixed_entropy(self, rows: Outputs, mean: Tensor) -> Tensor:
        """−E[log p(y)] over samples of y, with p(y) the mean of p(y | f) over the samples of f."""
        conditional, y = rows.likelihood.conditional(rows.latent_samples), target_samples(rows)
        logs = torch.stack([conditional.log_prob(one.expand_as(y)).logsumexp(0) for one in y])
        return math.log(len(y)) - logs.mean(0)

    def decompose(self, rows: Component) -> Decomposition:
        mean = rows.mean_samples.mean(0)
        epistemic = rows.mean_samples.var(0, correction=0)
        expected = -rows.likelihood.conditional(rows.latent_samples).log_prob(target_samples(rows)).mean(0)
        return Decomposition(_expected_variance(rows), epistemic, self.mixed_entropy(rows, mean), expected, mean)

    def interval(self, rows: Mixture, level: float, *, observation_noise: bool) -> tuple[Tensor, Tensor]:
        """Interval of y, or of E[y | f] without noise: quantiles of samples."""
        if not observation_noise:
            return sample_interval(rows.mean_samples, level)
        return sample_interval(target_samples(rows), level, outward=True)

    def distribution(self, rows: Mixture) -> Distribution:
        """The mixture of p(y | f) over the samples of f."""
        f = unrolled(rows.latent_samples.movedim(0, -2), rows.positions)
        conditional = rows.likelihood.conditional(f)
        return MixtureSameFamily(Categorical(logits=f.new_zeros(conditional.batch_shape)), conditional)


def target_samples(rows: Outputs) -> Tensor:
    """Samples of y, one for every sample of f, `[S, B, C]`."""
    conditional = rows.likelihood.conditional(rows.latent_samples)
    with global_numbers(another(rows.draws())):
        return conditional.sample()


def _expected_variance(rows: Outputs) -> Tensor:
    """E[Var(y | f)] over the samples of f, `[B, C]`."""
    conditional = rows.likelihood.conditional(rows.latent_samples)
    with global_numbers(another(rows.draws())):
        return conditional.variance.mean(0)
