"""The object that users hold: what was chosen, hyper-parameters, evidence, fitting, moments, tuning and states.

`BaseLaplace` is the contract of every Laplace approximation, `ParametricLaplace` the base of all posteriors over
weights. Last come attributes of classes by their weights or structure; the classes are rows of a table: `grid.py`.
"""

from __future__ import annotations

import inspect
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar, cast, get_type_hints

import torch
from torch import Tensor, nn

from laplace import curvature
from laplace.core import batch as batches
from laplace.core import overrides
from laplace.core.arguments import CheckedConstructor, check_counts, checked
from laplace.core.batch import ForwardFn, Inputs
from laplace.core.hyperparameters import GaussianPrior, Hyperparameters
from laplace.core.overrides import COVARIANCES, is_overridden, require_positive, require_shape
from laplace.core.positions import channels_last
from laplace.core.registry import KeyedClasses
from laplace.enums import LikelihoodName, LinkApprox, LinkName, PredType, PredTypeName
from laplace.errors import InvalidArgument, LaplaceError, ReadOnlyError
from laplace.evidence import Evidence, finite_evidence
from laplace.likelihoods import get_likelihood
from laplace.likelihoods.base import Likelihood
from laplace.network.model_guard import model_lock, own_precision, require_module, zero_like
from laplace.network.watch import Fingerprint
from laplace.posterior.calibration import Calibration
from laplace.posterior.posterior import Cache, Choices, HyperparameterValue, Posterior, checked_backend
from laplace.predicting import PosteriorPredicting
from laplace.predictive.options import WEIGHT_SPACE, PredictiveNames
from laplace.saving import Saved
from laplace.structures.base import Curvature
from laplace.structures.fit import Fit
from laplace.structures.own import NoStructure
from laplace.structures.precision import Precision
from laplace.tunable import Tunable
from laplace.weights.base import AllWeights, Weights
from laplace.weights.last_layer import network_of
from laplace.weights.problem import Problem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from laplace.compat.kron import Kron
    from laplace.core.batch import WeightFn
    from laplace.curvature import CurvatureInterface
    from laplace.engines.engine import CurvatureEngine
    from laplace.large_fits.planning import FitPlan
    from laplace.predictive.predict import Predictor
    from laplace.refinement.leave_one_out import LeaveOneOut
    from laplace.refinement.result import Refinement
    from laplace.tuning.group import PosteriorGroup


Backend: TypeAlias = "type[curvature.CurvatureInterface] | None"
Options = dict[str, Any] | None
T = TypeVar("T")

_UNLISTED = frozenset([
    "H_facs", "asdl_fisher_kwargs", "backend_cls", "backend_kwargs", "channels_known", "check_unchanged",
    "curvature_of", "dict_key_x", "dict_key_y", "expansion_point", "fingerprint", "forward_fn",
    "functional_variance_fast", "holding", "is_subset_params", "likelihood_object", "log_det_posterior_precision",
    "log_det_prior_precision", "log_det_ratio", "marglik", "n_layers", "posterior_scale", "precision_options",
    "predict_batch", "pred_types", "predictive_posterior", "prior", "prior_precision_diag", "problem", "refinement",
    "restart_H", "scatter", "set_posterior", "square_norm", "start_fit", "structure_kwargs", "structure_options",
    "unrefined", "weights_type",
])  # fmt: skip
"""Members that `dir(la)` leaves out: parts of the contract, and of what extenders read, that nobody is to discover."""


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
            `[B, C]` and `[B, T, C]`, 1 for images `[B, C, H, W]`, 0 for outputs `[B]` of one number per datum. None:
            found from the shape of the targets at the first fit, by the convention of PyTorch's losses; where these do
            not tell, the last dimension.
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
        # Tools take the names in `__init__.__code__.co_varnames` for the arguments: there must be no other local.
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
        if overrides.is_ours(cls):
            overrides.remember(cls)
        else:
            from laplace.contract.by_hand import known_form

            overrides.check_class(cls, BaseLaplace, known_form)

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

    def __dir__(self) -> list[str]:
        """Names for users, without private ones and those for older scripts and for classes of users."""
        return [name for name in super().__dir__() if not name.startswith("_") and name not in _UNLISTED]

    # The one reference.

    def snapshot(self) -> Posterior:
        """An immutable copy of the posterior, which later assignments to this object do not change."""
        from laplace.contract.user_hooks import with_users_members

        now = self._posterior
        now = now if now.data is None else replace(now, data=now.data.completed())
        return with_users_members(now, self)

    def set_posterior(self, posterior: Posterior) -> None:
        """Replaces the posterior of this object, e.g. by one of `snapshot()`."""
        self._posterior = posterior.without_object()
        posterior.weights.set_extractor_head()

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
    backend_cls = ChoiceAttribute["type[CurvatureInterface]"]("Class that computes the curvature.")
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
        """Dimension of the network's outputs that holds the C classes or values: −1 or 1; 0 of outputs `[B]`."""
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
        """The posterior precision P with its factorisation; the posterior as a value is `snapshot()`."""
        raise overrides.undefined(self, "posterior", "__call__")

    @property
    def log_likelihood(self) -> Tensor:
        """Log p(D | θ*), the log likelihood of the training data, 0-dim; differentiable in σ and T."""
        return self.evidence().log_likelihood.to(self._posterior.hypers.dtype)

    @property
    def scatter(self) -> Tensor:
        """(θ̂ − μ₀)ᵀ diag(δ) (θ̂ − μ₀), the prior's penalty at the posterior mean, 0-dim."""
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
        self,
        prior_precision: HyperparameterValue | None = None,
        sigma_noise: HyperparameterValue | None = None,
        temperature: HyperparameterValue | None = None,
    ) -> Tensor:
        """Log evidence (log marginal likelihood) of the training data, differentiable; higher is better.

        log p(D) ≈ log p(D | θ*) − ½ (log det P − log det P₀ + scatter)   (Daxberger et al., 2021).

        Args:
            prior_precision: δ to evaluate at. It is also assigned to `la.prior_precision`, without its graph.
            sigma_noise: σ to evaluate at, also assigned (regression only).
            temperature: T to evaluate at, also assigned. Do not compare values at different T: the tempered likelihood
                p(y | f)^(1/T) is no normalised density.

        Returns:
            0-dim tensor, in nats.

        Raises:
            InvalidArgument: A value is not accepted, or the likelihood has no observation noise.
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
        self._posterior = there.at_hyperparameters(there.hypers.detached(*given))
        return value

    def _log_evidence(self) -> Tensor:
        """Log p(D), 0-dim, of the terms as users' classes override them."""
        evidence = self.evidence()
        if not is_overridden(self, *overrides.EVIDENCE):
            return finite_evidence(evidence.log_marginal_likelihood)
        value = self.log_likelihood - 0.5 * (self.log_det_ratio + self.scatter + evidence.precision.slack())
        return finite_evidence(value.to(self._posterior.hypers.dtype))

    @checked
    def marglik(
        self,
        prior_precision: HyperparameterValue | None = None,
        sigma_noise: HyperparameterValue | None = None,
        temperature: HyperparameterValue | None = None,
    ) -> Tensor:
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


overrides.remember(BaseLaplace)
# Other packages know this class by the name `laplace.baselaplace.BaseLaplace`, without an import: so it has that name.
# That module holds names alone: annotations are resolved here, and its `__file__` leads `inspect` to this source.
BaseLaplace.__annotations__ = get_type_hints(BaseLaplace)
BaseLaplace.__module__ = "laplace.baselaplace"
sys.modules[BaseLaplace.__module__].__file__ = __file__


# Posteriors over weights.


P = TypeVar("P", bound="ParametricLaplace")

CELLS: KeyedClasses[ParametricLaplace] = KeyedClasses()
"""Classes with a `_key`: the cells of the grid that have one."""


class ParametricLaplace(PosteriorPredicting, Saved, Tunable, BaseLaplace):
    """Base of all posteriors over weights; what `Laplace(...)` returns is of a class derived from it.

    The arguments are those of `BaseLaplace`.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Files a class with a `_key` of its own, by which `Laplace(...)` finds it."""
        super().__init_subclass__(**options)
        if "_key" in vars(cls):
            CELLS.add(vars(cls)["_key"], cls)

    # What the data say.

    @property
    def is_fitted(self) -> bool:
        """True after `fit` or `load_state_dict`."""
        return self._posterior.data is not None

    def fitted(self) -> Fit:
        """Curvature and loss of the training data; after `refine`, at the outputs of the linearised network.

        Raises:
            NotFittedError: Before `fit`.
        """
        return self._posterior.fit

    def unrefined(self) -> Fit:
        """Curvature and loss of the training data at the network's own outputs, also after `refine`.

        Raises:
            NotFittedError: Before `fit`.
        """
        return self._posterior.map_fit

    def _take_part(self, **part: Any) -> None:
        """Takes over an assigned part of a fit, in a loop by hand: `H`, `loss`, `n_data` and others."""
        from laplace.contract.manual_fit import with_parts

        self._posterior = with_parts(self._posterior, **part)

    @property
    def n_data(self) -> float:
        """Number of training data, without ignored labels; if they have weights, the sum of these. 0 before `fit`."""
        return 0 if self._posterior.data is None else self._posterior.data.source.n_data

    @n_data.setter
    def n_data(self, value: float) -> None:
        self._take_part(n_data=value)

    @property
    def n_outputs(self) -> int:
        """Number of outputs, C; 0 before `fit`."""
        return 0 if self._posterior.data is None else self._posterior.data.source.n_outputs

    @n_outputs.setter
    def n_outputs(self, value: int) -> None:
        self._take_part(n_outputs=value)

    @property
    def loss(self) -> float | Tensor:
        """Summed loss of the training data, 0-dim: the negative log likelihood at σ = T = 1, without constants.

        0 before `fit`.
        """
        return 0.0 if self._posterior.data is None else self._posterior.data.active_fit.loss_terms.sum()

    @loss.setter
    def loss(self, value: float | Tensor) -> None:
        self._take_part(loss=value)

    @property
    def H(self) -> Any:
        """Curvature of the training data at σ = T = 1: `[P, P]`, `[P]` (diagonal), or a `KronDecomposed`.

        It is zero before `fit`. It can be assigned, and summed in a loop by `la.H += …`, which makes no copies.
        """
        from laplace.contract.manual_fit import H_of

        return H_of(self._posterior)

    @H.setter
    def H(self, value: Any) -> None:
        self._take_part(H=value)

    @property
    def mean(self) -> Tensor | None:
        """Mean of the posterior, `[P]`: the trained weights θ*, after `refine` θ̂.

        Before `fit` it is the prior's mean, or None while the last layer is not known yet. An assigned mean is used by
        samples, densities and the evidence, not by linearised predictions. Reading it gives a copy.
        """
        return None if self._posterior.weights.problem is None else self._posterior.mean.clone()

    @mean.setter
    def mean(self, value: Tensor) -> None:
        self._take_part(mean=value)

    @property
    def fingerprint(self) -> Fingerprint | None:
        """Checksums of the network's weights at the fit, which tell later changes; None before `fit`."""
        return None if self._posterior.data is None else self._posterior.data.watch.fingerprint

    def check_unchanged(self) -> None:
        """Raises `ModelChangedError` if the network's weights, or its outputs at training data, changed since `fit`."""
        self._posterior.check_unchanged()

    def coverage(self) -> dict[str, str]:
        """Rule by which the curvature of each random tensor was computed, and the form in which it is stored, by name.

        Raises:
            NotFittedError: Before `fit`.
        """
        return dict(self.fitted().coverage)

    @property
    def expansion_point(self) -> Tensor:
        """θ*, the network's weights at `fit`, around which predictions are linearised, `[P]`.

        Raises:
            NotFittedError: Before `fit`.
        """
        return self._posterior.expansion_point

    @property
    def refinement(self) -> Refinement | None:
        """The result of the last `refine`; None without one, and again None after the next `fit`."""
        return self._posterior.refinement

    # Moments and evidence.

    @property
    def prior(self) -> GaussianPrior:
        """The prior N(μ₀, diag(δ)⁻¹) over the random parameters."""
        prior = GaussianPrior(self.prior_precision, self.prior_mean, self.problem.layout)
        if not is_overridden(self, "prior_precision_diag"):
            return prior
        values = require_shape(self, "prior_precision_diag", self.prior_precision_diag, (prior.layout.n_params,))
        return replace(prior, precision=require_positive(self, "prior_precision_diag", values.to(prior.precision)))

    @property
    def prior_precision_diag(self) -> Tensor:
        """Prior precision δ of every random parameter, `[P]`."""
        return GaussianPrior(self.prior_precision, self.prior_mean, self.problem.layout).diagonal()

    def evidence(self, prior_precision: Tensor | None = None, sigma_noise: Tensor | None = None) -> Evidence:
        from laplace.contract.user_hooks import with_users_values

        self._posterior.require_fitted()
        given = {"prior_precision": prior_precision, "sigma_noise": sigma_noise}
        other = {name: value for name, value in given.items() if value is not None}
        if not other:
            return with_users_values(self, self._posterior).evidence.asked_alone
        with self.holding(self._posterior.at_hyperparameters(replace(self._posterior.hypers, **other))):
            return self.evidence()

    def posterior(self) -> Precision:
        """The posterior precision P = s H + diag(δ) with its factorisation; of a GGN s = 1 / (σ² T).

        It is cached until a hyper-parameter or the fit changes; where a hyper-parameter requires a gradient it is
        computed at every call, with its graph.
        """
        from laplace.contract.user_hooks import precision_of_moment, with_users_values

        self._posterior.require_fitted()
        if is_overridden(self, "posterior_precision"):
            return precision_of_moment(self, "posterior_precision")
        if is_overridden(self, "evidence"):
            with own_precision():
                return self.evidence().precision
        return with_users_values(self, self._posterior).precision()

    def predictive_posterior(self) -> Precision:
        """The posterior precision that predictions and samples use, with overrides of your own class applied."""
        from laplace.contract.user_hooks import UsersPrecision, posterior_before

        precision, posterior = posterior_before(self, "functional_variance"), self.snapshot()
        return UsersPrecision(posterior, precision) if posterior.overrides(*COVARIANCES) else precision

    @property
    def posterior_precision(self) -> Any:
        """Posterior precision P: `[P, P]`, `[P]` (diagonal), or a `KronDecomposed`, whose `to_matrix()` is dense."""
        return self.evidence().precision.public

    @property
    def posterior_covariance(self) -> Tensor:
        """Posterior covariance P⁻¹, dense, `[P, P]`."""
        from laplace.contract.user_hooks import posterior_before

        return posterior_before(self, "posterior_covariance").covariance

    @property
    def posterior_variance(self) -> Tensor:
        """Posterior variance of every random parameter, the diagonal of P⁻¹, `[P]`."""
        from laplace.contract.user_hooks import posterior_before

        return posterior_before(self, "posterior_variance").diagonal_of_inverse()

    @property
    def posterior_scale(self) -> Tensor:
        """Root L of the posterior covariance, L Lᵀ = P⁻¹: triangular (full), symmetric (Kron) or `[P]` (diag).

        You may assign a root of your own, `[P, P]` or `[P]`. Predictions, samples and moments use it until a
        hyper-parameter or the data change; the evidence and `posterior_precision` do not.
        """
        from laplace.contract.user_hooks import posterior_before

        return posterior_before(self, "posterior_scale").scale

    @posterior_scale.setter
    def posterior_scale(self, root: Tensor) -> None:
        from laplace.contract.manual_fit import with_root

        self._posterior = with_root(self._posterior, root)

    def square_norm(self, value: Tensor) -> Tensor:
        """(θ − θ*)ᵀ P (θ − θ*) at weights θ, `[..., P]`; before `fit` with mean and precision of the prior."""
        return self._density().quad(self.problem.layout.checked(value) - self.snapshot().mean)

    def log_prob(self, value: Tensor, normalized: bool = True) -> Tensor:
        """Log density of the posterior at weights θ, `[..., P]` [Redux, appendix eq. 4]; before `fit` of the prior."""
        own = is_overridden(self, "square_norm")
        precision = self._density()
        value = self.problem.layout.checked(value)
        unnormalised = -0.5 * (self.square_norm(value) if own else precision.quad(value - self.snapshot().mean))
        if not normalized:
            return unnormalised
        own = is_overridden(self, "log_det_posterior_precision")
        logdet = self.log_det_posterior_precision if own else precision.logdet()
        normaliser = 0.5 * value.shape[-1] * math.log(2 * math.pi) - 0.5 * logdet
        return (unnormalised - normaliser).to(unnormalised.dtype)

    def _density(self) -> Precision:
        return self._precision() if self.is_fitted else self.structure.before_data(self.prior)

    # From data to the next posterior.

    @checked
    def fit(
        self,
        train_loader: Iterable[Any],
        override: bool = True,
        progress_bar: bool = False,
        *,
        decay: float = 1.0,
        subset: int | None = None,
        generator: torch.Generator | None = None,
        check_memory: bool = True,
        group: ProcessGroup | None = None,
        weight_fn: WeightFn | None = None,
        dict_key_weight: str | None = None,
    ) -> None:
        """Fits the posterior: one pass over the data sums their curvature at the network's trained weights.

        Args:
            train_loader: The training data: batches `(x, y)`, tuples `(x1, …, y)` or mappings with the key
                `dict_key_y`.
            override: Start from scratch; False adds these data to those of the former fit.
            progress_bar: Show a progress bar.
            decay: With `override=False`: factor in (0, 1] on the curvature and loss of all former data. The prior is
                not scaled.
            subset: M: estimate the curvature from M data drawn at random, scaled by N/M, which is unbiased (Immer et
                al., 2021, appendix A.3.1). The loss is still that of all N data. Costs one more pass over the loader.
            generator: Random generator of that draw; None for PyTorch's global one.
            check_memory: Raise `OutOfMemory` before a fit that needs more than the free memory (checked from 1 GiB on,
                under Linux and on CUDA).
            group: Process group of `torch.distributed`. Every process calls `fit` with a loader over its shard, and all
                get the sums over all data. Data that `DistributedSampler` repeats are counted once.
            weight_fn: Weights of the data in loss, curvature and `n_data`: `weight_fn(x, y)` returns `[B]`, at least 0,
                for a batch as the loader gives it; 0 leaves a datum out. In the shape of y they are of single targets.
                None: all weights are 1.
            dict_key_weight: Where batches are mappings: key of such weights. The model does not get that entry.

        Raises:
            OutOfMemory: The fit does not fit into memory; the message names choices that need less.
            InvalidData: A batch cannot be used. As after every error, the former posterior is kept.
            InvalidArgument: A hyper-parameter's length matches neither the random parameters nor the outputs; or
                `decay`, `subset`, `group` or the loader is not accepted.
            InvalidType: The loader cannot be iterated over, or targets are given as a second argument.
            ProcessError: Another process of the group failed, or has another network or other settings; all raise.
            UnsupportedError: The structure has no `decay`, `group` or weights of data.

        Warns:
            ApproximationWarning: Random outputs, several heads with a last layer, several processes without `group`,
                processes that read the same data, or many weights whose Kronecker factors would be too large.
        """
        from laplace.fitting.fit import FitOptions, fit

        options = FitOptions(
            override=override, progress_bar=progress_bar, decay=decay, subset=subset, generator=generator,
            check_memory=check_memory, group=group, weight_fn=weight_fn, dict_key_weight=dict_key_weight,
        )  # fmt: skip
        self.set_posterior(fit(self.snapshot(), train_loader, options))

    @checked
    def forget(
        self,
        loader: Iterable[Any],
        progress_bar: bool = False,
        *,
        weight: float = 1.0,
        group: ProcessGroup | None = None,
        weight_fn: WeightFn | None = None,
        dict_key_weight: str | None = None,
    ) -> None:
        """Removes data from the fit: subtracts their curvature, their loss and their number.

        The curvature is then that of a fit without these data. The mean stays, since it is the trained weights, which
        still depend on them; `laplace.forget_with_mean` moves it, too.

        Args:
            loader: Batches of data that were fitted before, at the network's present weights.
            progress_bar: Show a progress bar.
            weight: Weight of these data in the fit: 1, or `decay**k` if k later fits had that `decay`.
            group: As in `fit`.
            weight_fn: The weights with which the data were fitted, as in `fit`.
            dict_key_weight: The key of these weights, as in `fit`.

        Raises:
            NotFittedError: Before `fit`.
            ModelChangedError: The network's weights are no longer those of the fit.
            InvalidData: More data than were fitted, or data that cannot be used.
            CurvatureError: The curvature would be indefinite: these data were not fitted.
            InvalidArgument: The mean was moved before, by `laplace.forget_with_mean`.
            UnsupportedError: The structure is no sum over data, or its curvature is a random estimate. After every
                error the former posterior is kept.
        """
        from laplace.fitting.fit import FitOptions, forget

        self._posterior.require_fitted()
        batches.require_loader(loader, "loader")
        options = FitOptions.of_removal(
            weight, progress_bar=progress_bar, group=group, weight_fn=weight_fn, dict_key_weight=dict_key_weight
        )
        before = self.snapshot()
        before.refuse_moved("forget", "take laplace.forget_with_mean")
        self.set_posterior(forget(before, loader, options))

    @checked
    def plan(self, train_loader: Iterable[Any]) -> FitPlan:
        """Estimates the memory of `fit` and of a prediction from the first batch; fits nothing.

        If the last layer is not known yet, it is determined as in `fit`.

        Args:
            train_loader: The loader that `fit` would be given; one batch of it is read.

        Raises:
            InvalidArgument: The loader can be read only once: a fit would miss that batch.
            InvalidData: The loader gives no data.
            UnsupportedError: A backend or structure of your own that has no estimate of its cost.
        """
        from laplace.large_fits.planning import plan

        posterior, planned = plan(self._posterior, train_loader)
        self.set_posterior(posterior)
        return planned

    @checked
    def refine(
        self,
        loader: Iterable[Any],
        method: Literal["map", "variational"] = "map",
        *,
        max_steps: int = 100,
        tolerance: float | None = None,
        n_samples: int = 200,
        generator: torch.Generator | None = None,
        progress_bar: bool = False,
    ) -> Refinement:
        """Improves the posterior by exact inference in the linearised network, f(x, θ*) + J (θ − θ*).

        The trained weights θ* are the mode of the linearised model only if training converged. `"map"` finds its mode
        θ̂ (a convex problem) and the curvature there, in the posterior's structure. `"variational"` finds the Gaussian
        of this structure (full, block, Kronecker-factored or diagonal) that maximises the evidence lower bound (Immer
        et al., 2021, appendices A.3.2 and B.3). A Gaussian process (`"gp"`) is refined in function space, on its subset
        of M data. Hyper-parameters stay as they are.
        Afterwards predictions with `pred_type="glm"` have the mean f(x, θ*) + J (θ̂ − θ*); the evidence is
        log p(D | f_lin(θ̂)) − ½ (log det P − log det P₀ + (θ̂ − μ₀)ᵀ P₀ (θ̂ − μ₀)). The next `fit` undoes it.

        Args:
            loader: All data of the fit; they are read once and kept in memory (for `"gp"` only M of them).
            method: `"map"` or `"variational"`.
            max_steps: Largest number of Newton steps, or of updates of the variational covariance.
            tolerance: Distance to the mode in posterior standard deviations, or relative change of the bound, at which
                to stop; None for what floating-point precision allows.
            n_samples: Number of samples in expectations under softmax likelihoods (others use quadrature).
            generator: Random generator of these samples; None for seed 0.
            progress_bar: Show a progress bar.

        Returns:
            Number of steps and whether it converged; also `la.refinement`.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: An unknown method, or options that are not accepted.
            InvalidData: The data are not those of the fit.
            UnsupportedError: A backend other than this library's GGN, or a structure without a variational form.
                After every error the former posterior is kept.

        Warns:
            ApproximationWarning: It did not converge.
        """
        from laplace.refinement.linear_model import RefineOptions
        from laplace.refinement.refine import refine

        options = RefineOptions(max_steps, tolerance, n_samples, generator, progress_bar)
        posterior = self.snapshot().without_calibration("refine")
        refinement = refine(posterior, loader, method, options)
        self.set_posterior(posterior.with_refinement(refinement))
        return refinement

    @checked
    def leave_one_out(
        self, loader: Iterable[Any], *, link_approx: LinkName = LinkApprox.PROBIT, progress_bar: bool = False
    ) -> LeaveOneOut:
        """Predictions of every input of the fit without that input, from the fit alone (Nickl et al., 2023).

        One Newton step in the linearised model per input; for squared loss and full curvature it is a fit to all other
        inputs. Scores of two posteriors that differ in their prior compare them without validation data, each at the
        mode of its own prior (`la.refine`). Compare them with each other, not with scores on a test set.

        Args:
            loader: All data of the fit, in any order; the result is in that of the loader.
            link_approx: Link approximation of the score of classes, one that does not draw.
            progress_bar: Show a progress bar.

        Raises:
            NotFittedError: Before `fit`.
            InvalidArgument: A link that is not accepted.
            InvalidData: The data are not those of the fit.
            UnsupportedError: A structure that does not hold all that an input adds (`"diag"`, low ranks, subsets of the
                data), Kronecker factors from which more than 1 % of the inputs cannot be removed, another backend than
                this library's GGN, outputs with positions, or a likelihood without a score in closed form.

        Warns:
            ApproximationWarning: The mean is far from the mode of the prior.
        """
        from laplace.refinement.leave_one_out import leave_one_out

        return leave_one_out(self.snapshot(), loader, link_approx, progress_bar=progress_bar)

    # Fits by hand: a loop of your own instead of `fit`.

    @checked
    def start_fit(self) -> None:
        """Starts a fit in a loop of your own: sets H, loss, `n_data` and `n_outputs` to zero, at the present weights.

        Example:
            la.start_fit()
            for x, y in loader:
                loss, H = la.curvature_of(x, y, n_data)
                la.loss += loss
                la.H += H
            la.n_data, la.n_outputs = n_data, n_outputs

        Raises:
            NotFittedError: The last layer is not known yet: give `last_layer_name=`.
            UnsupportedError: The structure has no curvature that could be summed by hand.
        """
        from laplace.contract.manual_fit import without_data

        self._posterior = without_data(self._posterior.without_calibration("start_fit"))

    @checked
    def restart_H(self) -> None:
        """Sets only H to zero, at the network's present weights; loss, `n_data` and `la.H_facs` keep their values.

        From then on `la.H_facs` is stored apart from H, for loops that add new factors to those of former data.

        Raises:
            NotFittedError: The last layer is not known yet: give `last_layer_name=`.
            UnsupportedError: The structure has no curvature that could be summed by hand.
        """
        from laplace.contract.manual_fit import restarted

        former = self._posterior.data
        self.start_fit()
        self._posterior = restarted(self._posterior, former)

    @checked
    def curvature_of(self, x: Inputs, y: Tensor, n_data: int) -> tuple[Tensor, Any]:
        """Loss and curvature of one batch, as in `fit`; sum them over all batches.

        Args:
            x: Inputs of the batch.
            y: Targets of the batch.
            n_data: N, the number of data in all batches together, by which Kronecker factors are normalised: the sum of
                `len(y)`, however many tokens or pixels and ignored labels there are.

        Returns:
            The negative log likelihood at σ = T = 1, 0-dim, and H in the form of `la.H` (a `Kron` for Kronecker
            factors).

        Raises:
            InvalidData: A batch that cannot be used.
            NotFittedError: The last layer is not known yet: give `last_layer_name=`.
            UnsupportedError: The structure has no curvature that could be summed by hand.
        """
        from laplace.contract.manual_fit import batch_of
        from laplace.fitting.fit import infer_channels

        check_counts(n_data=n_data)
        self._posterior = infer_channels(self._posterior.with_backend_loss(), x, y)
        return batch_of(self._posterior, x, y, n_data)

    # Predictions and tuning.

    @property
    def _predictor(self) -> Predictor:
        from laplace.predictive.predict import Predictor

        return Predictor(self.snapshot().predictive(), self.enable_backprop)

    @property
    def _group(self) -> PosteriorGroup:
        from laplace.tuning.group import PosteriorGroup

        return PosteriorGroup((self.snapshot(),))

    @property
    def _calibration(self) -> Calibration | None:
        return self._posterior.calibration

    def _take_over(self, posteriors: tuple[Posterior, ...]) -> None:
        (posterior,) = posteriors
        self.set_posterior(posterior)

    # States.

    def state_dict(self) -> dict[str, Any]:
        """The posterior as a dictionary of tensors, numbers and strings, without the weights of the model.

        Raises:
            NotFittedError: Before `fit`.
        """
        from laplace.state import save as state_of

        return state_of(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces this posterior by a saved one of the same model, as `state_dict` returned it.

        Raises:
            StateError: The state belongs to another class, model, likelihood or choice of weights.
        """
        from laplace.state import loaded

        self.set_posterior(loaded(self, state_dict))
        self.enable_backprop = state_dict["enable_backprop"]

    @property
    def _recipe(self) -> dict[str, Any]:
        from laplace.recipe import Recipe

        return Recipe.from_object(self).plain()

    @property
    def _holding_inputs(self) -> list[str]:
        return [self.structure.name] if self.structure.saves_inputs(self._posterior.choices.structure_options) else []

    def to(self: P, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> P:
        """Moves the posterior and the model to a device or dtype, in place, as `nn.Module.to`; returns itself."""
        from laplace.state import moved_with_model

        self.set_posterior(moved_with_model(self, device, dtype))
        return self

    def __repr__(self) -> str:
        from laplace.state import describe

        return describe(self)

    # Private names of laplace-torch that public code reads.

    def _init_H(self) -> None:
        self.restart_H()

    def _curv_closure(self, X: Inputs, y: Tensor, N: int) -> tuple[Tensor, Any]:
        return self.curvature_of(X, y, N)

    def _check_H_init(self) -> None:
        self.fitted()

    @staticmethod
    def _rescale_factors(kron: Kron, factor: float) -> Kron:
        """Factors of which those on the input side, the last of two, are scaled."""
        return type(kron)([[*block[:-1], factor * block[-1]] if len(block) == 2 else block for block in kron.kfacs])

    @property
    def _posterior_scale(self) -> Tensor:
        return self.posterior_scale

    @_posterior_scale.setter
    def _posterior_scale(self, root: Tensor) -> None:
        self.posterior_scale = root

    def _glm_predictive_distribution(
        self, X: Inputs, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        return self.predictive_moments(X, joint=joint, diagonal_output=diagonal_output)

    def _nn_functional_samples(
        self, X: Inputs, n_samples: int = 100, generator: torch.Generator | None = None, **model_kwargs: Any
    ) -> Tensor:
        return self.functional_samples(X, "nn", n_samples, generator=generator, **model_kwargs)

    def _nn_predictive_samples(
        self, X: Inputs, n_samples: int = 100, generator: torch.Generator | None = None, **model_kwargs: Any
    ) -> Tensor:
        return self.predictive_samples(X, "nn", n_samples, generator=generator, **model_kwargs)

    @property
    def _H_factor(self) -> Tensor:
        """1/(σ²T): what the curvature of a GGN is multiplied with in the precision."""
        return 1 / (self.sigma_noise.square() * self.temperature)

    @property
    def _asdl_fisher_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of ASDL: `{}` without any, so that they can be passed on to every backend."""
        return dict(self.asdl_fisher_kwargs)

    @property
    def _device(self) -> torch.device:
        return self.prior_precision.device

    @property
    def _dtype(self) -> torch.dtype:
        return self.prior_precision.dtype


# Constructors of the classes that have names, and attributes that they have by their weights or their structure.


COMMON = frozenset(inspect.signature(BaseLaplace.__init__).parameters)
"""Names of the common constructor's arguments."""

PRECISION_OPTIONS = frozenset({"damping"})
"""Names of arguments that are options of the structure's precision."""


class NamedPosterior(ParametricLaplace):
    """Base of the classes whose constructor is made from the table: they differ in the order of their arguments."""

    def _construct(self, given: Mapping[str, Any]) -> None:
        """Calls the common constructor with all arguments of another one, by name, `self` included.

        What the common constructor does not have is an option: of the choice of weights, where `Weights.arguments`
        names it, of the precision, or else of the structure.
        """
        from laplace.structures.kron import checked_damping

        common: dict[str, Any] = {name: value for name, value in given.items() if name in COMMON}
        own = {name: value for name, value in given.items() if name not in COMMON}
        renamed = self.weights_type.arguments
        options = {
            "weights_options": {renamed[name]: own.pop(name) for name in renamed if name in own},
            "precision_options": {name: checked_damping(own.pop(name)) for name in PRECISION_OPTIONS if name in own},
            "structure_kwargs": own,
        }
        for name, values in options.items():
            common[name] = values | (common.get(name) or {})
        BaseLaplace.__init__(**common)


class LastLayerAttributes(NamedPosterior):
    """What every posterior over a last layer has.

    Args:
        feature_reduction: How the features of a sequence, `[B, T, D]`, become `[B, D]`: `"pick_first"`, `"pick_last"`
            or `"average"`; None if the model does that itself.
        last_layer_name: Name of the last layer, linear or convolutional; None to determine it at `fit`.
    """

    def _construct(self, given: Mapping[str, Any]) -> None:
        _refuse_asdl_kwargs(given)
        super()._construct(given)

    last_layer_name = property(attrgetter("weights.name"), doc="Name of the last layer; None while it is not known.")
    feature_reduction = property(attrgetter("weights.reduction"), doc="The `feature_reduction` that was given.")


_DAMPING = property(lambda la: la.precision_options["damping"], doc="The `damping` that was given, or False.")


class SubnetworkAttributes(NamedPosterior):
    """What every posterior over a subnetwork has.

    Args:
        subnetwork_indices: Indices of the weights with a distribution in the flattened trainable parameters, `[p]`,
            int64, distinct. The masks of `laplace.utils` compute them.
        damping: As in `KronLaplace`, with `hessian_structure="kron"`.
    """

    def _construct(self, given: Mapping[str, Any]) -> None:
        _refuse_asdl_kwargs(given)
        from laplace.structures.kron import KronCurvature

        if given["damping"] and not issubclass(self.structure, KronCurvature):
            raise InvalidArgument(
                f"damping=True is a Kronecker-factored posterior's; hessian_structure={self.structure.name!r} has none."
            )
        super()._construct(given)

    subnetwork_indices = property(
        attrgetter("weights.indices"), doc="Indices of the weights of the subnetwork, as they were given, `[p]`."
    )
    n_params_subnet = property(attrgetter("n_params"), doc="Number of weights of the subnetwork, p.")
    mean_subnet = property(attrgetter("mean"), doc="Trained values θ* of the weights of the subnetwork, `[p]`.")
    assemble_full_samples = property(
        attrgetter("weights.embed"), doc="Function from samples `[S, p]` to samples of all trainable parameters."
    )
    damping = _DAMPING


def _refuse_asdl_kwargs(given: Mapping[str, Any]) -> None:
    """Options of ASDL would not be read."""
    if given.get("asdl_fisher_kwargs"):
        raise InvalidArgument(
            "asdl_fisher_kwargs is only read by all-weights posteriors with an ASDL backend; pass backend_kwargs."
        )


class KronAttributes(NamedPosterior):
    """What every posterior with Kronecker factors has.

    Args:
        damping: False for the exact prior, P = s B ⊗ A + δ. Otherwise P = (√s B + √δ) ⊗ (√s A + √δ), a cheaper form
            (Ritter et al., 2018), with Kronecker factors normalised differently: True, B is a sum over the data and A a
            mean; `"mean"`, both are √N times means, as in that paper; `"sum"`, both are sums (Immer et al., 2021).
    """

    damping = _DAMPING

    @property
    def H_facs(self) -> Any:
        """Kronecker factors of H, a `Kron`, or None; assigning them also assigns H."""
        from laplace.compat.kron import Kron  # legacy values are imported by those who use them

        fit = None if self._posterior.data is None else self._posterior.data.factors_fit
        if fit is None or fit.H is None:
            return None
        return fit.H if isinstance(fit.H, Kron) else fit.complete.H.factors

    @H_facs.setter
    def H_facs(self, value: Any) -> None:
        self._take_part(H_facs=value)


class LowRankAttributes(NamedPosterior):
    """What every posterior with the dominant eigenpairs of the curvature has."""

    def _construct(self, given: Mapping[str, Any]) -> None:
        others = dict(given["backend_kwargs"] or {})
        if "low_rank" in others:  # the place of the rank in older scripts
            rank = {"rank": others.pop("low_rank")}
            given = {**given, "backend_kwargs": others, "structure_kwargs": rank | (given["structure_kwargs"] or {})}
        super()._construct(given)

    @property
    def residual(self) -> float:
        """‖H U − U Λ‖ / ‖Λ‖ of the eigenpairs (U, Λ); 0 if they are exact.

        Raises:
            NotFittedError: Before `fit`.
        """
        return self.fitted().curvature.residual
