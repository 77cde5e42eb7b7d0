"""Targets whose mean and variance under Gaussian outputs are known; a prediction is both of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.likelihoods.base import NoiseFreeLikelihood
from laplace.likelihoods.decomposition import Decomposition
from laplace.likelihoods.outputs import Component, Density, Mixture
from laplace.likelihoods.sampled_target import SampledTarget
from laplace.likelihoods.target import Summary, mean_of


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

    def variance(self, rows: Mixture) -> Tensor:
        """Variance by the law of total variance, over f and over the components."""
        if rows.sampled:
            return super().variance(rows)
        parts = [self._of(component) for component in rows.components]
        if len(parts) == 1:
            return parts[0].variance
        return rows.moments([part.mean for part in parts], [part.variance for part in parts])[1]

    def decompose(self, rows: Component) -> Decomposition:
        by_samples = super().decompose(rows)
        if rows.sampled:
            return by_samples
        known = self._of(rows)
        return Decomposition(
            known.aleatoric,
            known.epistemic,
            by_samples.predictive_entropy,
            by_samples.expected_entropy,
            known.mean,
        )

    def reads_variances(self, likelihood: Density, link: str, *, for_scores: bool = False) -> bool:
        return self.variances_only

    def by_rows(self, likelihood: Density, link: str) -> bool:
        return True

    def _summary_without_link(self, mean: Tensor, covariance: Tensor, *, for_scores: bool) -> Summary:
        """E[y] and Var(y)."""
        known = self.moments(mean, covariance)
        return known.mean.to(mean), known.variance.to(mean)

    def summary_of_samples(self, likelihood: Density, samples: Tensor, *, for_scores: bool = False) -> Summary:
        conditional = likelihood.conditional(samples)
        means = conditional.mean
        return means.mean(0), conditional.variance.mean(0) + means.var(0, correction=0)

    def read_by_scores(self, rows: Component) -> Summary:
        if rows.sampled:
            return self.summary_of_samples(rows.likelihood, rows.latent_samples, for_scores=True)
        latent = rows.link_input
        return self._summary_without_link(latent.mean, latent.covariance, for_scores=True)

    def at_outputs(self, likelihood: Density, f: Tensor) -> Summary:
        return self._summary_without_link(f, torch.diag_embed(torch.zeros_like(f)), for_scores=True)

    def moments_of(self, summary: Summary, sigma: Tensor) -> tuple[Tensor, Tensor] | None:
        """Moments of y, or those that latents with covariances `[B, C, C]` lead to."""
        if not isinstance(summary, tuple):
            return None
        mean, covariance = summary
        if covariance.ndim == mean.ndim:
            return mean, covariance
        known = self.moments(mean, covariance)
        return known.mean.to(mean), known.variance.to(mean)

    def _of(self, rows: Component) -> TargetMoments:
        latent = rows.link_input
        return self.moments(latent.mean, latent.covariance).to(latent.mean.dtype)


class MomentLikelihood(NoiseFreeLikelihood):
    """A likelihood whose target is a `MomentTarget`: `la(x)` is (E[y], Var(y)), whatever the link."""

    moment_prediction = True
    numeric_targets = True

    @property
    def links(self) -> tuple[str, ...]:
        """None: moments need no link."""
        return ()

    def predict(
        self,
        mean: Tensor,
        covariance: Tensor,
        link: str,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """E[y], `[B, C]`, whatever the link."""
        return mean_of(self.target.summary(self, mean, covariance, link, n_samples, generator))
