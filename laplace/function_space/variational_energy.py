"""Objective of a variational posterior: α-energies of the data and its distance from the prior.

An α-energy of a datum is −(1/α) log E_q[p(y | f)^α] (Hernández-Lobato et al., 2016, "Black-box α-divergence
minimization"): at α → 0 the expected negative log likelihood, with which the objective is the negative evidence lower
bound, and at α = 1 the negative log predictive density.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from laplace.core.argument_checks import check_counts
from laplace.core.gaussian import Gaussian
from laplace.enums import LinkApprox
from laplace.errors import InvalidArgument
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.target import mean_of, variance_of
from laplace.tuning.scores import find_score


@dataclass(frozen=True)
class Energy:
    """(1/α) log E_q[p(y | f)^α] of every datum, in closed form, by the probit approximation or by samples.

    Attributes:
        likelihood: p(y | f).
        alpha: α.
        n_samples: Samples of a likelihood without noise; 0 for the probit approximation at α = 1.

    Raises:
        InvalidArgument: α is negative or infinite, or there are no samples for it.
    """

    likelihood: Likelihood
    alpha: float
    n_samples: int

    def __post_init__(self) -> None:
        if isinstance(self.alpha, bool) or not 0 <= self.alpha < math.inf:
            raise InvalidArgument(f"alpha={self.alpha}; it must be at least 0 and finite.")
        check_counts(0, mc_softmax_samples=self.n_samples)
        if not self.likelihood.has_noise and self.alpha != 1 and self.n_samples == 0:
            raise InvalidArgument(
                f"alpha={self.alpha} with likelihood={self.likelihood.name!r}: the probit approximation is of alpha=1; "
                "give mc_softmax_samples=, the number of samples, for another alpha."
            )

    @property
    def form(self) -> str:
        """Form of the covariance that is read: `"diagonal"` or `"full"`."""
        if self.likelihood.has_noise:
            return "diagonal"
        return "full" if self.n_samples or not self._reads_variances else "diagonal"

    @property
    def _reads_variances(self) -> bool:
        return self.likelihood.target.reads_variances(self.likelihood, LinkApprox.PROBIT)

    def log_terms(
        self, latent: Gaussian, y: Tensor, sigma_noise: Tensor, temperature: Tensor, generator: torch.Generator
    ) -> Tensor:
        """The terms of B data, `[B]`; differentiable in the latent and the noise.

        Args:
            latent: q(f) of the data, its covariance as `form` says.
            y: Checked targets.
            sigma_noise: σ, 0-dim or `[C]`.
            temperature: T, which divides the terms but not the normaliser of a noise, as in the evidence: energies of
                order αT of p(y | f)^(1/T).
            generator: Source of the samples.
        """
        if self.likelihood.has_noise:
            return self._gaussian(latent, y, sigma_noise.square(), temperature)
        if self.n_samples == 0:
            summary = self.likelihood.target.summary(
                self.likelihood, latent.mean, latent.covariance, LinkApprox.PROBIT, for_scores=True
            )
            return -find_score("nll", self.likelihood)(self.likelihood, summary, y, sigma_noise) / temperature
        return self._sampled(latent, y, sigma_noise, generator) / temperature

    def _gaussian(self, latent: Gaussian, y: Tensor, noise: Tensor, temperature: Tensor) -> Tensor:
        """The energy in closed form; every output is a likelihood term of its own."""
        residual, variance = (y - latent.mean).square(), latent.covariance
        if self.alpha == 0:
            data = (residual + variance) / noise
        else:
            spread = self.alpha * variance
            data = residual / (noise + spread) + (spread / noise).log1p() / self.alpha
        return -0.5 * (data / temperature + (2 * math.pi * noise).log()).sum(1)

    def _sampled(self, latent: Gaussian, y: Tensor, sigma_noise: Tensor, generator: torch.Generator) -> Tensor:
        samples = latent.sample(self.n_samples, generator)
        repeated = y.repeat(self.n_samples, *[1] * (y.ndim - 1))
        summary = self.likelihood.target.summary_of_samples(self.likelihood, samples.flatten(0, 1).unsqueeze(0))
        means, variances = mean_of(summary), variance_of(summary)
        logs = -self.likelihood.predictive_nll(means, variances, repeated, sigma_noise).view(self.n_samples, -1)
        if self.alpha == 0:
            return logs.mean(0)
        return ((self.alpha * logs).logsumexp(0) - math.log(self.n_samples)) / self.alpha


def divergence(gram: Tensor, prior_precision: Tensor, distance: Tensor) -> Tensor:
    """KL(q ‖ p) between N(θ*, (δ + Aᵀ A)⁻¹) and N(μ₀, δ⁻¹), 0-dim, differentiable.

    ½ (log det(I + G/δ) − tr((δ + G)⁻¹ G) + δ |θ* − μ₀|²) with G = A Aᵀ.

    Args:
        gram: G, `[M, M]`.
        prior_precision: δ, 0-dim.
        distance: |θ* − μ₀|², 0-dim.
    """
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    root = torch.linalg.cholesky(eye + gram / prior_precision)
    logdet = 2 * root.diagonal().log().sum()
    # tr((δ + G)⁻¹ G) = M − tr((I + G/δ)⁻¹) would cancel where G is small.
    ratio = torch.cholesky_solve(gram / prior_precision, root).trace()
    return 0.5 * (logdet - ratio + prior_precision * distance)
