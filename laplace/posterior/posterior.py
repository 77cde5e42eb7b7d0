"""The posterior over the random weights as a value: other hyper-parameters, or other data, make another one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from laplace.core.hyperparameters import GaussianPrior, Hyperparameters
from laplace.core.overrides import COVARIANCES, EVIDENCE, HYPERPARAMETERS, MOMENTS, POSTERIOR, is_overridden
from laplace.curvature import CurvatureInterface
from laplace.engines.engine import CurvatureEngine
from laplace.errors import CalibrationWarning, InvalidArgument, NotFittedError, UnsupportedError, warn
from laplace.evidence import Evidence
from laplace.fitting import Fit
from laplace.fitting.content import Content
from laplace.likelihoods.base import Likelihood
from laplace.network.fingerprint import Fingerprint, ModelWatch
from laplace.network.model_guard import own_precision
from laplace.network.witness import Witness
from laplace.posterior.assigned import Given, assigned
from laplace.posterior.calibration import Calibration
from laplace.posterior.choices import Choices, Derived
from laplace.posterior.fitted import FitByHand, Fitted
from laplace.posterior.refined import Refinement
from laplace.structures.base import Precision
from laplace.structures.given import GivenPrecision
from laplace.weights.base import Weights
from laplace.weights.problem import Problem


class Owner(Protocol):
    """The object that users hold: methods of their own are called on it, while it has a posterior for its own."""

    def holding(self, posterior: Posterior) -> AbstractContextManager[Any]:
        """A block in which the object has another posterior."""
        ...

    def snapshot(self) -> Posterior:
        """The posterior that it has now, with itself for the owner."""
        ...

    def posterior(self) -> Precision:
        """P, as users' classes have it."""
        ...


@dataclass(frozen=True, eq=False)
class Posterior:
    """θ ~ N(θ̂, P⁻¹) with P = s·H + diag(δ), at one setting of the hyper-parameters; without data it is the prior.

    Nothing of it changes: `at` gives the posterior at other hyper-parameters, which shares the curvature with its
    factorisations, and the engine. What follows from methods that users override is asked of the object that they
    belong to, while that has this posterior for its own.

    Attributes:
        choices: Likelihood, structure, backend and keys.
        weights: The random weights.
        hypers: Prior, noise and temperature.
        data: What the data say; None before a fit.
        root: L with L Lᵀ = P⁻¹ as a user assigned it, for these hyper-parameters and data; else None.
        calibration: What chose the hyper-parameters on held-out data, where that scaled the covariance; else None.
        derived: The engine and the last precision, made on first use.
        owner: The object whose class, or which itself, may have methods of users; None for the library's alone.
    """

    choices: Choices
    weights: Weights
    hypers: Hyperparameters
    data: Fitted | None = None
    root: Tensor | None = None
    calibration: Calibration | None = None
    derived: Derived = field(default_factory=Derived, repr=False)
    owner: Owner | None = field(default=None, repr=False)

    # Other posteriors.

    def at(self, hypers: Hyperparameters) -> Posterior:
        """The posterior at other hyper-parameters, with their graph; this one at its own."""
        if hypers is self.hypers and self.root is None:
            return self
        return replace(self, hypers=hypers, root=None, calibration=None)

    def assigned(self, **given: Given) -> Posterior:
        """The posterior at hyper-parameters as users give them, by name.

        Raises:
            InvalidArgument: A value is not accepted, or a calibration has chosen all of them.
            InvalidType: A value is neither a number nor a tensor.
        """
        self.refuse_calibrated(f"assigning {' and '.join(given)}")
        return self.at(assigned(self.hypers, self.likelihood, self.weights, **given))

    def calibrated(self, calibration: Calibration) -> Posterior:
        """The posterior with the covariance that a calibration chose."""
        return replace(self._around_own_prior(calibration.hypers), calibration=calibration)

    def uncalibrated(self) -> Posterior:
        """The posterior at the hyper-parameters before it was calibrated."""
        return self if self.calibration is None else self._around_own_prior(self.calibration.before)

    def unscaled(self) -> Posterior:
        """The posterior whose covariance a calibration scaled, of which there is an evidence; else the same."""
        return self if self.calibration is None else self._around_own_prior(self.calibration.unscaled)

    def _around_own_prior(self, hypers: Hyperparameters) -> Posterior:
        """The posterior at hyper-parameters that a mixture shares, with its own prior mean."""
        return self.at(replace(hypers, prior_mean=self.hypers.prior_mean))

    def before_new_data(self, what: str) -> Posterior:
        """The posterior without its calibration, which was of the former data.

        Warns:
            CalibrationWarning: It had one.
        """
        if self.calibration is not None:
            warn(
                f"{what} drops the calibration on {self.calibration.held_out}: prior precision, noise and temperature "
                "are what they were before; call la.calibrate again.",
                CalibrationWarning,
            )
        return self.uncalibrated()

    def refuse_calibrated(self, what: str) -> None:
        """Refuses what would mix with, or misread, the hyper-parameters of a calibration.

        Raises:
            InvalidArgument: The posterior is calibrated.
        """
        if self.calibration is not None:
            raise InvalidArgument(
                f"{what}: this posterior is calibrated, its covariance scaled by {self.calibration.scale:.3g} through "
                "prior_precision and temperature together, so that it has no evidence and neither has its own meaning; "
                "call la.calibration.undo() first, and la.calibrate again afterwards."
            )

    def with_choices(self, **choices: Any) -> Posterior:
        """The posterior with other choices, by name, for which all that is derived is made anew."""
        return replace(self, choices=replace(self.choices, **choices), root=None, derived=Derived())

    def with_problem(self, problem: Problem) -> Posterior:
        """The posterior of random weights that are known now."""
        if problem is self.weights.problem:
            return self
        return replace(self, weights=self.weights.with_problem(problem), derived=Derived())

    def with_data(
        self,
        source: Fit | FitByHand,
        engine: CurvatureEngine | None,
        witness: Witness | None = None,
        content: Content | None = None,
    ) -> Posterior:
        """The posterior of data, around the network's present weights."""
        mean = self.problem.mean().to(self.hypers.dtype)
        watch = ModelWatch(Fingerprint.of(self.model, witness))
        return replace(self, data=Fitted(source, mean, watch, content=content), root=None, derived=Derived(engine))

    def with_fit(self, fit: Fit) -> Posterior:
        """The posterior of other data, around the same mean; a refinement, which was of the former ones, is gone."""
        return replace(self, data=replace(self.require_fitted(), source=fit, refinement=None, content=None), root=None)

    def with_refinement(self, refinement: Refinement) -> Posterior:
        """The posterior around another mean."""
        return replace(self, data=replace(self.require_fitted(), refinement=refinement), root=None)

    def moved(self, device: torch.device | None, dtype: torch.dtype | None) -> Posterior:
        """The posterior elsewhere, of a network that was moved there, at hyper-parameters without a graph."""
        data = None if self.data is None else self.data.moved(self.model, device, dtype)
        root = None if self.root is None else self.root.to(device=device, dtype=dtype)
        choices = self.choices.with_loss_of(self.derived.backend)
        calibration = None if self.calibration is None else self.calibration.moved(device, dtype)
        return replace(
            self, choices=choices, hypers=self.hypers.moved(device, dtype), data=data, root=root,
            calibration=calibration, derived=Derived(),
        )  # fmt: skip

    # What was chosen.

    @property
    def likelihood(self) -> Likelihood:
        """Distribution of the data, p(y | f)."""
        return self.choices.likelihood_object

    @property
    def model(self) -> nn.Module:
        """The network."""
        return self.weights.model

    @property
    def channel_dim(self) -> int:
        """Dimension of the network's outputs that holds the channels."""
        return -1 if self.choices.channel_dim is None else self.choices.channel_dim

    @property
    def problem(self) -> Problem:
        """The network and its random tensors, as backends see them.

        Raises:
            NotFittedError: The last layer is found at `fit`, or by `last_layer_name=`.
        """
        if self.weights.problem is None:
            raise NotFittedError(
                "the last layer is not known before fit; call fit(train_loader) first, or pass last_layer_name=."
            )
        return self.weights.problem

    @property
    def backend(self) -> CurvatureInterface:
        """The curvature backend as users call it."""
        if self.derived.backend is None:
            self.derived.backend = self.choices.backend(self.weights, self.problem)
        return self.derived.backend

    @property
    def engine(self) -> CurvatureEngine:
        """The engine of Jacobians and curvature."""
        if self.derived.engine is None:
            self.derived.engine = self.choices.engine(self.weights, self.problem, split_outputs=False)
        return self.derived.engine

    # What the data say.

    def require_fitted(self) -> Fitted:
        """The fit with its mean, as it was made.

        Raises:
            NotFittedError: Before a fit.
        """
        if self.data is None:
            raise NotFittedError("the posterior is not fitted; call fit(train_loader) first.")
        return self.data

    @property
    def map_fit(self) -> Fit:
        """Curvature and loss at the network's own outputs."""
        return self.require_fitted().fit

    @property
    def fit(self) -> Fit:
        """Curvature and loss; after a refinement, at the outputs of the linearised network."""
        return self.require_fitted().present.complete

    @property
    def H(self) -> Any:
        """The unit curvature as users see it: what was assigned, or the fit's; zero before a fit.

        Raises:
            NotFittedError: Before a fit, of a structure that has no curvature of no data.
        """
        by_hand = self.choices.structure.by_hand
        if self.data is None and by_hand is not None:
            return by_hand.zeros(self.problem, self.hypers.prior_mean.detach())
        return self.require_fitted().present.H

    @property
    def refinement(self) -> Refinement | None:
        """Result of inference in the linearised network."""
        return None if self.data is None else self.data.refinement

    @property
    def expansion_point(self) -> Tensor:
        """θ*, the network's weights at the fit, around which predictions are linearised, `[P]`."""
        return self.require_fitted().mean

    @property
    def refined_step(self) -> Tensor | None:
        """θ̂ − θ*, `[P]`, of a refined posterior; None of others."""
        return None if self.refinement is None else self.refinement.mean - self.expansion_point

    @property
    def mean(self) -> Tensor:
        """θ̂, `[P]`; the prior's mean before a fit."""
        if self.overrides("mean"):
            with self.owned() as la:
                return la.mean
        return self.hypers.prior_mean if self.data is None else self.data.centre

    @property
    def sigma_noise(self) -> Tensor:
        """σ, 0-dim or `[C]`, as users' classes have it."""
        if self.overrides("sigma_noise"):
            with self.owned() as la:
                return la.sigma_noise
        return self.hypers.sigma_noise

    def check_unchanged(self) -> None:
        """Raises `ModelChangedError` if the network's weights, or its outputs at data of the fit, are not as then."""
        if self.data is not None:
            self.data.watch.check(self.model)

    # What follows.

    @property
    def prior(self) -> GaussianPrior:
        """N(μ₀, diag(δ)⁻¹)."""
        return GaussianPrior(self.hypers.prior_precision, self.hypers.prior_mean, self.problem.layout)

    @property
    def evidence(self) -> Evidence:
        """The terms of the log evidence, differentiable in the hyper-parameters."""
        if self.overrides(*HYPERPARAMETERS):
            with self.owned() as la:
                return la.evidence()
        return Evidence(
            fit=self.fit,
            mean=self.mean,
            prior=self.prior,
            likelihood=self.likelihood,
            kind=self.choices.backend_cls.kind,
            sigma_noise=self.hypers.sigma_noise,
            temperature=self.hypers.temperature,
            options=self._precision_options,
            distance=self.derived.distance,
        )

    @property
    def _precision_options(self) -> dict[str, Any]:
        """Options of the structure's precisions; of one that asks the network, which must be as it was, its engine.

        Raises:
            ModelChangedError: It is not.
        """
        options = self.choices.precision_options
        if options.get("damping"):
            options = options | {"n_data": self.fit.n_data}
        if not self.choices.structure.asks_network:
            return options
        self.check_unchanged()
        return options | {"engine": self.engine}

    def log_evidence(self) -> Tensor:
        """Log p(D), 0-dim, with its graph, by a user's own terms where there are any."""
        self.refuse_calibrated("the log evidence")
        if self.overrides("log_marginal_likelihood", *EVIDENCE):
            with self.owned() as la:
                return la.log_marginal_likelihood()
        return self.evidence.log_marginal_likelihood

    def precision(self) -> Precision:
        """P with its factorisation, kept until a hyper-parameter or the fit changes.

        Where a hyper-parameter requires a gradient it is made anew, with the graph that leads to it, and not kept.
        """
        if self.overrides("posterior", "posterior_precision", *HYPERPARAMETERS):
            with self.owned() as la:
                return la.posterior()
        if self.root is not None:
            return GivenPrecision(self.root)
        if torch.is_inference_mode_enabled():  # what a precision computes in this mode is of no use to autograd later
            return self.evidence.precision
        if torch.is_grad_enabled() and self.hypers.requires_grad:
            with own_precision():
                return self.evidence.precision
        values = (self.hypers.prior_precision, self.hypers.sigma_noise, self.hypers.temperature)
        return self.derived.precision(self.fit.curvature, values, self._constant_precision)

    def _constant_precision(self) -> Precision:
        with torch.no_grad(), own_precision():
            return self.evidence.constant().precision

    def predictive_precision(self) -> Precision:
        """P as predictions see it: with the covariances of outputs that users' classes override."""
        if self.overrides(*POSTERIOR):
            with self.owned() as la:
                return la.predictive_posterior()
        return self.precision()

    # What users override.

    def overrides(self, *names: str) -> bool:
        """True if a user's class, or the object itself, defines one of these methods."""
        return self.owner is not None and is_overridden(self.owner, *names)

    def owned(self) -> AbstractContextManager[Any]:
        """A block in which the object has this posterior for its own; it is what the block is entered as.

        Raises:
            UnsupportedError: The posterior belongs to no object.
        """
        if self.owner is None:
            raise UnsupportedError("this posterior belongs to no object whose methods could be called.")
        return self.owner.holding(self)

    @property
    def follows_hyperparameters(self) -> bool:
        """True if a hyper-parameter requires a gradient: predictions are then differentiable in it."""
        if self.overrides(*HYPERPARAMETERS):
            with self.owned() as la:
                return any(value.requires_grad for value in (la.prior.precision, la.sigma_noise, la.temperature))
        return self.hypers.requires_grad

    @property
    def keeps_graph(self) -> bool:
        """True if predictions keep a graph that leads to hyper-parameters, or into users' own methods."""
        own = self.overrides(*MOMENTS, *COVARIANCES)
        return torch.is_grad_enabled() and (own or self.follows_hyperparameters)
