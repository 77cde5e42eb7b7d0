"""The outputs of B rows under a mixture of posteriors, of which a single posterior is a mixture of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace.core.gaussian import Gaussian
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.target import Target
from laplace.predictive.lazy import lazy
from laplace.predictive.mixing import average, mixed_moments, quantile
from laplace.predictive.posterior_outputs import PosteriorOutputs, PredictionOptions

Choice = Callable[[], Tensor]
"""The component of every sample, `[S]`; the same at every call."""


@dataclass(frozen=True, eq=False)
class MixedOutputs:
    """Outputs of B rows under Σ_k π_k p_k (Eschenhagen et al., 2021, equation 9); what was computed is kept.

    Moments are those of the mixture, by the law of total variance, and so is `latent`; quantiles are those of the
    mixture itself, not of a Gaussian with its moments.

    Attributes:
        components: Outputs under each of them, of the same options and likelihood.
        weights: π, `[K]`.
        choice: The component that each sample is of.
    """

    components: tuple[PosteriorOutputs, ...]
    weights: Tensor
    choice: Choice

    @classmethod
    def of(cls, outputs: PosteriorOutputs) -> MixedOutputs:
        """Outputs under one posterior."""
        return cls((outputs,), torch.ones(1), lambda: torch.zeros(outputs.n_samples, dtype=torch.long))

    @property
    def options(self) -> PredictionOptions:
        """Of all components."""
        return self.components[0].options

    @property
    def likelihood(self) -> Likelihood:
        """Of all components."""
        return self.components[0].likelihood

    @property
    def target(self) -> Target:
        """The target of the likelihood, of these rows."""
        return self.likelihood.target.of(self)

    @property
    def create_graph(self) -> bool:
        """True if results can be differentiated, with respect to hyper-parameters or the inputs."""
        return any(part.create_graph for part in self.components)

    @property
    def positions(self) -> tuple[int, ...]:
        """Dimensions of the positions, empty for outputs `[B, C]`."""
        return self.components[0].positions

    @property
    def sampled(self) -> bool:
        """True if the latents of a component are known by samples alone."""
        return any(part.sampled for part in self.components)

    def draws(self) -> torch.Generator | None:
        """A source of randomness, in the same state at every call; None for the global one."""
        return self.components[0].draws()

    @lazy
    def sigma_noise(self) -> Tensor:
        """√Σ_k π_k σ_k², 0-dim or `[C]`: σ, where the components have one in common."""
        sigmas = [part.sigma_noise for part in self.components]
        return sigmas[0] if len(sigmas) == 1 else self.average([sigma.square() for sigma in sigmas]).sqrt()

    @lazy
    def latent_mean(self) -> Tensor:
        """`[B, C]`."""
        return self.average([part.latent_mean for part in self.components])

    @lazy
    def latent(self) -> Gaussian:
        """The Gaussian with the mixture's moments."""
        gaussians = [part.latent for part in self.components]
        if len(gaussians) == 1:
            return gaussians[0]
        joint = self.options.form == "joint"
        means = [gaussian.mean.flatten() if joint else gaussian.mean for gaussian in gaussians]
        mean, covariance = self.moments(means, [gaussian.covariance for gaussian in gaussians])
        return replace(gaussians[0], mean=mean.view_as(gaussians[0].mean), covariance=covariance)

    @lazy
    def latent_variance(self) -> Tensor:
        """`[B, C]`."""
        variances = [part.latent_variance for part in self.components]
        if len(variances) == 1:
            return variances[0]
        return self.moments([part.latent_mean for part in self.components], variances)[1]

    @lazy
    def latent_samples(self) -> Tensor:
        """`[S, B, C]`, each of a component by its weight."""
        return self.chosen([part.latent_samples for part in self.components])

    @lazy
    def mean(self) -> Tensor:
        """E[y], `[B, C]`."""
        return self.average([part.mean for part in self.components])

    @lazy
    def mean_samples(self) -> Tensor:
        """Samples of E[y | f], `[S, B, C]`, each of a component by its weight."""
        return self.chosen([part.mean_samples for part in self.components])

    # Mixing.

    def average(self, values: Sequence[Tensor]) -> Tensor:
        """Σ_k π_k v_k."""
        return values[0] if len(values) == 1 else average(values, self.weights)

    def moments(self, means: Sequence[Tensor], variances: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Mean and (co)variance of the mixture, in the components' shapes."""
        return mixed_moments(list(zip(means, variances, strict=True)), self.weights)

    def chosen(self, samples: Sequence[Tensor]) -> Tensor:
        """Samples `[S, …]`: the s-th one of the component that was chosen for it."""
        if len(samples) == 1:
            return samples[0]
        stacked = _together(samples)
        return stacked[self.choice().to(stacked.device), torch.arange(stacked.shape[1], device=stacked.device)]

    def gaussian_interval(self, variances: Sequence[Tensor], level: float) -> tuple[Tensor, Tensor]:
        """Central quantiles of the mixture of Gaussians with the latents' means and these variances, `[B, C]` each."""
        if len(variances) == 1:
            half = variances[0].clamp(min=0).sqrt() * torch.erfinv(variances[0].new_tensor(level)) * 2**0.5
            return self.latent_mean - half, self.latent_mean + half
        means, spread = _together([part.latent_mean for part in self.components]), _together(variances)
        lower, upper = (quantile(means, spread, self.weights, 0.5 + half) for half in (-0.5 * level, 0.5 * level))
        return lower, upper


def _together(values: Sequence[Tensor]) -> Tensor:
    """Of all components, `[K, …]`, on the device of the first."""
    return torch.stack([value.to(values[0]) for value in values])
