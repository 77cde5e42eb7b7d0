"""Predictive uncertainty in two parts: what more data cannot remove (aleatoric), and what it can (epistemic)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.special import digamma

from laplace.core.gaussian import Gaussian
from laplace.core.precision_policy import exponent_share, widened
from laplace.core.scores import class_entropy
from laplace.errors import CurvatureError
from laplace.likelihoods.points import Points


@dataclass(frozen=True, eq=False)
class Decomposition:
    """Var(y) = E[Var(y | f)] + Var(E[y | f]) over the posterior of f, and the same in entropies.

    The first is equation B.1 of Immer et al. (2021; Kwon et al., 2020), of every output: of the 0/1 indicator of a
    class or label, or of a real target. Variances are in squared units of the target, entropies in nats.

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
        """BALD, the information of y about f, I(y; f), `[B]`: predictive − expected entropy, the epistemic part.

        The score of "Bayesian active learning by disagreement" (Houlsby et al., 2011), never negative.
        """
        return (self.predictive_entropy - self.expected_entropy).clamp(min=0)

    def to(self, dtype: torch.dtype) -> Decomposition:
        """The same in another dtype."""
        return self.map(lambda part: part.to(dtype))

    def map(self, function: Callable[[Tensor], Tensor]) -> Decomposition:
        """A function of every part."""
        return Decomposition(*(function(getattr(self, field.name)) for field in fields(self)))


def of_probabilities(probabilities: Points, entropy: Callable[[Tensor], Tensor]) -> Decomposition:
    """Decomposition of labels, from points of their probabilities p under the posterior.

    Args:
        probabilities: Points `[S, B, C]`.
        entropy: Entropy of labels with probabilities `[..., C]`, `[...]`.
    """
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


def of_gaussian(latent: Gaussian, sigma_noise: Tensor) -> Decomposition:
    """Decomposition of real targets y = f + noise: σ² and the variance of f, and differential entropies.

    With V the covariance of f (of a datum, `[B, C, C]` or `[B, C]`) and N = diag(σ²): H(y) = ½ log det 2πe (V + N),
    E[H(y | f)] = ½ log det 2πe N.

    Raises:
        CurvatureError: V + N is not positive definite.
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
