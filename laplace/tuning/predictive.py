"""The predictions that settings are compared by, and what a loss reads of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laplace.core.random_numbers import drawn_seed
from laplace.enums import LinkApprox, PredType
from laplace.jacobian.jacobian import Jacobian
from laplace.likelihoods.base import Likelihood
from laplace.posterior.posterior import Posterior
from laplace.predictive.options import check_options
from laplace.structures.base import Precision
from laplace.tuning.scores import Prediction


@dataclass(frozen=True)
class Predictive:
    """The kind of prediction that a validation loss evaluates.

    Attributes:
        pred_type: `"glm"` or `"nn"`.
        link_approx: Link approximation of classification.
        n_samples: Number of Monte-Carlo samples.
        generator: Random generator; every setting sees the same random numbers. None for seed 0.
    """

    pred_type: str = "glm"
    link_approx: str = "probit"
    n_samples: int = 100
    generator: torch.Generator | None = None

    def kind(self, posterior: Posterior) -> PredType:
        """The predictive, linearised or sampled, after its names were checked for a posterior.

        Raises:
            InvalidArgument: Unknown predictive or link, or no samples.
        """
        return check_options(self.pred_type, self.link_approx, self.n_samples, None, posterior.choices.pred_types)

    def summaries(self, likelihood: Likelihood, device: torch.device, *, for_scores: bool) -> Summaries:
        """Summaries with a seed of their own, the next one of the generator.

        Args:
            likelihood: p(y | f).
            device: Where seed 0 is drawn from without a generator.
            for_scores: As of `Target.summary`.
        """
        seeded = self.generator is not None
        generator = self.generator if seeded else torch.Generator(device=device).manual_seed(0)
        return Summaries(likelihood, self, drawn_seed(generator), for_scores)


@dataclass(frozen=True)
class Summaries:
    """Summaries of outputs f as losses read them; whatever is drawn is drawn from the same seed for every setting.

    Attributes:
        likelihood: p(y | f).
        predictive: Link and samples.
        seed: Of random numbers.
        for_scores: As of `Target.summary`.
    """

    likelihood: Likelihood
    predictive: Predictive
    seed: int
    for_scores: bool

    @property
    def diagonal(self) -> bool:
        """True if variances of f are read alone, no covariances between outputs."""
        target, link = self.likelihood.target, self.predictive.link_approx
        return target.reads_variances(self.likelihood, link, for_scores=self.for_scores)

    def contraction(self, precision: Precision) -> Callable[[Jacobian], Tensor]:
        """Variances `[B, C]` or covariances `[B, C, C]` of f, by its Jacobian."""
        return precision.functional_diagonal if self.diagonal else precision.functional_variance

    def read(self, jacobian: Jacobian) -> Jacobian:
        """A Jacobian whose covariances are summed in float64 where samples are drawn from them."""
        return replace(jacobian, wide=self.predictive.link_approx == LinkApprox.MC)

    def draws(self, device: torch.device) -> torch.Generator:
        """The source of randomness, in the same state at every call."""
        return torch.Generator(device=device).manual_seed(self.seed)

    def of_gaussian(self, mean: Tensor, variance: Tensor) -> Prediction:
        """Summary of f with mean `[B, C]` and variances `[B, C]` or covariances `[B, C, C]`."""
        return self.likelihood.target.summary(
            self.likelihood, mean, variance, self.predictive.link_approx, self.predictive.n_samples,
            self.draws(mean.device), for_scores=self.for_scores,
        )  # fmt: skip

    def of_samples(self, samples: Tensor) -> Prediction:
        """Summary of samples of f, `[S, B, C]`."""
        return self.likelihood.target.summary_of_samples(self.likelihood, samples, for_scores=self.for_scores)
