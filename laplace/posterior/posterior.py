"""The posterior over the weights as a value: other hyper-parameters, or other data, make another one.

A `Posterior` holds `Choices` (how it is made) and `Weights` (which are random), `Fitted` (what the data say),
hyper-parameters, what was assigned or calibrated beside them, and a `Cache` of what can be computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from laplace import curvature
from laplace.core import batch as batches
from laplace.core.arguments import as_tensor, check_length, finite, on_host, positive
from laplace.core.batch import ForwardFn, Inputs
from laplace.core.cached import Kept, version
from laplace.core.content import Content
from laplace.core.hyperparameters import GaussianPrior, Hyperparameters
from laplace.core.inference import kept_for_later
from laplace.core.overrides import is_ours
from laplace.core.positions import channels_last
from laplace.errors import CalibrationWarning, InvalidArgument, InvalidType, NotFittedError, UnsupportedError, warn
from laplace.evidence import Evidence
from laplace.likelihoods.base import Likelihood
from laplace.likelihoods.checks import Loss
from laplace.network.fsdp import require_unsharded
from laplace.network.model_guard import own_precision
from laplace.network.watch import Fingerprint, ModelWatch, ReferenceOutputs
from laplace.posterior.calibration import Calibration
from laplace.structures.base import Curvature, DataPass, SignedOptions
from laplace.structures.fit import Fit
from laplace.structures.precision import Precision, drawn
from laplace.weights.base import Weights
from laplace.weights.problem import Problem

if TYPE_CHECKING:
    from laplace.contract.fixed_root import FixedRootPrecision
    from laplace.contract.manual_fit import ManualFit
    from laplace.curvature import CurvatureInterface
    from laplace.engines.engine import CurvatureEngine
    from laplace.enums import PredType
    from laplace.predictive.options import PredictiveNames, PredictOptions
    from laplace.predictive.prediction import OutputSampler, PosteriorOutputs
    from laplace.refinement.result import Refinement

# How a posterior is made.


@dataclass(frozen=True, eq=False)
class Choices:
    """Everything that was chosen when a posterior was made, besides the weights and the hyper-parameters."""

    likelihood: Likelihood | str  # p(y | f), as it was given
    likelihood_object: Likelihood
    structure: type[Curvature]
    structure_options: Any
    precision_options: dict[str, Any]
    backend_cls: type[CurvatureInterface]
    backend_kwargs: dict[str, Any]
    asdl_fisher_kwargs: dict[str, Any]
    forward_fn: ForwardFn | None  # How the user calls the network; None for `model(x)`
    dict_key_x: str  # Key of the inputs, for mappings
    dict_key_y: str  # Key of the targets, for mappings
    channel_dim: int | None  # Dimension of the network's outputs that holds the channels; None where that is not known
    pred_types: PredictiveNames
    weights_options: dict[str, Any]
    loss: Loss | None = None  # A loss that was assigned to the backend, around that of the likelihood; else None

    def reconciled(self, model: nn.Module) -> Choices:
        """The same, once weights, structure and backend are found to go together.

        Of an exact Hessian the precision is told what is done about negative eigenvalues.

        Raises:
            InvalidArgument: The structure takes the exact GGN alone, and the backend computes another curvature.
            UnsupportedError: The network is spread over processes, and the curvature takes more than its hooks see.
        """
        backend, structure = self.backend_cls, self.structure
        if not structure.by_layer or backend not in (curvature.NativeGGN, curvature.NativeEF):
            require_unsharded(model, f"{backend.__name__} with {structure.name!r} takes more than hooks see")
        if structure.exact_ggn and backend.kind != "ggn":
            raise InvalidArgument(
                f"backend={backend.__name__} has curvature of kind {backend.kind!r}; a Gaussian process of the "
                "linearised network has that of the GGN: give backend=NativeGGN or another GGN backend."
            )
        if structure.exact_ggn and self.backend_kwargs.get("stochastic"):
            raise InvalidArgument(
                "backend_kwargs has stochastic=True, but a Gaussian process takes the exact output Hessian; leave it "
                "out."
            )
        if backend.kind != "hessian" or not isinstance(self.structure_options, SignedOptions):
            return self
        options = self.precision_options | {"indefinite": self.structure_options.indefinite}
        return replace(self, precision_options=options)

    def backend(self, weights: Weights, problem: Problem) -> CurvatureInterface:
        """An object of the backend's class, for direct calls and for methods of users' classes.

        A class of the user's sees the names "regression" and "classification" only, and is called with
        `asdl_fisher_kwargs`, which the library's take in the constructor.
        """
        backend, ours = self.backend_cls, is_ours(self.backend_cls)
        model, choice = weights.for_backend(problem)
        options = {**choice, **self.backend_kwargs, **(self.asdl_fisher_kwargs if ours else {})}
        name = self.likelihood if ours else self.likelihood_object.peer_name
        try:
            made = backend(model, name, dict_key_x=self.dict_key_x, dict_key_y=self.dict_key_y, **options)
        except TypeError as error:
            raise InvalidArgument(
                f"backend={backend.__name__} could not be made with "
                f"backend_kwargs={sorted(self.backend_kwargs)}: {error}"
            ) from error
        if self.loss is not None:
            made.lossfunc = self.loss
        return made

    def with_loss_of(self, backend: CurvatureInterface | None) -> Choices:
        """The same with the loss that a user assigned to a backend, for the fits that follow."""
        if backend is None or backend.assigned_loss is self.loss:
            return self
        return replace(self, loss=backend.assigned_loss)

    def engine(self, weights: Weights, problem: Problem, *, split_outputs: bool) -> CurvatureEngine:
        """An engine, which keeps one curvature term per output with `split_outputs`."""
        backend, likelihood = self.backend_cls, self.likelihood_object
        if is_ours(backend):
            given = {**self.backend_kwargs, **self.asdl_fisher_kwargs}
            return backend.engine_for(problem, likelihood, given, split_outputs=split_outputs, loss=self.loss)
        users = self.backend(weights, problem)
        return users.engine(problem, likelihood, split_outputs=split_outputs, **self.asdl_fisher_kwargs)


def checked_backend(backend: Any) -> type[CurvatureInterface]:
    """The class that computes curvature, the native GGN by default; an object stands for its class."""
    if backend is None:
        return curvature.NativeGGN
    kind = backend if isinstance(backend, type) else type(backend)
    if issubclass(kind, curvature.CurvatureInterface):
        return kind
    raise InvalidType(
        f"backend={backend!r} is not accepted; give a class derived from "
        "laplace.curvature.CurvatureInterface, such as NativeGGN or NativeEF, and its options as backend_kwargs={...}."
    )


# Hyper-parameters as users give them.


HyperparameterValue = float | Tensor
"""A hyper-parameter as users give it."""


def assigned(
    now: Hyperparameters, likelihood: Likelihood, weights: Weights, **given: HyperparameterValue
) -> Hyperparameters:
    """The present hyper-parameters with some that a user gives, of which copies are kept with the caller's graph."""
    checked: dict[str, Tensor] = {}
    known: dict[str, Tensor] = {}
    with kept_for_later():
        for name, value in given.items():
            tensor = as_tensor(name, value, like=now.prior_precision)
            known[name] = on_host(value, tensor)
            (finite if name == "prior_mean" else positive)(name, known[name])
            if name == "prior_precision":
                tensor = _of_matching_length(name, tensor if tensor.ndim else tensor.reshape(1), weights)
            elif name == "prior_mean":
                tensor = _of_matching_length(name, tensor.reshape(-1) if isinstance(value, Tensor) else tensor, weights)
            elif name == "sigma_noise" and not likelihood.has_noise and set(known[name].flatten().tolist()) != {1.0}:
                raise InvalidArgument(
                    f"sigma_noise={value} with likelihood={likelihood.name!r}, which has no observation noise; "
                    "leave sigma_noise at 1."
                )
            elif name == "temperature" and tensor.numel() != 1:
                raise InvalidArgument(f"temperature must be a scalar; {tensor.numel()} values were given.")
            elif tensor.numel() == 1:
                tensor = tensor.reshape(())
            checked[name] = tensor
    hypers = replace(now, **checked)
    if not given.keys().isdisjoint(_SCALING):
        _require_scale(replace(hypers, **{name: known[name] for name in _SCALING & known.keys()}))
    return hypers


_SCALING = frozenset({"sigma_noise", "temperature"})
"""Hyper-parameters that weigh the data."""


def _require_scale(hypers: Hyperparameters) -> None:
    """Refuses a noise and a temperature whose σ² or 1/(σ²T) the dtype does not hold: infinite or 0 in its place."""
    largest = torch.finfo(hypers.dtype).max
    noises, temperature = hypers.sigma_noise.detach().flatten().tolist(), hypers.temperature.item()
    if max(noises) ** 2 > largest or min(noises) ** 2 * temperature * largest < 1:
        raise InvalidArgument(
            f"sigma_noise={min(noises):.3g} (up to {max(noises):.3g}) with temperature={temperature:.3g}: σ² or "
            f"1/(σ²T) is beyond {largest:.3g}, the largest number of {hypers.dtype}. Standardise the targets, or take "
            "a network in float64."
        )


def match_lengths(now: Hyperparameters, weights: Weights) -> Hyperparameters:
    """Hyper-parameters whose lengths could not be checked while the last layer was unknown."""
    prior = _of_matching_length("prior_precision", now.prior_precision, weights)
    mean = _of_matching_length("prior_mean", now.prior_mean, weights)
    if prior is now.prior_precision and mean is now.prior_mean:
        return now
    return replace(now, prior_precision=prior, prior_mean=mean)


def _of_matching_length(name: str, value: Tensor, weights: Weights) -> Tensor:
    problem = weights.problem
    if problem is None or value.numel() == 1:
        return value
    value, layout = weights.restrict_prior(value), problem.layout
    tensors = {} if name == "prior_mean" else {"parameter tensors": layout.n_tensors}
    check_length(name, value, {"one": 1, **tensors, "random parameters": layout.n_params})
    return value


# What the data say.


@dataclass(frozen=True, eq=False)
class Fitted:
    """Curvature and loss of data at the weights that a network had at the fit."""

    source: Fit | ManualFit  # Curvature and loss at the network's own outputs, as they were found or assigned
    expansion_point: Tensor  # θ*, the network's weights, around which predictions are linearised, `[P]`
    watch: ModelWatch  # Notices that the network was changed since
    refinement: Refinement | None = None  # What inference in the linearised network found; None without it
    assigned_mean: Tensor | None = None  # Mean of the Gaussian, `[P]`, where a user assigned another one than θ*
    # In loops by hand that restart H alone (`la.restart_H`): the former sums, whose Kronecker factors `la.H_facs`
    # still shows; of an H of None there are none
    separate_factors: Fit | ManualFit | None = None
    # Digest of the data that were fitted; None where it is not known, as of a state, and after `forget`
    content: Content | None = None

    @property
    def fit(self) -> Fit:
        """Curvature and loss at the network's own outputs."""
        return self.source.complete

    def completed(self) -> Fitted:
        """The same with a complete fit: what is written into an assigned H later does not change it."""
        return self if self.source is self.fit else replace(self, source=self.fit)

    @property
    def active_fit(self) -> Fit | ManualFit:
        """Curvature and loss, found or assigned; after a refinement, at the outputs of the linearised network."""
        return self.source if self.refinement is None else self.refinement.fit

    @property
    def factors_fit(self) -> Fit | ManualFit:
        """Sums whose Kronecker factors are shown."""
        return self.active_fit if self.separate_factors is None else self.separate_factors

    @property
    def mean(self) -> Tensor:
        """θ̂, the mean of the Gaussian, `[P]`."""
        if self.refinement is not None:
            return self.refinement.mean
        return self.expansion_point if self.assigned_mean is None else self.assigned_mean

    def moved(self, model: nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> Fitted:
        """The same elsewhere, for a network that was moved there."""
        mean = self.assigned_mean
        return Fitted(
            self.fit.moved(device, dtype),
            self.expansion_point.to(device=device, dtype=dtype),
            ModelWatch(self.watch.fingerprint.moved(model, device, dtype)),
            None if self.refinement is None else self.refinement.moved(device, dtype),
            None if mean is None else mean.to(device=device, dtype=dtype),
            content=self.content,
        )


# The posterior.


WeightSampler = Callable[[int, torch.Generator | None], Tensor]
"""Draws S samples of the weights, `[S, P]`."""


class Cache:
    """The one mutable part of a posterior: nothing in it is a fact that could not be computed again.

    Attributes:
        backend: The curvature backend as users call it, or None.
        engine: What computes Jacobians and curvature, or None.
        noise_seen: Whether a noise of 1 has been compared with the residuals.
        gradient_seen: Whether inputs that require a gradient have been warned of.
        predictive: The last calibration, and the posterior that it makes of this one; or None.
        kept: Terms of the evidence that do not depend on the prior precision, for one search over it.
    """

    def __init__(self, engine: CurvatureEngine | None = None) -> None:
        self.backend: CurvatureInterface | None = None
        self.engine = engine
        self.noise_seen = self.gradient_seen = False
        self.predictive: tuple[Calibration, Posterior] | None = None
        self.kept = Kept()
        self._precision: tuple[Curvature, tuple[tuple[Tensor, int], ...], Precision] | None = None

    def precision(self, curvature: Curvature, values: tuple[Tensor, ...], make: Callable[[], Precision]) -> Precision:
        """The precision of a curvature at hyper-parameters `values`, made anew where these are not the last ones.

        Only one is kept, and it is let go before another is made: there are never two factorisations.
        """
        last = self._precision
        if last is not None and last[0] is curvature and _are_unchanged(last[1], values):
            made = last[2]
        else:
            self._precision = last = None
            made = make()
        # Equal values are the last ones from now on: of the very same ones no number is compared again.
        self._precision = curvature, tuple((value, version(value)) for value in values), made
        return made


def _are_unchanged(former: tuple[tuple[Tensor, int], ...], values: tuple[Tensor, ...]) -> bool:
    return all(
        version(old) == then and (old is value or (old.shape == value.shape and bool((old == value).all())))
        for (old, then), value in zip(former, values, strict=True)
    )


@dataclass(frozen=True, eq=False)
class Posterior:
    """θ ~ N(θ̂, P⁻¹) with P = s·H + diag(δ), at one setting of the hyper-parameters; without data it is the prior.

    Nothing of it changes: `at_hyperparameters` gives the posterior at others, which shares the curvature with its
    factorisations, and the engine. That of an object with members of its user is a `UsersPosterior`.
    """

    choices: Choices
    weights: Weights
    hypers: Hyperparameters
    data: Fitted | None = None  # What the data say; None before a fit
    # P by a root of P⁻¹ as a user assigned it, for these hyper-parameters and data; else None
    root: FixedRootPrecision | None = None
    # What held-out data chose for predictions, which `predictive` applies; `hypers` are those without it
    calibration: Calibration | None = None
    # The calibration that made this posterior, which predicts, of the one that holds it (`predictive`); else None
    applied: Calibration | None = None
    cache: Cache = field(default_factory=Cache, repr=False)  # The engine and the last precision, made on first use

    # Other posteriors.

    def at_hyperparameters(self, hypers: Hyperparameters) -> Posterior:
        """The posterior at other hyper-parameters, with their graph; this one at its own."""
        if hypers is self.hypers and self.root is None:
            return self
        return replace(self, hypers=hypers, root=None, calibration=None)

    def assigned(self, **given: HyperparameterValue) -> Posterior:
        """The posterior at hyper-parameters as users give them, by name; a calibration, of the former ones, is gone."""
        hypers = assigned(self.hypers, self.likelihood, self.weights, **given)
        return self.without_calibration(f"assigning {' and '.join(given)}").at_hyperparameters(hypers)

    def calibrated(self, calibration: Calibration | None) -> Posterior:
        """The posterior whose predictions a calibration changes; None for those of the posterior itself."""
        return self if calibration is self.calibration else replace(self, calibration=calibration)

    def without_calibration(self, what: str) -> Posterior:
        """The posterior without its calibration, of the former data or hyper-parameters; warns where it had one."""
        if self.calibration is None:
            return self
        warn(
            f"{what} drops the calibration on {self.calibration.held_out}, which was of the posterior before; call "
            "la.calibrate again.",
            CalibrationWarning,
        )
        return self.calibrated(None)

    def predictive(self) -> Posterior:
        """The posterior that predicts: with the covariance and the noise that a calibration chose, else this one."""
        if self.calibration is None:
            return self
        known = self.cache.predictive
        if known is None or known[0] is not self.calibration or known[1].data is not self.data:
            hypers = replace(self.calibration.hypers, prior_mean=self.hypers.prior_mean)  # a mixture shares the others
            own = {"root": None, "calibration": None, "applied": self.calibration, "cache": Cache(self.cache.engine)}
            made = replace(self, hypers=hypers, **own)
            self.cache.predictive = known = self.calibration, made
        return known[1]

    def refuse_moved(self, what: str, instead: str) -> None:
        """Raises `InvalidArgument` where `forget_with_mean` moved the mean, and `what` would put it back in silence.

        `instead` says what to call.
        """
        if self.refinement is not None and self.refinement.method == "forget":
            raise InvalidArgument(
                f"{what}: the mean of this posterior was moved as data were removed, and would go back to the "
                f"network's weights; {instead}, or fit the remaining data anew."
            )

    def with_choices(self, **choices: Any) -> Posterior:
        """The posterior with other choices, by name, for which the cache is emptied."""
        return replace(self, choices=replace(self.choices, **choices), root=None, cache=Cache())

    def with_channels(self, channel_dim: int) -> Posterior:
        """The posterior of a network whose outputs have their channels in this dimension."""
        call = batches.caller(self.model, self.choices.forward_fn, self.choices.dict_key_y)
        weights = self.weights.called_by(channels_last(call, channel_dim))
        return replace(self.with_choices(channel_dim=channel_dim), weights=weights)

    def apply_inferred(self, channel_dim: int | None, layer: str | None) -> Posterior:
        """The posterior with the dimension of the channels and the last layer that another process found."""
        known = self
        if self.choices.channel_dim is None and channel_dim is not None:
            known = self.with_channels(channel_dim)
        problem = known.weights.problem if layer is None else known.weights.named(layer)
        return known if problem is None else known.with_problem(problem)

    def with_backend_loss(self) -> Posterior:
        """The posterior whose fits have the loss that a user assigned to its backend."""
        choices = self.choices.with_loss_of(self.cache.backend)
        return self if choices is self.choices else self.with_choices(loss=choices.loss)

    def with_problem(self, problem: Problem) -> Posterior:
        """The posterior with the last layer that is known now."""
        if problem is self.weights.problem:
            return self
        return replace(self, weights=self.weights.with_problem(problem), cache=Cache())

    def with_data(
        self,
        source: Fit | ManualFit,
        engine: CurvatureEngine | None,
        reference: ReferenceOutputs | None = None,
        content: Content | None = None,
    ) -> Posterior:
        """The posterior of data, around the network's present weights."""
        mean = self.problem.mean().to(self.hypers.dtype)
        watch = ModelWatch(Fingerprint.from_model(self.model, reference))
        return replace(self, data=Fitted(source, mean, watch, content=content), root=None, cache=Cache(engine))

    def with_fit(self, fit: Fit) -> Posterior:
        """The posterior of other data, around the same mean; a refinement, which was of the former ones, is gone."""
        data = replace(self.require_fitted(), source=fit, refinement=None, content=None)
        return replace(self, data=data, root=None)

    def with_refinement(self, refinement: Refinement) -> Posterior:
        """The posterior around another mean."""
        data = replace(self.require_fitted(), refinement=refinement)
        return replace(self, data=data, root=None)

    def moved(self, device: torch.device | None, dtype: torch.dtype | None) -> Posterior:
        """The posterior elsewhere, of a network that was moved there, at hyper-parameters without a graph."""
        data = None if self.data is None else self.data.moved(self.model, device, dtype)
        root = None if self.root is None else self.root.moved(device, dtype)
        choices = self.choices.with_loss_of(self.cache.backend)
        calibration = None if self.calibration is None else self.calibration.moved(device, dtype)
        return replace(
            self, choices=choices, hypers=self.hypers.moved(device, dtype), data=data, root=root,
            calibration=calibration, cache=Cache(),
        )  # fmt: skip

    # What was chosen.

    @property
    def likelihood(self) -> Likelihood:
        """The distribution p(y | f), an object."""
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
    def call(self) -> ForwardFn:
        """The call of the network on inputs; its outputs are as it returns them."""
        return batches.caller(self.model, self.choices.forward_fn, self.choices.dict_key_y) or batches.call

    @property
    def problem(self) -> Problem:
        """The network and its random tensors, as backends see them."""
        if self.weights.problem is None:
            raise NotFittedError(
                "the last layer is not known before fit; call fit(train_loader) first, or pass last_layer_name=."
            )
        return self.weights.problem

    @property
    def backend(self) -> CurvatureInterface:
        """The curvature backend as users call it."""
        if self.cache.backend is None:
            self.cache.backend = self.choices.backend(self.weights, self.problem)
        return self.cache.backend

    @property
    def engine(self) -> CurvatureEngine:
        """The engine of Jacobians and curvature."""
        if self.cache.engine is None:
            self.cache.engine = self.choices.engine(self.weights, self.problem, split_outputs=False)
        return self.cache.engine

    # What the data say.

    def require_fitted(self) -> Fitted:
        """The fit with its mean, as it was made; `NotFittedError` before a fit."""
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
        return self.require_fitted().active_fit.complete

    @property
    def refinement(self) -> Refinement | None:
        """Result of inference in the linearised network."""
        return None if self.data is None else self.data.refinement

    @property
    def expansion_point(self) -> Tensor:
        """θ*, the network's weights at the fit, around which predictions are linearised, `[P]`."""
        return self.require_fitted().expansion_point

    @property
    def refined_step(self) -> Tensor | None:
        """θ̂ − θ*, `[P]`, of a refined posterior; None of others."""
        return None if self.refinement is None else self.refinement.mean - self.expansion_point

    @property
    def mean(self) -> Tensor:
        """θ̂, `[P]`; the prior's mean before a fit."""
        return self.hypers.prior_mean if self.data is None else self.data.mean

    @property
    def sigma_noise(self) -> Tensor:
        """σ, 0-dim or `[C]`."""
        return self.hypers.sigma_noise

    @property
    def noise_of_targets(self) -> Tensor:
        """σ of predictions; where a calibrated width follows the input, only what it leaves to the noise."""
        tilt = None if self.applied is None else self.applied.tilt
        return self.sigma_noise if tilt is None else tilt.noise(self.likelihood, self.sigma_noise)

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
        return Evidence(
            fit=self.fit,
            mean=self.mean,
            prior=self.prior,
            likelihood=self.likelihood,
            kind=self.choices.backend_cls.kind,
            sigma_noise=self.hypers.sigma_noise,
            temperature=self.hypers.temperature,
            options=self._precision_options,
            kept=self.cache.kept,
        )

    @property
    def _precision_options(self) -> dict[str, Any]:
        """Options of the structure's precisions."""
        options = self.choices.precision_options
        if options.get("damping"):
            options = options | {"n_data": self.fit.n_data}
        return options | self.choices.structure.options_of_network(self._engine_of_fit)

    def _engine_of_fit(self) -> CurvatureEngine:
        """The engine, of a network that is as it was fitted."""
        self.check_unchanged()
        return self.engine

    def log_evidence(self) -> Tensor:
        """Log p(D), 0-dim, with its graph, in the widest type of its terms."""
        return self.evidence.total

    def precision(self) -> Precision:
        """P with its factorisation, kept until a hyper-parameter or the fit changes.

        Where a hyper-parameter requires a gradient it is made anew, with the graph that leads to it, and not kept.
        """
        if self.root is not None:
            return self.root
        if torch.is_inference_mode_enabled():  # what a precision computes in this mode is of no use to autograd later
            return self.evidence.precision
        if torch.is_grad_enabled() and self.hypers.requires_grad:
            with own_precision():
                return self.evidence.precision
        values = (self.hypers.prior_precision, self.hypers.sigma_noise, self.hypers.temperature)

        def constant() -> Precision:
            with torch.no_grad(), own_precision():
                return self.evidence.constant().precision

        return self.cache.precision(self.fit.curvature, values, constant)

    def precision_before(self, name: str) -> Precision:
        """P with what users override of the moments that come before a name in `MOMENTS`, or of all of them."""
        return self.precision()

    def predictive_precision(self) -> Precision:
        """P as predictions see it: with the covariances of outputs that users' classes override."""
        return self.precision()

    def sampler(self) -> WeightSampler:
        """Draws samples of the weights, `[S, P]`; of a subnetwork of its entries alone."""
        precision, mean = self.precision_before("sample"), self.mean
        return lambda n, generator: drawn(mean, precision, n, generator)

    @property
    def follows_hyperparameters(self) -> bool:
        """True if a hyper-parameter requires a gradient: predictions are then differentiable in it."""
        return self.hypers.requires_grad

    @property
    def keeps_graph(self) -> bool:
        """True if predictions keep a graph that leads to hyper-parameters, or into users' own methods."""
        return torch.is_grad_enabled() and self.follows_hyperparameters

    # Users' members.

    def without_object(self) -> Posterior:
        """The posterior by the library alone."""
        return self

    def overrides(self, *names: str) -> bool:
        """True if the class of a user's object defines one of these members."""
        return False

    def users_pass(self, engine: CurvatureEngine, n_data: int) -> DataPass:
        """The pass over N data in which a user's methods compute loss and curvature."""
        raise UnsupportedError("this posterior belongs to no object whose methods could be called.")

    def users_samples(
        self, name: str, x: Inputs, kind: PredType, asked: PredictOptions, model_kwargs: dict[str, Any]
    ) -> OutputSampler:
        """Draws by a user's own `functional_samples` or `predictive_samples` at x, in the form that is asked for."""
        raise UnsupportedError("this posterior belongs to no object whose methods could be called.")

    def with_users_outputs(
        self, outputs: PosteriorOutputs, x: Inputs, kind: PredType, model_kwargs: dict[str, Any]
    ) -> PosteriorOutputs:
        """A prediction at x with what a user's class computes of it by itself."""
        return outputs

    def as_user_object(self) -> AbstractContextManager[Any]:
        """A block in which the user's object has this posterior for its own; it is what the block is entered as."""
        raise UnsupportedError("this posterior belongs to no object whose methods could be called.")
