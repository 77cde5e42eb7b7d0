"""Targets: what a prediction of the outputs f says of y. Every kind of target is a class, and knows its quantities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributions import Distribution

from laplace.enums import LinkApprox
from laplace.errors import UnsupportedError
from laplace.likelihoods.decomposition import Decomposition
from laplace.likelihoods.links import LINKS
from laplace.likelihoods.outputs import Component, Density, Mixture

Summary = Tensor | tuple[Tensor, Tensor]
"""E[y] `[..., B, C]`, or a mean and (co)variances: what losses and scores read of a prediction."""

Score = Callable[[Density, Summary, Tensor, Tensor], Tensor]
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

    def of(self, rows: Mixture) -> Target:
        """The target that these rows have: itself, unless it depends on their number of outputs."""
        return self

    # Of one posterior, and of a mixture.

    def decompose(self, rows: Component) -> Decomposition:
        """Aleatoric and epistemic parts under one posterior."""
        self.refuse("decomposition", rows.likelihood)

    def require_probabilities(self, what: str, rows: Mixture) -> None:
        """Raises where E[y] is no probability.

        Raises:
            UnsupportedError: It is none.
        """
        self.refuse(what, rows.likelihood)

    def variance(self, rows: Mixture) -> Tensor:
        """Var(y), `[B, C]`."""
        self.refuse("variance", rows.likelihood)

    def entropy(self, rows: Mixture) -> Tensor:
        """Entropy of y in nats, `[B]`."""
        self.refuse("entropy", rows.likelihood)

    def mixed_entropy(self, rows: Mixture, mean: Tensor) -> Tensor:
        """Entropy of y under a mixture whose components' parts have this mean, `[B]`."""
        self.refuse("entropy", rows.likelihood)

    def decomposition(self, rows: Mixture) -> Decomposition:
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

    def interval(self, rows: Mixture, level: float, *, observation_noise: bool) -> tuple[Tensor, Tensor]:
        """Lower and upper ends of a central credible interval, `[B, C]` each."""
        self.refuse("interval", rows.likelihood)

    def distribution(self, rows: Mixture) -> Distribution:
        """The predictive distribution of y."""
        self.refuse("distribution", rows.likelihood)

    def probability_distribution(self, rows: Mixture) -> Distribution:
        """The distribution of the probabilities."""
        self.refuse("distribution('probabilities')", rows.likelihood)

    # What losses read.

    def reads_variances(self, likelihood: Density, link: str, *, for_scores: bool = False) -> bool:
        """True if `summary` reads variances of f alone, no covariances between outputs.

        Args:
            likelihood: p(y | f).
            link: A name in `LINKS`.
            for_scores: As of `summary`.
        """
        return LINKS[link].serving(independent=likelihood.independent_outputs)[1]

    def by_rows(self, likelihood: Density, link: str) -> bool:
        """True if `summary` treats rows alike, without random numbers."""
        return link in likelihood.links and link != LinkApprox.MC

    def summary(
        self,
        likelihood: Density,
        mean: Tensor,
        covariance: Tensor,
        link: str,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        *,
        for_scores: bool = False,
    ) -> Summary:
        """Summary of f ~ N(mean, covariance) for losses; arguments are those of `Likelihood.predict`.

        Args:
            likelihood: p(y | f).
            mean: `[B, C]`.
            covariance: `[B, C, C]`, or variances `[B, C]`.
            link: A name in `LINKS`.
            n_samples: Samples of a link that draws.
            generator: Their source.
            for_scores: True for what `scores` read, False for what users' losses do, which is what `la(x)` shows.
        """
        known = self._summary_without_link(mean, covariance, for_scores=for_scores)
        return likelihood.predict(mean, covariance, link, n_samples, generator) if known is None else known

    def _summary_without_link(self, mean: Tensor, covariance: Tensor, *, for_scores: bool) -> Summary | None:
        """The same where no link is needed; None where one is. The arguments are those of `summary`."""
        return None

    def summary_of_samples(self, likelihood: Density, samples: Tensor, *, for_scores: bool = False) -> Summary:
        """The same of samples of f, `[S, B, C]`."""
        return likelihood.inverse_link(samples).mean(0)

    # What comparisons of a network with its posterior read.

    def read_by_scores(self, rows: Component) -> Summary:
        """Summary of a prediction of f for `scores`."""
        return rows.mean

    def at_outputs(self, likelihood: Density, f: Tensor) -> Summary:
        """Summary of outputs f `[B, C]` that are known, for `scores`: of p(y | f) itself."""
        return likelihood.inverse_link(f)

    def decisions(self, summary: Summary, y: Tensor) -> tuple[Tensor, Tensor] | None:
        """Confidence in the predicted labels, and 1 where they are right, `[B, L]` each; None of what is no label."""
        return None

    def moments_of(self, summary: Summary, sigma: Tensor) -> tuple[Tensor, Tensor] | None:
        """E[y] and Var(y) in a summary for `scores`, `[B, C]` each; None of targets that are no numbers."""
        return None

    def refuse(self, what: str, likelihood: Density) -> NoReturn:
        """Raises where a quantity has no meaning.

        Raises:
            UnsupportedError: Always.
        """
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
    """Central quantiles of samples `[S, B, C]`, `[B, C]` each.

    Args:
        samples: The samples.
        level: Share between the ends.
        outward: End at samples, so that counts end at counts, instead of between them.
    """
    low, high = 0.5 - 0.5 * level, 0.5 + 0.5 * level
    if outward:
        ordered, last = samples.sort(0).values, len(samples) - 1
        return ordered[math.floor(low * last)], ordered[math.ceil(high * last)]
    lower, upper = torch.quantile(samples, samples.new_tensor([low, high]), dim=0).unbind(0)
    return lower, upper
