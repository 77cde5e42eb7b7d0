"""The Gaussian posterior over weights, θ ~ N(θ*, P⁻¹): its evidence and its moments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laplace import fitting
from laplace.core.arguments import checked
from laplace.core.overrides import COVARIANCES, HYPERPARAMETERS, MOMENTS, is_overridden
from laplace.core.prior import GaussianPrior
from laplace.errors import ApproximationWarning, InvalidArgument, UnsupportedError, warn
from laplace.evidence import Evidence
from laplace.fitting import ReadOptions, planning
from laplace.fitting.planning import FitPlan
from laplace.network.model_guard import own_mode, own_precision, same_random_state
from laplace.posterior import first_outputs, overridden
from laplace.posterior.weight_fit import WeightFit
from laplace.refinement.refine import refine
from laplace.refinement.refiner import RefineOptions
from laplace.refinement.result import Refinement
from laplace.structures.base import Precision


class WeightPosterior(WeightFit):
    """What is known of the weights; `ParametricLaplace` adds predictions, tuning and state.

    The arguments are those of `BaseLaplace`.
    """

    # Before and after a fit.

    @checked
    def plan(self, train_loader: Iterable[Any]) -> FitPlan:
        """Predicts memory and time of `fit` and of a prediction from the first batch; nothing is fitted or drawn.

        Where the last layer is not known yet, it is found, as `fit` would.

        Args:
            train_loader: What `fit` would be given; one batch of it is read.

        Raises:
            InvalidArgument: A loader that can be read only once: a fit would miss that batch.
            InvalidData: No data that count.
            UnsupportedError: A user's own backend or structure, which does not say what it takes.
        """
        with own_mode(), torch.no_grad(), same_random_state(self.weights.model):
            n_batches = planning.length(train_loader)
            device = self.prior_precision.device
            x, y = planning.first_counted(
                train_loader, self.dict_key_y, device, self.likelihood_object, self.weights.model
            )
            problem = first_outputs.problem_of(self, x, y)
            survey = self._fitting_engine(problem, go_on=False).survey(x, y)
        return planning.make_plan(survey, problem, self.structure, self.structure_options, n_batches)

    @checked
    def forget(self, loader: Iterable[Any], progress_bar: bool = False, *, weight: float = 1.0) -> None:
        """Removes the contribution of data from the fit: their curvature, their loss and their number.

        The curvature is then that of a fit without them. The mean stays, for it is the network's weights, which were
        trained with the data; without all data the posterior is a Gaussian around them with the prior's precision.

        Args:
            loader: Batches of data that were fitted, at the weights that the network still has.
            progress_bar: Show one.
            weight: How often the data count in the fit: 1, or `decay**k` for data that faded in k later fits.

        Raises:
            NotFittedError: Before `fit`.
            ModelChangedError: The weights are not those of the fit any more, at which the curvature was computed.
            InvalidData: More data than the fit has seen, or data that cannot be used.
            CurvatureError: The curvature would be indefinite: these data were not fitted.
            UnsupportedError: The structure is no sum over data, or its curvature is a random sample. After every error
                the former posterior is kept.
        """
        former = self.unrefined()
        fitting.check_weight(weight)
        if self.backend_kwargs.get("stochastic"):
            raise UnsupportedError(
                "backend_kwargs has stochastic=True: other targets would be drawn than those of the fit, and the "
                "difference would be no curvature of the data that are left. Use the exact GGN, or fit them anew."
            )
        self.check_unchanged()
        removed, _ = self.measured(loader, ReadOptions(self.dict_key_y, progress_bar, check_memory=True))
        with own_mode(), torch.no_grad():
            left = former.minus(removed.scaled(weight), signed=self.backend_cls.kind == "hessian")
            self._fit, self._posterior, self._refinement = left, None, None

    # What was found.

    @property
    def mean(self) -> Tensor:
        """θ*, `[P]`; the prior's mean before `fit`, θ̂ after `refine`."""
        if self._refinement is not None:
            return self._refinement.mean
        return self._prior_mean if self._mean is None else self._mean

    @property
    def expansion_point(self) -> Tensor:
        """θ*, the network's weights at `fit`, around which predictions are linearised, `[P]`.

        Raises:
            NotFittedError: Before `fit`.
        """
        self.unrefined()
        return self.mean if self._mean is None else self._mean

    @property
    def refined_step(self) -> Tensor | None:
        """θ̂ − θ*, `[P]`, of a refined posterior; None of others."""
        return None if self._refinement is None else self._refinement.mean - self.expansion_point

    @property
    def refinement(self) -> Refinement | None:
        """How `refine` ended; None without one, and after a fit that followed."""
        return self._refinement

    @checked
    def refine(
        self,
        loader: Iterable[Any],
        method: str = "map",
        *,
        max_steps: int = 100,
        tolerance: float | None = None,
        n_samples: int = 200,
        generator: torch.Generator | None = None,
        progress_bar: bool = False,
    ) -> Refinement:
        """Inference in the linearised model f(x, θ*) + J (θ − θ*), at the present hyper-parameters, and takes it over.

        The network's weights are its mode only where training converged; `"map"` finds the mode (a convex problem) and
        the curvature there, in the posterior's structure. `"variational"` finds the Gaussian that maximises the
        evidence lower bound, with a full or a diagonal covariance (Immer et al., 2021, appendices A.3.2 and B.3).
        Afterwards predictions of `pred_type="glm"` have the mean f(x, θ*) + J (θ̂ − θ*); the evidence is
        log p(D | f_lin(θ̂)) − ½ (log det P − log det P₀ + (θ̂ − μ₀)ᵀ P₀ (θ̂ − μ₀)). A fit that follows removes it.

        Args:
            loader: All data of the fit; they are read once and held.
            method: `"map"` or `"variational"`.
            max_steps: Newton steps, or updates of the variational covariance.
            tolerance: Distance from the mode in posterior standard deviations, or relative change of the bound; None
                for what the precision of the numbers allows.
            n_samples: Points of the expectations of softmax likelihoods (others take quadrature).
            generator: Source of those points; None for seed 0.
            progress_bar: Show one.

        Returns:
            How it ended, `la.refinement`.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: An unknown method, or options that are not accepted.
            InvalidData: Other data than those of the fit.
            UnsupportedError: A backend other than the GGN of this library, or a structure without a variational form.
                After every error the former posterior is kept.

        Warns:
            ApproximationWarning: It did not converge.
        """
        options = RefineOptions(max_steps, tolerance, n_samples, generator, progress_bar)
        with own_mode(), torch.no_grad(), same_random_state(self.weights.model):
            found = refine(self, loader, method, options)
        if not found.converged:
            warn(
                f"{found!r}: give more max_steps, or a larger tolerance than this precision of numbers allows.",
                ApproximationWarning,
            )
        self._refinement, self._posterior = found, None
        return found

    @property
    def loss(self) -> float | Tensor:
        """Summed unit negative log likelihood of the data, 0-dim; the number 0 before `fit`."""
        return 0.0 if self._fit is None else self.fitted().loss_terms.sum()

    @property
    def n_data(self) -> float:
        """Data seen that count, a sum of weights where some faded; 0 before `fit`."""
        return 0 if self._fit is None else self._fit.n_data

    @property
    def n_outputs(self) -> int:
        """C; 0 before `fit`."""
        return 0 if self._fit is None else self._fit.n_outputs

    @property
    def H(self) -> Any:
        """The unit curvature: `[P, P]`, `[P]`, or Kronecker factors."""
        return self.fitted().curvature.public()

    @property
    def prior(self) -> GaussianPrior:
        """N(μ₀, diag(δ)⁻¹)."""
        prior = self._plain_prior
        if not is_overridden(self, "prior_precision_diag"):
            return prior
        return replace(prior, precision=overridden.own_diagonal(self, prior))

    @property
    def _plain_prior(self) -> GaussianPrior:
        return GaussianPrior(self.prior_precision, self.prior_mean, self.problem.layout)

    @property
    def prior_precision_diag(self) -> Tensor:
        """δ of every treated parameter, `[P]`."""
        return self._plain_prior.diagonal()

    def evidence(self, prior_precision: Tensor | None = None, sigma_noise: Tensor | None = None) -> Evidence:
        if prior_precision is not None or sigma_noise is not None:
            with self.held(prior_precision=prior_precision, sigma_noise=sigma_noise):
                return self.evidence()
        return Evidence(
            fit=overridden.own_fit(self, self.fitted()),
            mean=self.mean,
            prior=self.prior,
            likelihood=self.likelihood_object,
            kind=self.backend_cls.kind,
            sigma_noise=self.sigma_noise,
            temperature=self.temperature,
            options=self.precision_options,
        )

    @contextmanager
    def held(
        self,
        *,
        prior_precision: Tensor | None = None,
        sigma_noise: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> Iterator[None]:
        """Other hyper-parameters for the length of a block, with their graph; for what users' methods compute of them.

        Args:
            prior_precision: δ, as checked as the present one; None keeps it.
            sigma_noise: σ.
            temperature: T.
        """
        given = {"_prior_precision": prior_precision, "_sigma_noise": sigma_noise, "_temperature": temperature}
        own = vars(self)
        other = {name: value for name, value in given.items() if value is not None and value is not own[name]}
        former = {name: own[name] for name in (*other, "_posterior")} if other else {}
        try:
            own.update(other)
            yield
        finally:
            own.update(former)

    def at_present(self) -> Callable[[], AbstractContextManager[None]]:
        """Blocks with the present hyper-parameters, whatever is assigned later: a prediction is that of its call."""
        return partial(
            self.held, prior_precision=self._prior_precision, sigma_noise=self._sigma_noise,
            temperature=self._temperature,
        )  # fmt: skip

    def posterior(self) -> Precision:
        """The posterior precision with its factorisation, kept until a hyper-parameter or the fit changes.

        Where a hyper-parameter requires a gradient it is made anew, with the graph that leads to it, and not kept; so
        is one that a user's class computes.
        """
        if is_overridden(self, "posterior_precision"):
            return overridden.own_precision(self)
        if torch.is_inference_mode_enabled():  # what a precision computes in this mode is of no use to autograd later
            return self.evidence().precision
        if torch.is_grad_enabled() and self.follows_hyperparameters:
            with own_precision():
                return self.evidence().precision
        if is_overridden(self, *HYPERPARAMETERS):
            return self._posterior_of_users()
        hypers = (self._prior_precision, self._sigma_noise, self._temperature)
        key = (self.fitted(), *((t, t._version) for t in hypers))
        if self._posterior is None or not _same(self._posterior[0], key):
            with torch.no_grad(), own_precision():
                self._posterior = (key, self.evidence().constant().precision)
        return self._posterior[1]

    def _posterior_of_users(self) -> Precision:
        """The same where users' methods decide the hyper-parameters: kept as long as these give the same values."""
        with torch.no_grad(), own_precision():
            now = self.evidence().constant()
            key = (now.fit.curvature, now.prior.precision, now.sigma_noise, now.temperature, now.prior.mean)
            if self._posterior is None or not _equal(self._posterior[0], key):
                self._posterior = (key, now.precision)
            return self._posterior[1]

    @property
    def follows_hyperparameters(self) -> bool:
        """Whether a hyper-parameter requires a gradient: predictions are then differentiable in it."""
        tensors = [self.prior_precision, self.sigma_noise, self.temperature]
        if is_overridden(self, "prior", "prior_precision_diag"):
            tensors.append(self.prior.precision)
        return any(t.requires_grad for t in tensors)

    @property
    def keeps_graph(self) -> bool:
        """Whether predictions and samples keep a graph that leads to hyper-parameters, or into users' own methods."""
        own = is_overridden(self, *MOMENTS, *COVARIANCES)
        return torch.is_grad_enabled() and (own or self.follows_hyperparameters)

    def predictive_posterior(self) -> Precision:
        """The posterior as predictions and samples see it: with what users' classes override."""
        return overridden.predictive_posterior(self)

    @property
    def posterior_precision(self) -> Any:
        """P: `[P, P]`, `[P]`, or a `KronPrecision` with `diag()`, `to_matrix()`, `logdet()`, `bmm()`."""
        return self.evidence().precision.public

    @property
    def posterior_covariance(self) -> Tensor:
        """P⁻¹, `[P, P]`."""
        return overridden.posterior_before(self, "posterior_covariance").covariance

    @property
    def posterior_variance(self) -> Tensor:
        """Diagonal of P⁻¹, `[P]`."""
        return overridden.posterior_before(self, "posterior_variance").diagonal_of_inverse()

    @property
    def posterior_scale(self) -> Tensor:
        """L with L Lᵀ = P⁻¹: lower-triangular (full), symmetric (Kron), or standard deviations `[P]` (diag)."""
        return overridden.posterior_before(self, "posterior_scale").scale

    def square_norm(self, value: Tensor) -> Tensor:
        """(θ − θ*)ᵀ P (θ − θ*) of `[..., P]`; the prior's before `fit`."""
        return self._density().quad(self._checked_weights(value) - self.mean)

    def log_prob(self, value: Tensor, normalized: bool = True) -> Tensor:
        """Log density of the posterior at θ `[..., P]`; the prior's before `fit`."""
        own = is_overridden(self, "square_norm")
        precision = self._density()
        value = self._checked_weights(value)
        unnormalised = -0.5 * (self.square_norm(value) if own else precision.quad(value - self.mean))
        if not normalized:
            return unnormalised
        own = is_overridden(self, "log_det_posterior_precision")
        logdet = self.log_det_posterior_precision if own else precision.logdet()
        normaliser = 0.5 * value.shape[-1] * math.log(2 * math.pi) - 0.5 * logdet
        return (unnormalised - normaliser).to(unnormalised.dtype)

    def _checked_weights(self, value: Tensor) -> Tensor:
        """Weights `[..., P]`; one number would be spread to all of them.

        Raises:
            InvalidArgument: Another length.
        """
        n_params = self.problem.layout.n_params
        if value.ndim == 0 or value.shape[-1] != n_params:
            raise InvalidArgument(f"value has shape {list(value.shape)}; it must be [..., P] with P = {n_params}.")
        return value

    def _density(self) -> Precision:
        if self._fit is None:
            return self.structure.before_data(self.prior)
        return self._precision()

    def _precision(self) -> Precision:
        return self.posterior() if is_overridden(self, "posterior_precision") else self.evidence().precision


def _same(old: Any, new: Any) -> bool:
    """Whether two keys hold the very same objects at the same versions."""
    if len(old) != len(new):
        return False
    return old[0] is new[0] and all(a[0] is b[0] and a[1] == b[1] for a, b in zip(old[1:], new[1:], strict=True))


def _equal(old: Any, new: Any) -> bool:
    """Whether two keys hold the same curvature and equal hyper-parameters."""
    if len(old) != len(new):
        return False
    return old[0] is new[0] and all(torch.equal(a, b) for a, b in zip(old[1:], new[1:], strict=True))
