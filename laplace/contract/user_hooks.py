"""Members of users' classes that take effect in place of the library's.

What a user overrides changes all that follows from it, as in the chain

    prior_precision_diag → posterior_precision → posterior_scale → posterior_covariance → functional_variance, sample, …

A method of the library reads the chain up to its own link, so that `super().functional_variance(Js)` is what would
be computed without the override. `with_users_members` finds the members once per snapshot; from then on a
`UsersPosterior` asks the user's object for them, while that has the posterior at hand for its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from laplace.contract.by_hand import TensorByHand, known_form
from laplace.contract.fixed_root import FixedRootPrecision
from laplace.contract.manual_fit import H_of, checked_H, with_parts, without_data
from laplace.contract.users_predictions import users_outputs, users_samples
from laplace.core import linalg
from laplace.core.batch import Inputs
from laplace.core.gaussian import centred_variance, covariance_root
from laplace.core.hyperparameters import Hyperparameters
from laplace.core.overrides import (
    COVARIANCES,
    EVIDENCE,
    HYPERPARAMETERS,
    MOMENTS,
    POSTERIOR,
    PREDICTIONS,
    is_overridden,
    overridden,
    require_positive,
    require_shape,
    wrong_shape,
)
from laplace.core.precision_policy import widened
from laplace.core.random_numbers import seeded
from laplace.curvature.user_backend import summarised, users_call
from laplace.engines.engine import BatchSummary, CurvatureEngine
from laplace.enums import PredType
from laplace.errors import CurvatureError, InvalidArgument, UnsupportedError
from laplace.evidence import Evidence
from laplace.jacobian.jacobian import Jacobian
from laplace.posterior.posterior import Posterior, WeightSampler
from laplace.predictive.options import PredictOptions
from laplace.predictive.prediction import OutputSampler, PosteriorOutputs
from laplace.structures.base import Curvature, DataPass
from laplace.structures.diag import DiagCurvature
from laplace.structures.fit import Fit
from laplace.structures.precision import Form, Precision

if TYPE_CHECKING:
    from laplace.compat.kron import KronDecomposed

T = TypeVar("T")


# The posterior of an object with members of its user.


@dataclass(frozen=True, eq=False)
class UsersPosterior(Posterior):
    """A posterior of an object whose class has members of a user's."""

    la: Any = field(kw_only=True, repr=False)
    users: frozenset[str] = field(kw_only=True)  # Names of these members

    def without_object(self) -> Posterior:
        return Posterior(**{each.name: getattr(self, each.name) for each in fields(Posterior)})

    def overrides(self, *names: str) -> bool:
        return not self.users.isdisjoint(names)

    def as_user_object(self) -> AbstractContextManager[Any]:
        return self.la.holding(self)

    def _answer(self, question: Callable[[Any], T]) -> T:
        """What the user's object says while it holds this posterior."""
        with self.as_user_object() as la:
            return question(la)

    @property
    def mean(self) -> Tensor:
        return self._answer(lambda la: la.mean) if "mean" in self.users else super().mean

    @property
    def sigma_noise(self) -> Tensor:
        return self._answer(lambda la: la.sigma_noise) if "sigma_noise" in self.users else super().sigma_noise

    @property
    def evidence(self) -> Evidence:
        return self._answer(lambda la: la.evidence()) if self.overrides(*HYPERPARAMETERS) else super().evidence

    def log_evidence(self) -> Tensor:
        if not self.overrides("log_marginal_likelihood", *EVIDENCE):
            return super().log_evidence()
        return self._answer(lambda la: la.log_marginal_likelihood())

    def precision(self) -> Precision:
        if not self.overrides("posterior", "posterior_precision", *HYPERPARAMETERS):
            return super().precision()
        return self._answer(lambda la: la.posterior())

    def precision_before(self, name: str) -> Precision:
        return self._answer(lambda la: posterior_before(la, name)) if self.overrides(*POSTERIOR) else self.precision()

    def predictive_precision(self) -> Precision:
        return self._answer(lambda la: la.predictive_posterior()) if self.overrides(*POSTERIOR) else self.precision()

    @property
    def follows_hyperparameters(self) -> bool:
        if not self.overrides(*HYPERPARAMETERS):
            return super().follows_hyperparameters
        values = self._answer(lambda la: (la.prior.precision, la.sigma_noise, la.temperature))
        return any(value.requires_grad for value in values)

    @property
    def keeps_graph(self) -> bool:
        return torch.is_grad_enabled() and (self.overrides(*MOMENTS, *COVARIANCES) or self.follows_hyperparameters)

    def users_samples(
        self, name: str, x: Inputs, kind: PredType, asked: PredictOptions, model_kwargs: dict[str, Any]
    ) -> OutputSampler:
        return users_samples(self, name, x, kind, asked, model_kwargs)

    def with_users_outputs(
        self, outputs: PosteriorOutputs, x: Inputs, kind: PredType, model_kwargs: dict[str, Any]
    ) -> PosteriorOutputs:
        return users_outputs(self, outputs, x, kind, model_kwargs) if self.overrides(*PREDICTIONS) else outputs

    def users_pass(self, engine: CurvatureEngine, n_data: int) -> DataPass:
        return HookedPass(self, engine, n_data)

    def sampler(self) -> WeightSampler:
        return self._users_samples if "sample" in self.users else super().sampler()

    def _users_samples(self, n_samples: int, generator: torch.Generator | None) -> Tensor:
        n_params, weights = self.problem.layout.n_params, self.weights
        with self.as_user_object() as la:
            samples = seeded(la.sample, generator)(n_samples)
            if not isinstance(samples, Tensor) or samples.ndim != 2 or len(samples) != n_samples:
                raise wrong_shape(la, "sample", samples, f"[{n_samples}, P]")
            samples = samples.to(la.mean)
            if samples.shape[1] != n_params:  # of a subnetwork: of all trainable parameters
                samples = torch.stack([weights.restrict_prior(sample) for sample in samples])
            if samples.shape[1] != n_params:
                raise wrong_shape(la, "sample", samples, f"[{n_samples}, P], P = {n_params}")
        return samples


def with_users_members(posterior: Posterior, la: Any) -> Posterior:
    """The posterior with the members that the class of a user's object defines; itself where there are none."""
    users = overridden(type(la))
    if not users:
        return posterior
    parts = {each.name: getattr(posterior, each.name) for each in fields(Posterior)}
    return UsersPosterior(**parts, la=la, users=users)


# Links of the chain, as an object has them.


def posterior_before(la: Any, name: str) -> Precision:
    """The posterior with what users override of the moments that come before `name`."""
    links = MOMENTS[: MOMENTS.index(name)] if name in MOMENTS else MOMENTS
    for link in reversed(links[1:]):  # the first is that of `la.posterior()`
        # Variances say everything of a diagonal posterior only.
        if is_overridden(la, link) and (link != "posterior_variance" or issubclass(la.structure, DiagCurvature)):
            return precision_of_moment(la, link)
    return la.posterior()


def with_users_values(la: Any, plain: Posterior) -> Posterior:
    """The library's posterior of an object with the data, mean and hyper-parameters that users' members give."""
    if not is_overridden(la, *HYPERPARAMETERS):
        return plain
    prior = la.prior
    hypers = Hyperparameters(prior.precision, prior.mean, la.sigma_noise, la.temperature)
    source = _users_fit(la, plain)
    data = replace(plain.require_fitted(), source=source, assigned_mean=la.mean, refinement=None)
    return replace(plain, hypers=hypers, data=data)


def _users_fit(la: Any, plain: Posterior) -> Fit:
    fit, structure = plain.fit, plain.choices.structure
    if is_overridden(la, "loss"):
        terms = fit.loss_terms
        if la.sigma_noise.numel() > 1:
            raise UnsupportedError(
                f"class {type(la).__name__} overrides loss, of which one noise per output takes one per output; use "
                "one noise, or override log_likelihood."
            )
        fit = replace(fit, loss_terms=(torch.as_tensor(la.loss).to(terms) / terms.numel()).expand(terms.shape))
    fit = replace(fit, **{name: getattr(la, name) for name in ("n_data", "n_outputs") if is_overridden(la, name)})
    if is_overridden(la, "H"):
        form = known_form(structure)
        if not isinstance(form, TensorByHand):
            raise UnsupportedError(
                f"class {type(la).__name__} overrides H, which is no tensor for hessian_structure="
                f"{structure.name!r}; override posterior_precision, or write a structure."
            )
        values = require_shape(la, "H", la.H, form.shape(plain.problem))
        values = values.to(plain.hypers.prior_mean.detach())
        fit = replace(fit, curvature=structure.from_state({"values": values.unsqueeze(0)}))
    return fit


@dataclass(frozen=True)
class UsersPrecision(Precision):
    """A precision whose covariances of outputs are users' own; they are given dense Jacobians, a few data at a time."""

    posterior: Posterior  # The posterior that their methods are called at, with the object that has them
    precision: Precision

    def variance(self, jacobian: Jacobian, form: Form) -> Tensor:
        if form == "joint":
            if not self.posterior.overrides("functional_covariance"):
                return self.precision.variance(jacobian, form)
            return self._users_covariance(jacobian.dense())
        if form == "diagonal":
            if not self.posterior.overrides("functional_variance"):
                return self.precision.variance(jacobian, form)
            return self.variance(jacobian, "full").diagonal(dim1=1, dim2=2)
        if jacobian.group_size > 1 and self.posterior.overrides("functional_covariance"):
            groups = (group for piece in jacobian.pieces() for group in piece)
            return torch.stack([self._users_covariance(g.unflatten(0, (jacobian.group_size, -1))) for g in groups])
        if not self.posterior.overrides("functional_variance"):
            return self.precision.variance(jacobian, form)
        shape = (jacobian.n_cotangents, jacobian.n_cotangents)
        parts: list[Tensor] = []
        with self.posterior.as_user_object() as la:
            for piece in jacobian.pieces():
                values = require_shape(la, "functional_variance", la.functional_variance(piece), (len(piece), *shape))
                parts.append(values.to(piece.dtype))
        return torch.cat(parts)

    def centred_variance(self, jacobian: Jacobian) -> Tensor:
        if not self.posterior.overrides("functional_variance"):
            return self.precision.centred_variance(jacobian)
        return centred_variance(self.variance(jacobian, "full"))

    def _users_covariance(self, dense: Tensor) -> Tensor:
        """A user's own covariance of rows `[B, C, P]`, `[B·C, B·C]`."""
        n = dense.shape[:2].numel()
        with self.posterior.as_user_object() as la:
            return require_shape(la, "functional_covariance", la.functional_covariance(dense), (n, n)).to(dense.dtype)

    def logdet(self) -> Tensor:
        return self.precision.logdet()

    def logdet_ratio(self) -> Tensor:
        return self.precision.logdet_ratio()

    def quad(self, vectors: Tensor) -> Tensor:
        return self.precision.quad(vectors)

    def power(self, vectors: Tensor, exponent: float) -> Tensor:
        return self.precision.power(vectors, exponent)

    def n_noise(self, n_params: int) -> int:
        return self.precision.n_noise(n_params)

    def diagonal_of_inverse(self) -> Tensor:
        return self.precision.diagonal_of_inverse()

    def to_dense(self) -> Tensor:
        return self.precision.to_dense()

    @property
    def public(self) -> Any:
        return self.precision.public

    @property
    def covariance(self) -> Tensor:
        return self.precision.covariance

    @property
    def scale(self) -> Tensor:
        return self.precision.scale


def precision_of_moment(la: Any, name: str) -> Precision:
    """The posterior by one of `MOMENTS` as a user computes it."""
    from laplace.compat.kron import Kron, KronDecomposed  # needed by nobody else who imports the library

    value = getattr(la, name)
    if isinstance(value, Precision):
        return value
    posterior = la.snapshot()
    if isinstance(value, KronDecomposed) and (factored := _by_factors(la, posterior, name, value)) is not None:
        return factored
    if isinstance(value, Kron | KronDecomposed):
        value = value.to_matrix()
    elif isinstance(value, tuple) and posterior.choices.structure.name == "lowrank":
        (vectors, values), delta = value
        value = (vectors * values) @ vectors.T + torch.diag(delta)
    n = posterior.problem.layout.n_params
    square = name == "posterior_covariance"
    accepted = ((n, n),) if square else ((n,),) if name == "posterior_variance" else ((n, n), (n,))
    if not isinstance(value, Tensor) or tuple(value.shape) not in accepted:
        raise wrong_shape(la, name, value, " or ".join(str(list(shape)) for shape in accepted))
    value = value.to(posterior.hypers.dtype)
    if name == "posterior_scale":
        return FixedRootPrecision(value)
    if name == "posterior_variance":
        return FixedRootPrecision(require_positive(la, name, value).sqrt())
    if square:
        return FixedRootPrecision(covariance_root(value.unsqueeze(0))[0])
    if value.ndim == 1:
        return FixedRootPrecision(require_positive(la, name, value).rsqrt())
    factor = linalg.cholesky(0.5 * widened(value + value.T).flip(0, 1))
    if factor is None:
        raise InvalidArgument(f"{name} of class {type(la).__name__} is not positive definite.")
    return FixedRootPrecision(linalg.covariance_factor(factor).to(value.dtype))


def _by_factors(la: Any, posterior: Posterior, name: str, value: KronDecomposed) -> Precision | None:
    """The posterior without a dense matrix, where the fit's curvature has a block for every tensor; else None."""
    from laplace.contract.users_precision import precision_of_factors
    from laplace.structures.kron import KronCurvature

    curvature, layout = posterior.fit.curvature, posterior.problem.layout
    if not isinstance(curvature, KronCurvature) or tuple(map(math.prod, value.shapes)) != layout.sizes:
        return None
    try:
        return precision_of_factors(value, curvature.parts.blocks, layout, posterior.hypers.dtype)
    except CurvatureError as error:
        raise InvalidArgument(f"{name} of class {type(la).__name__} is not positive definite.") from error


# Fits.


class HookedPass(DataPass):
    """A reading of the data as a loop by hand, in which a user's method computes loss and curvature of every batch.

    Args:
        posterior: Of an object whose class has the methods; it has the sums so far for its posterior.
        engine: Counts data, and computes what the methods leave to the library.
        n_data: N, as the methods are told it.

    Raises:
        UnsupportedError: One noise per output, for which such methods keep no terms.
    """

    def __init__(self, posterior: Posterior, engine: CurvatureEngine, n_data: int) -> None:
        if engine.split_outputs:
            raise UnsupportedError(
                "sigma_noise holds one noise per output, for which the curvature of a user's _curv_closure has no "
                "terms; give one noise."
            )
        self.engine, self.n_data = engine, n_data
        with without_data(posterior).as_user_object() as la:
            la._init_H()
            self.la, self.summed = la, la._posterior

    def add(self, x: Inputs, y: Tensor) -> BatchSummary:
        with self.la.holding(self.summed), users_call(self.engine.problem.module):
            loss, H = self.la._curv_closure(x, y, self.n_data)
            now: Posterior = self.la._posterior
        summary = summarised(self.engine, x, y, torch.as_tensor(loss), "a _curv_closure")
        total, n_data = H_of(now), now.require_fitted().source.n_data + summary.count
        total += checked_H(now, H)
        self.summed = with_parts(now, H=total, n_data=n_data)
        return summary

    def finish(self) -> Curvature:
        return self.summed.fit.curvature
