"""The log evidence as a pure function of a fit and the hyper-parameters (MacKay, 1992; Daxberger et al., 2021).

log p(D) ≈ log p(D | θ*) − ½ (log det P − log det P₀ + (θ̂ − μ₀)ᵀ P₀ (θ̂ − μ₀)),    θ̂ = θ* unless refined or assigned
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from laplace.core.cached import Kept, cached_property
from laplace.core.checks import require
from laplace.core.hyperparameters import GaussianPrior
from laplace.core.inference import kept_for_later
from laplace.core.pieces import operations_are_dear
from laplace.errors import CurvatureError, InvalidArgument, UnsupportedError
from laplace.likelihoods.base import Likelihood
from laplace.structures.fit import Fit
from laplace.structures.precision import Precision


@dataclass(frozen=True, eq=False)
class Evidence:
    """The terms of the log evidence at one setting of the hyper-parameters; each is differentiable in them.

    Attributes:
        fit: What the data say.
        mean: θ̂, `[P]`.
        prior: N(μ₀, P₀⁻¹).
        likelihood: p(y | f).
        kind: Kind of the curvature (`"ggn"`, `"ef"`, `"hessian"`).
        sigma_noise: 0-dim or `[C]`.
        temperature: 0-dim.
        options: Options of the structure's precision.
        kept: Terms that other settings of the prior precision share with this one: a search computes them once.
    """

    fit: Fit
    mean: Tensor
    prior: GaussianPrior
    likelihood: Likelihood
    kind: str
    sigma_noise: Tensor
    temperature: Tensor
    options: dict[str, Any]
    kept: Kept = field(default_factory=Kept)

    @property
    def asked_alone(self) -> Evidence:
        """The same for a call that is no step of a search: on a GPU, without what former calls kept.

        There terms are known again by the identity of the tensors that they were computed of, not by their numbers, so
        that a write through `.data` to one of these would not be seen.
        """
        return replace(self, kept=Kept()) if operations_are_dear(self.prior.precision.device) else self

    def constant(self) -> Evidence:
        """The same at hyper-parameters without a graph."""
        prior = replace(self.prior, precision=self.prior.precision.detach(), mean=self.prior.mean.detach())
        sigma, temperature = self.sigma_noise.detach(), self.temperature.detach()
        return replace(self, prior=prior, sigma_noise=sigma, temperature=temperature)

    @cached_property
    def precision(self) -> Precision:
        """P."""
        with kept_for_later():
            return self.fit.curvature.precision(self.weights, self.prior, **self.options)

    @property
    def weights(self) -> Tensor:
        """Factor of every curvature term, `[E]`.

        Raises:
            InvalidArgument: Neither one noise nor one per output.
            UnsupportedError: The noises differ or need a gradient, but the fit kept no term per output.
        """
        given = (self.fit, self.likelihood, self.kind, self.sigma_noise, self.temperature)
        return self._kept_where_dear("weights", given, self._weights)

    def _kept_where_dear(self, name: str, given: tuple[Any, ...], make: Callable[[], Tensor]) -> Tensor:
        """A term of few numbers: kept where operations are dear, else computed anew, which sees writes by `.data`."""
        dear = operations_are_dear(self.prior.precision.device)
        return self.kept.computed(name, given, make) if dear else make()

    def _weights(self) -> Tensor:
        sigma, terms = self.sigma_noise, self.fit.curvature.n_terms
        if sigma.numel() not in (1, self.fit.n_outputs):
            raise InvalidArgument(
                f"sigma_noise has {sigma.numel()} entries, the network {self.fit.n_outputs} outputs; give one noise, "
                "or one per output."
            )
        if sigma.numel() > 1 and terms == 1:
            # Equal noises are one noise, but the gradient of each would need the curvature of its output.
            if (sigma.requires_grad and torch.is_grad_enabled()) or bool((sigma != sigma[0]).any()):
                raise UnsupportedError(
                    "sigma_noise holds different noises, or noises to differentiate, but the curvature was fitted with "
                    "a scalar one and keeps no term per output. Set sigma_noise to a vector before fit (its ratios "
                    "may change afterwards)."
                )
            sigma = sigma.mean()
        scale = self.likelihood.curvature_scale(self.kind, sigma, self.temperature)
        return scale.expand(terms) if scale.numel() == 1 else scale

    @property
    def _squares(self) -> Tensor:
        """(θ̂ − μ₀)², summed over entries that share a precision; kept, but where every weight has its own."""
        prior = self.prior
        if not prior.is_constant_per_tensor:
            return prior.squares(self.mean)
        is_cheap = prior.mean.numel() == 1 and not operations_are_dear(prior.mean.device)
        given = (self.mean, prior.mean, prior.precision.shape, str(prior.mean.item()) if is_cheap else "")
        return self.kept.computed("squares", given, lambda: prior.squares(self.mean))

    @property
    def effective_prior(self) -> GaussianPrior:
        """The prior that the precision has: a curvature of some of the data may scale it."""
        factor = self.fit.curvature.prior_factor
        return self.prior if factor == 1 else replace(self.prior, precision=factor * self.prior.precision)

    @property
    def log_likelihood(self) -> Tensor:
        """Log p(D | θ*), 0-dim."""
        fit = self.fit
        given = (fit, fit.loss_terms, self.likelihood, self.sigma_noise, self.temperature)
        return self._kept_where_dear(
            "log likelihood",
            given,
            lambda: self.likelihood.log_likelihood(
                fit.loss_terms, fit.curvature.share * fit.n_observed, fit.n_outputs, self.sigma_noise, self.temperature
            ),
        )

    @property
    def log_det_ratio(self) -> Tensor:
        """Log det P − log det P₀, 0-dim."""
        return self.precision.logdet_ratio()

    @property
    def scatter(self) -> Tensor:
        """(θ̂ − μ₀)ᵀ P₀ (θ̂ − μ₀), 0-dim."""
        precision = self.effective_prior.precision
        return precision @ self._squares.to(precision.dtype)

    @property
    def log_marginal_likelihood(self) -> Tensor:
        """Log p(D), 0-dim, in the dtype of the prior; of a variational posterior its lower bound [Redux, eq. 6]."""
        return self.total.to(self.prior.precision.dtype)

    @property
    def total(self) -> Tensor:
        """The same in the widest type of its terms."""
        lost, slack = self.log_det_ratio + self.scatter, self.precision.slack()
        if isinstance(slack, Tensor):
            lost = lost + slack
        return self.log_likelihood.add(lost, alpha=-0.5)


def finite_evidence(value: Tensor) -> Tensor:
    """A log evidence, if it is finite.

    Raises:
        CurvatureError: It is not: some term of it is beyond the range of its dtype.
    """
    require(
        value.isfinite(),
        lambda: CurvatureError(
            f"the log evidence is {value.item():g}: one of its terms is beyond the range of {value.dtype}, by a prior "
            "precision, a prior mean, a noise or outputs that are far out, or by a curvature that is not positive. "
            "Standardise inputs and targets, give hyper-parameters of their size, or take a network in float64."
        ),
    )
    return value
