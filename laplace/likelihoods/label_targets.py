"""Labels: one of C classes, or C labels that are independent given f. Their mean, a probability, is all there is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Dirichlet, Distribution

from laplace.core import scores
from laplace.core.distributions import mixture_of
from laplace.core.positions import unrolled
from laplace.errors import UnsupportedError
from laplace.likelihoods.decomposition import Decomposition, bounded, of_dirichlet, of_probabilities
from laplace.likelihoods.outputs import Component, Density, Mixture
from laplace.likelihoods.points import Points
from laplace.likelihoods.target import Score, Summary, Target, mean_of, sample_interval

N_BINS = 15
"""Bins of the calibration error, as in `laplace.metrics.expected_calibration_error`."""


class LabelTarget(Target):
    """Labels, whose predictive distribution is their probabilities."""

    labels_vary = True

    @property
    def scores(self) -> Mapping[str, Score]:
        return {"brier": self.brier, "confidence": self.confidence, "entropy": self.predictive_entropy}

    @abstractmethod
    def brier(self, likelihood: Density, summary: Summary, y: Tensor, sigma: Tensor) -> Tensor:
        """Squared distance between probabilities and labels."""

    @abstractmethod
    def confidence(self, likelihood: Density, summary: Summary, y: Tensor, sigma: Tensor) -> Tensor:
        """Probability of the most probable label."""

    def predictive_entropy(self, likelihood: Density, summary: Summary, y: Tensor, sigma: Tensor) -> Tensor:
        """Entropy of the labels."""
        return self.entropy_of(mean_of(summary))

    @abstractmethod
    def entropy_of(self, probabilities: Tensor) -> Tensor:
        """Entropy of labels with probabilities `[..., C]`, `[...]`."""

    def require_probabilities(self, what: str, rows: Mixture) -> None:
        """Their mean is one."""

    def variance(self, rows: Mixture) -> Tensor:
        """P (1 − p), of an indicator."""
        return rows.mean * (1 - rows.mean)

    def entropy(self, rows: Mixture) -> Tensor:
        return self.entropy_of(rows.mean)

    def mixed_entropy(self, rows: Mixture, mean: Tensor) -> Tensor:
        return self.entropy_of(mean)

    def decompose(self, rows: Component) -> Decomposition:
        return of_probabilities(Points(rows.mean_samples), self.entropy_of)

    def interval(self, rows: Mixture, level: float, *, observation_noise: bool) -> tuple[Tensor, Tensor]:
        """Interval of the probabilities: quantiles of their samples."""
        return sample_interval(rows.mean_samples, level)

    def probability_distribution(self, rows: Mixture) -> Distribution:
        """Dirichlet of the link, or a mixture of those of the components.

        Raises:
            UnsupportedError: The link has none.
        """
        logs = [component.log_concentrations for component in rows.components]
        dirichlets = [Dirichlet(unrolled(bounded(log), rows.positions)) for log in logs if log is not None]
        if len(dirichlets) < len(logs):
            raise UnsupportedError(
                f"there is no distribution of the probabilities for likelihood={rows.likelihood.name!r} with "
                f"link_approx={rows.components[0].link!r}; classification with pred_type='glm' has a Dirichlet with "
                "link_approx='bridge' or 'bridge_norm', and probability_samples otherwise."
            )
        return mixture_of(dirichlets, rows.weights)


class ClassTarget(LabelTarget):
    """One label per row, of C classes, or their probabilities."""

    kind = "class"

    @property
    def scores(self) -> Mapping[str, Score]:
        return {**super().scores, "ece": self.binned_gaps}

    def brier(self, likelihood: Density, summary: Summary, y: Tensor, sigma: Tensor) -> Tensor:
        return scores.class_brier(mean_of(summary), y, likelihood.ignore_index)

    def confidence(self, likelihood: Density, summary: Summary, y: Tensor, sigma: Tensor) -> Tensor:
        return scores.class_confidence(mean_of(summary))

    def binned_gaps(self, likelihood: Density, summary: Summary, y: Tensor, sigma: Tensor) -> Tensor:
        """Gaps between accuracy and confidence, `[..., B, M]`, whose sums over the data make the calibration error."""
        return scores.binned_gaps(mean_of(summary), y, N_BINS)

    def decisions(self, summary: Summary, y: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the most probable class, `[B, 1]`."""
        confidence, predicted = mean_of(summary).max(-1, keepdim=True)
        return confidence, scores.class_agreement(predicted.squeeze(-1), y).to(confidence).unsqueeze(-1)

    def entropy_of(self, probabilities: Tensor) -> Tensor:
        return scores.class_entropy(probabilities)

    def decompose(self, rows: Component) -> Decomposition:
        """In closed form where the link has a Dirichlet, else over samples."""
        if rows.log_concentrations is not None:
            return of_dirichlet(rows.log_concentrations, rows.latent_mean.dtype)
        return super().decompose(rows)

    def distribution(self, rows: Mixture) -> Distribution:
        return Categorical(probs=unrolled(rows.mean, rows.positions))


class BinaryTarget(LabelTarget):
    """C labels per row, each 0 or 1, independent given f."""

    kind = "binary"

    def brier(self, likelihood: Density, summary: Summary, y: Tensor, sigma: Tensor) -> Tensor:
        return scores.binary_brier(mean_of(summary), y)

    def confidence(self, likelihood: Density, summary: Summary, y: Tensor, sigma: Tensor) -> Tensor:
        return scores.binary_confidence(mean_of(summary))

    def decisions(self, summary: Summary, y: Tensor) -> tuple[Tensor, Tensor]:
        """Those of every label, `[B, C]`; of a probability of ½ each label is right as often as the other."""
        probabilities = mean_of(summary)
        share = torch.where(probabilities > 0.5, 1.0, torch.where(probabilities < 0.5, 0.0, 0.5)).to(probabilities)
        return torch.maximum(probabilities, 1 - probabilities), share * y + (1 - share) * (1 - y)

    def entropy_of(self, probabilities: Tensor) -> Tensor:
        return scores.binary_entropy(probabilities)

    def decompose(self, rows: Component) -> Decomposition:
        """Decomposition by quadrature where f is Gaussian: nothing is drawn."""
        if rows.sampled:
            return super().decompose(rows)
        latent = rows.marginals
        points = Points.of_gaussian(latent.mean, latent.covariance).map(rows.likelihood.inverse_link)
        return of_probabilities(points, self.entropy_of).to(latent.mean.dtype)

    def interval(self, rows: Mixture, level: float, *, observation_noise: bool) -> tuple[Tensor, Tensor]:
        """Interval of the probabilities: the sigmoid carries quantiles of f over."""
        if rows.sampled:
            return super().interval(rows, level, observation_noise=observation_noise)
        ends = rows.gaussian_interval([component.latent_variance for component in rows.components], level)
        return rows.likelihood.inverse_link(ends[0]), rows.likelihood.inverse_link(ends[1])

    def distribution(self, rows: Mixture) -> Distribution:
        return Bernoulli(probs=unrolled(rows.mean, rows.positions).clamp(0, 1))
