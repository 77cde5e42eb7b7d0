"""The contract of every Laplace approximation: choices, hyper-parameters, evidence, and the posterior behind them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar, cast

from torch import Tensor, nn

from laplace.core import batch as batches
from laplace.core import overrides
from laplace.core.arguments import CheckedConstructor, checked
from laplace.core.batch import ForwardFn, Inputs
from laplace.core.hyperparameters import Hyperparameters
from laplace.core.overrides import is_overridden
from laplace.core.positions import channels_last
from laplace.curvature import CurvatureInterface
from laplace.engines.engine import CurvatureEngine
from laplace.enums import LikelihoodName, LinkName, PredType, PredTypeName
from laplace.errors import InvalidArgument, LaplaceError, ReadOnlyError
from laplace.evidence import Evidence
from laplace.likelihoods import get_likelihood
from laplace.likelihoods.base import Likelihood
from laplace.network.model_guard import model_lock, own_precision, require_module, zero_like
from laplace.posterior.posterior import Cache, Choices, Posterior, checked_backend
from laplace.posterior.user_hooks import NoStructure, with_users_members
from laplace.predictive.options import WEIGHT_SPACE, PredictiveNames
from laplace.structures.base import Curvature, Precision
from laplace.weights.base import AllWeights, Weights
from laplace.weights.last_layer import network_of
from laplace.weights.problem import Problem

Backend = type[CurvatureInterface] | None
Options = dict[str, Any] | None
Given = float | Tensor | None
T = TypeVar("T")


class ChoiceAttribute(Generic[T]):
    """An attribute by the name of one of the posterior's `Choices`; assigning it makes another posterior."""

    def __init__(self, doc: str, *, fixed: bool = False) -> None:
        self.__doc__ = doc
        self._fixed = fixed

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, la: Any, owner: type) -> T:
        return cast("T", self) if la is None else getattr(la._posterior.choices, self._name)

    def __set__(self, la: Any, value: T) -> None:
        if self._fixed:
            argument = self._name.removesuffix("_object")
            raise ReadOnlyError(
                f"{self._name} of {type(la).__name__} cannot be assigned; pass {argument}= to the constructor."
            )
        la.set_posterior(la.snapshot().with_choices(**{self._name: value}))


class BaseLaplace(CheckedConstructor, ABC):
    """Base of every Laplace approximation: a Gaussian posterior around a network's trained weights.

    An object refers to one immutable posterior. Every call that changes it makes a new one first, and replaces the
    former only when nothing can fail any more: after an error the object is as it was before.

    Args:
        model: The trained network; its weights are not changed.
        likelihood: A name in `laplace.likelihoods.LIKELIHOODS`, e.g. `"classification"`, or a likelihood object.
        sigma_noise: σ, the standard deviation of the observation noise: one number, or one per output (regression).
        prior_precision: δ, the inverse variance of the prior: one number, one per parameter tensor or per parameter.
        prior_mean: μ₀, the mean of the prior: one number, or one per parameter.
        temperature: T of the tempered likelihood p(y | f)^(1/T); below 1 the posterior is narrower.
        enable_backprop: Whether predictions can be differentiated with respect to the inputs.
        dict_key_x: Where batches are mappings: key of an input whose first dimension is the batch.
        dict_key_y: Where batches are mappings: key of the targets.
        backend: Class that computes the curvature, e.g. `laplace.curvature.NativeEF`; None for the native GGN.
        backend_kwargs: Keyword arguments of the backend's constructor.
        asdl_fisher_kwargs: Keyword arguments that the ASDL backends pass on to ASDL.
        forward_fn: `forward_fn(model, x)` returns the outputs, for models that need another call than `model(x)`.
        structure_kwargs: Options of the structure, e.g. `{"rank": 20}` with `"lowrank"`.
        channel_dim: Dimension of the outputs that holds the classes, or the outputs of one token or pixel: −1 for
            `[B, C]` and `[B, T, C]`, 1 for images `[B, C, H, W]`. None: found from the shape of the labels at the first
            fit, by the convention of PyTorch's losses; where these do not tell, the last dimension.
        weights_options: Options of the choice of weights.
        precision_options: Options of the structure's precision.

    Raises:
        InvalidArgument: A hyper-parameter is not positive or not finite, or its length matches nothing.
        UnsupportedError: A class of your own without a structure, so that `fit` has no curvature to sum.
    """

    structure: type[Curvature] = NoStructure
    weights_type: type[Weights] = AllWeights
    pred_types: ClassVar[PredictiveNames] = WEIGHT_SPACE
    _posterior: Posterior

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | LikelihoodName,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float | Tensor = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: Backend = None,
        backend_kwargs: Options = None,
        asdl_fisher_kwargs: Options = None,
        *,
        forward_fn: ForwardFn | None = None,
        structure_kwargs: Options = None,
        channel_dim: int | None = None,
        weights_options: Options = None,
        precision_options: Options = None,
    ) -> None:
        # Tools read the names of the arguments off the code object, among which there must be no other local.
        overrides.require_structure(self, BaseLaplace)
        model = require_module(network_of(model))
        self.likelihood, self.enable_backprop = likelihood, bool(enable_backprop)
        self.structure_kwargs = dict(structure_kwargs or {})
        self._posterior = Posterior(
            weights=self.weights_type(
                model,
                forward_fn=channels_last(batches.caller(model, forward_fn, dict_key_y), channel_dim),
                **(weights_options or {}),
            ),
            choices=Choices(
                structure=self.structure, structure_options=self.structure.options_from(self.structure_kwargs),
                precision_options=dict(precision_options or {}), backend_cls=checked_backend(backend),
                backend_kwargs=dict(backend_kwargs or {}), asdl_fisher_kwargs=dict(asdl_fisher_kwargs or {}),
                likelihood=likelihood, likelihood_object=get_likelihood(likelihood), forward_fn=forward_fn,
                dict_key_x=dict_key_x, dict_key_y=dict_key_y, channel_dim=channel_dim, pred_types=self.pred_types,
                weights_options=dict(weights_options or {}),
            ).reconciled(model),
            hypers=Hyperparameters.unit(zero_like(model)),
        )  # fmt: skip
        self.model = self._posterior.weights.shown(enable_backprop=self.enable_backprop)
        self._assign(
            sigma_noise=sigma_noise, temperature=temperature, prior_precision=prior_precision, prior_mean=prior_mean
        )

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuses classes of users that define what would have no effect.

        Raises:
            UnsupportedError: One does.
        """
        super().__init_subclass__(**options)
        overrides.check_class(cls, BaseLaplace)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses assignments that would be ignored; new attributes are free.

        Raises:
            ReadOnlyError: The attribute is computed, or never read.
        """
        overrides.check_assignment(self, name, value)
        try:
            super().__setattr__(name, value)
        except LaplaceError:
            raise
        except AttributeError as error:
            raise overrides.refused(self, name, error) from None

    def __getstate__(self) -> dict[str, Any]:
        """Attributes that are copied and pickled: nothing derived, and hyper-parameters without their graph."""
        now = self._posterior
        choices = now.choices.with_loss_of(now.cache.backend)
        copied = replace(now, choices=choices, hypers=now.hypers.detached(), cache=Cache())
        return self.__dict__ | {"_posterior": copied}

    # The one reference.

    def snapshot(self) -> Posterior:
        """An immutable copy of the posterior, which later assignments to this object do not change."""
        now = self._posterior
        now = now if now.data is None else replace(now, data=now.data.completed())
        return with_users_members(now, self)

    def set_posterior(self, posterior: Posterior) -> None:
        """Replaces the posterior of this object, e.g. by one of `snapshot()`."""
        self._posterior = posterior.without_object()
        posterior.weights.announce()

    @contextmanager
    def holding(self, posterior: Posterior) -> Iterator[Any]:
        """Context manager: this object with another posterior within the block, and its own one afterwards."""
        former = self._posterior
        self.set_posterior(posterior)
        try:
            yield self
        finally:
            self._posterior = former

    # What was chosen.

    likelihood_object = ChoiceAttribute[Likelihood]("The likelihood p(y | f), an object.", fixed=True)
    backend_cls = ChoiceAttribute[type[CurvatureInterface]]("Class that computes the curvature.")
    backend_kwargs = ChoiceAttribute[dict[str, Any]]("Keyword arguments of the backend's constructor.")
    asdl_fisher_kwargs = ChoiceAttribute[dict[str, Any]]("Keyword arguments that the ASDL backends pass on to ASDL.")
    forward_fn = ChoiceAttribute["ForwardFn | None"](
        "The `forward_fn` that was given; None for `model(x)`.", fixed=True
    )
    structure_options = ChoiceAttribute[Any]("Options of the structure, an object.")
    precision_options = ChoiceAttribute[dict[str, Any]]("Options of the structure's precision.")
    dict_key_x = ChoiceAttribute[str]("Key of the inputs, where batches are mappings.")
    dict_key_y = ChoiceAttribute[str]("Key of the targets, where batches are mappings.")

    @property
    def weights(self) -> Weights:
        """The choice of random weights."""
        return self._posterior.weights

    @property
    def channel_dim(self) -> int:
        """Dimension of the network's outputs that holds the C classes or values: -1 or 1."""
        return self._posterior.channel_dim

    @property
    def channels_known(self) -> bool:
        """True if `channel_dim` was given, or has been found from the shape of labels."""
        return self._posterior.choices.channel_dim is not None

    @property
    def problem(self) -> Problem:
        """The network and its random tensors, as backends use them.

        Raises:
            NotFittedError: The last layer is not known yet: call `fit`, or give `last_layer_name=`.
        """
        return self._posterior.problem

    @property
    def backend(self) -> CurvatureInterface:
        """The curvature backend, for direct calls such as `la.backend.jacobians(x)` and `la.backend.diag(x, y)`."""
        return self._posterior.backend

    @property
    def engine(self) -> CurvatureEngine:
        """The engine that computes Jacobians and curvature, made on first use."""
        return self._posterior.engine

    @property
    def params(self) -> list[Tensor]:
        """The parameter tensors of the model that are random under the posterior, in order."""
        return [self.problem.tensor(slot.name) for slot in self.problem.slots]

    @property
    def is_subset_params(self) -> bool:
        """True if some parameter of the model is frozen."""
        with model_lock(self.weights.model):
            return any(not p.requires_grad for p in self.weights.model.parameters())

    @property
    def n_params(self) -> int | None:
        """P, the number of random parameters; None while the last layer is not known yet."""
        return None if self.weights.problem is None else self.weights.problem.layout.n_params

    @property
    def n_layers(self) -> int | None:
        """Number of random parameter tensors; None while the last layer is not known yet."""
        return None if self.weights.problem is None else self.weights.problem.layout.n_tensors

    # Hyper-parameters.

    @property
    def prior_precision(self) -> Tensor:
        """δ, the inverse variance of the prior, `[1]`, `[n_tensors]` or `[P]`; can be assigned at any time."""
        return self._posterior.hypers.prior_precision

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        self._posterior = self._posterior.assigned(prior_precision=value)

    @property
    def prior_mean(self) -> Tensor:
        """μ₀, the mean of the prior, 0-dim, `[1]` or `[P]`; can be assigned."""
        return self._posterior.hypers.prior_mean

    @prior_mean.setter
    def prior_mean(self, value: float | Tensor) -> None:
        self._posterior = self._posterior.assigned(prior_mean=value)

    @property
    def sigma_noise(self) -> Tensor:
        """σ, the standard deviation of the observation noise, 0-dim or `[C]`; can be assigned."""
        return self._posterior.hypers.sigma_noise

    @sigma_noise.setter
    def sigma_noise(self, value: float | Tensor) -> None:
        self._posterior = self._posterior.assigned(sigma_noise=value)

    @property
    def temperature(self) -> Tensor:
        """T of the tempered likelihood p(y | f)^(1/T), 0-dim; can be assigned."""
        return self._posterior.hypers.temperature

    @temperature.setter
    def temperature(self, value: float | Tensor) -> None:
        self._posterior = self._posterior.assigned(temperature=value)

    def _assign(self, **given: float | Tensor) -> None:
        """Assigns hyper-parameters, those by setters of users' classes that have one."""
        members = {name: getattr(type(self), name) for name in given if is_overridden(self, name)}
        own = [name for name, member in members.items() if isinstance(member, property) and member.fset is not None]
        self._posterior = self._posterior.assigned(**{name: given[name] for name in given if name not in own})
        for name in own:
            setattr(self, name, given[name])

    # Evidence.

    @abstractmethod
    def fit(self, train_loader: Iterable[Any], override: bool = True, progress_bar: bool = False) -> None:
        """Fits the posterior to the data of a loader."""

    def evidence(self, prior_precision: Tensor | None = None, sigma_noise: Tensor | None = None) -> Evidence:
        """The terms of the log evidence, at the present hyper-parameters or at those that are given."""
        raise overrides.undefined(self, "evidence", "log_marginal_likelihood")

    def posterior(self) -> Precision:
        """The posterior precision P with its factorisation."""
        raise overrides.undefined(self, "posterior", "__call__")

    @property
    def log_likelihood(self) -> Tensor:
        """Log p(D | θ*), the log likelihood of the training data, 0-dim; differentiable in σ and T."""
        return self.evidence().log_likelihood.to(self._posterior.hypers.dtype)

    @property
    def scatter(self) -> Tensor:
        """(θ* − μ₀)ᵀ diag(δ) (θ* − μ₀), the prior's penalty at the trained weights, 0-dim."""
        return self.evidence().scatter.to(self._posterior.hypers.dtype)

    @property
    def log_det_ratio(self) -> Tensor:
        """Log det P − log det P₀ of the posterior and the prior precision, 0-dim."""
        if is_overridden(self, "log_det_posterior_precision", "log_det_prior_precision", "posterior_precision"):
            return self.log_det_posterior_precision - self.log_det_prior_precision
        return self.evidence().log_det_ratio.to(self._posterior.hypers.dtype)

    @property
    def log_det_prior_precision(self) -> Tensor:
        """Log det P₀ of the prior precision P₀ = diag(δ), 0-dim."""
        return self.evidence().effective_prior.logdet().to(self._posterior.hypers.dtype)

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """Log det P of the posterior precision, 0-dim."""
        return self._precision().logdet().to(self._posterior.hypers.dtype)

    def _precision(self) -> Precision:
        """P, with its graph, as users' classes override it."""
        return self.posterior() if is_overridden(self, "posterior_precision") else self.evidence().precision

    @checked
    def log_marginal_likelihood(
        self, prior_precision: Given = None, sigma_noise: Given = None, temperature: Given = None
    ) -> Tensor:
        """Log evidence (log marginal likelihood) of the training data, differentiable; higher is better.

        log p(D) ≈ log p(D | θ*) − ½ (log det P − log det P₀ + scatter)   (Daxberger et al., 2021, equation 6).

        Args:
            prior_precision: δ to evaluate at. It is also assigned to `la.prior_precision`, without its graph.
            sigma_noise: σ to evaluate at, also assigned (regression only).
            temperature: T to evaluate at, also assigned. Do not compare values at different T: the tempered likelihood
                p(y | f)^(1/T) is no normalised density.

        Returns:
            0-dim tensor, in nats.

        Raises:
            InvalidArgument: A value is not accepted, the likelihood has no observation noise, or the posterior is
                calibrated, so that its temperature is no evidence's.
            NotFittedError: Before `fit`.
        """
        if sigma_noise is not None and not self.likelihood_object.has_noise:
            raise InvalidArgument(f"sigma_noise: likelihood={self.likelihood_object.name!r} has no observation noise.")
        given = {"prior_precision": prior_precision, "sigma_noise": sigma_noise, "temperature": temperature}
        given = {name: value for name, value in given.items() if value is not None}
        if not given:
            with own_precision():
                return self._log_evidence()
        with self.holding(self._posterior), own_precision():
            self._assign(**given)
            value, there = self._log_evidence(), self._posterior
        self._posterior = there.at(there.hypers.detached(*given))
        return value

    def _log_evidence(self) -> Tensor:
        """Log p(D), 0-dim, of the terms as users' classes override them."""
        self._posterior.refuse_calibrated("log_marginal_likelihood")
        evidence = self.evidence()
        if not is_overridden(self, *overrides.EVIDENCE):
            return evidence.log_marginal_likelihood
        value = self.log_likelihood - 0.5 * (self.log_det_ratio + self.scatter + evidence.precision.slack())
        return value.to(self._posterior.hypers.dtype)

    @checked
    def marglik(self, prior_precision: Given = None, sigma_noise: Given = None, temperature: Given = None) -> Tensor:
        """The same as `log_marginal_likelihood`, under its name in the Laplace Redux paper."""
        more = {} if temperature is None else {"temperature": temperature}  # users' own evidences need not know it
        return self.log_marginal_likelihood(prior_precision, sigma_noise, **more)

    # Predictions.

    @abstractmethod
    def __call__(self, x: Inputs, pred_type: PredTypeName = PredType.GLM, **options: Any) -> Any:
        """Predictive distribution at x."""

    @checked
    def predictive(
        self, x: Inputs, pred_type: PredTypeName, link_approx: LinkName, n_samples: int
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`self(x, ...)` with positional options."""
        return self(x, pred_type=pred_type, link_approx=link_approx, n_samples=n_samples)


overrides.check_class(BaseLaplace, BaseLaplace)
