"""The posterior as users' classes make it: one place where their methods meet those of the library.

What a user overrides changes all that follows from it, as in the chain

    prior_precision_diag → posterior_precision → posterior_scale → posterior_covariance → functional_variance, sample, …

A method of the library reads the chain up to its own link, so that `super().functional_variance(Js)` is what would
be computed without the override.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.core.gaussian import covariance_root
from laplace.core.hyperparameters import GaussianPrior, Hyperparameters
from laplace.core.overrides import COVARIANCES, HYPERPARAMETERS, MOMENTS, is_overridden
from laplace.core.precision_policy import widened
from laplace.errors import CurvatureError, InvalidArgument, UnsupportedError
from laplace.fitting import Fit
from laplace.jacobian.jacobian import Jacobian
from laplace.network.model_guard import own_precision as autocast_off
from laplace.posterior.posterior import Posterior
from laplace.structures import algebra
from laplace.structures.base import Precision
from laplace.structures.given import GivenPrecision
from laplace.structures.kron import KronCurvature

if TYPE_CHECKING:
    from laplace.base import BaseLaplace
    from laplace.compat.kronecker import KronDecomposed


def posterior_before(la: BaseLaplace, name: str) -> Precision:
    """The posterior with what users override of the moments that come before `name`.

    Args:
        la: A fitted posterior.
        name: One of `MOMENTS`, or what follows from all of them.
    """
    links = MOMENTS[: MOMENTS.index(name)] if name in MOMENTS else MOMENTS
    for link in reversed(links[1:]):  # the first is that of `la.posterior()`
        # Variances say everything of a diagonal posterior only.
        if is_overridden(la, link) and (link != "posterior_variance" or la.snapshot().choices.structure.is_diagonal):
            return _given(la, link, member(la, link))
    return la.posterior()


def own_precision(la: BaseLaplace) -> Precision:
    """The posterior by a user's `posterior_precision`.

    Raises:
        InvalidArgument: It is none.
    """
    return _given(la, "posterior_precision", member(la, "posterior_precision"))


def own_diagonal(la: BaseLaplace, prior: GaussianPrior) -> Tensor:
    """A user's `prior_precision_diag`, `[P]`.

    Raises:
        InvalidArgument: It has another shape, or is not positive.
    """
    values = checked(la, "prior_precision_diag", member(la, "prior_precision_diag"), (prior.layout.n_params,))
    return _positive(la, "prior_precision_diag", values.to(prior.precision))


def own_fit(la: BaseLaplace, fit: Fit) -> Fit:
    """A fit with what a user's class overrides of it.

    Raises:
        UnsupportedError: A loss where every output has its own noise, or a curvature of a structure that is no tensor.
    """
    if not is_overridden(la, "loss", "n_data", "n_outputs", "H"):
        return fit
    if is_overridden(la, "loss"):
        terms = fit.loss_terms
        if member(la, "sigma_noise").numel() > 1:
            raise UnsupportedError(
                f"class {type(la).__name__} overrides loss, of which one noise per output takes one per output; use "
                "one noise, or override log_likelihood."
            )
        fit = replace(
            fit, loss_terms=(torch.as_tensor(member(la, "loss")).to(terms) / terms.numel()).expand(terms.shape)
        )
    if is_overridden(la, "n_data"):
        fit = replace(fit, n_data=member(la, "n_data"))
    if is_overridden(la, "n_outputs"):
        fit = replace(fit, n_outputs=member(la, "n_outputs"))
    if is_overridden(la, "H"):
        own = la.snapshot()
        structure = own.choices.structure
        if structure.name not in ("full", "diag"):
            raise UnsupportedError(
                f"class {type(la).__name__} overrides H, which is no tensor for hessian_structure="
                f"{structure.name!r}; override posterior_precision, or write a structure."
            )
        n = own.problem.layout.n_params
        shape = (n, n) if structure.name == "full" else (n,)
        values = checked(la, "H", member(la, "H"), shape).to(own.hypers.prior_mean.detach())
        fit = replace(fit, curvature=structure.from_state({"values": values.unsqueeze(0)}))
    return fit


def own_posterior(la: BaseLaplace, plain: Posterior) -> Precision:
    """The posterior precision before any moment that users override but the first.

    Args:
        la: The object.
        plain: Its posterior, by the library alone.
    """
    if is_overridden(la, "posterior_precision"):
        return own_precision(la)
    if is_overridden(la, "evidence"):
        with autocast_off():
            return member(la, "evidence")().precision
    return resolved(la, plain).precision()


def resolved(la: BaseLaplace, plain: Posterior) -> Posterior:
    """A posterior with the data, the mean and the hyper-parameters that users' methods give, by the library alone.

    Args:
        la: The object.
        plain: Its posterior, by the library alone.
    """
    if not is_overridden(la, *HYPERPARAMETERS):
        return plain
    prior, noise, temperature = (member(la, name) for name in ("prior", "sigma_noise", "temperature"))
    fit, mean = own_fit(la, plain.fit), member(la, "mean")
    data = replace(plain.require_fitted(), source=fit, assigned_mean=mean, refinement=None)
    return replace(plain, hypers=Hyperparameters(prior.precision, prior.mean, noise, temperature), data=data)


def predictive_posterior(la: BaseLaplace) -> Precision:
    """The posterior as predictions see it, with all that users override."""
    precision = posterior_before(la, "functional_variance")
    return UsersPrecision(la.snapshot(), precision) if is_overridden(la, *COVARIANCES) else precision


@dataclass(frozen=True)
class UsersPrecision(Precision):
    """A precision whose covariances of outputs are users' own; they are given dense Jacobians, a few data at a time.

    Attributes:
        posterior: The posterior that their methods are called at, with the object that has them.
        precision: The rest.
    """

    posterior: Posterior
    precision: Precision

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        if jacobian.group_size > 1 and self.posterior.overrides("functional_covariance"):
            groups = (group for piece in jacobian.pieces() for group in piece)
            return torch.stack([self._users_covariance(g.unflatten(0, (jacobian.group_size, -1))) for g in groups])
        if not self.posterior.overrides("functional_variance"):
            return self.precision.functional_variance(jacobian)
        shape = (jacobian.n_cotangents, jacobian.n_cotangents)
        parts: list[Tensor] = []
        with self.posterior.owned() as la:
            for piece in jacobian.pieces():
                values = checked(la, "functional_variance", la.functional_variance(piece), (len(piece), *shape))
                parts.append(values.to(piece.dtype))
        return torch.cat(parts)

    def functional_diagonal(self, jacobian: Jacobian) -> Tensor:
        if not self.posterior.overrides("functional_variance"):
            return self.precision.functional_diagonal(jacobian)
        return self.functional_variance(jacobian).diagonal(dim1=1, dim2=2)

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        if not self.posterior.overrides("functional_covariance"):
            return self.precision.functional_covariance(jacobian)
        return self._users_covariance(jacobian.dense())

    def _users_covariance(self, dense: Tensor) -> Tensor:
        """A user's own covariance of rows `[B, C, P]`, `[B·C, B·C]`."""
        n = dense.shape[:2].numel()
        with self.posterior.owned() as la:
            return checked(la, "functional_covariance", la.functional_covariance(dense), (n, n)).to(dense.dtype)

    def logdet(self) -> Tensor:
        return self.precision.logdet()

    def logdet_ratio(self) -> Tensor:
        return self.precision.logdet_ratio()

    def quad(self, vectors: Tensor) -> Tensor:
        return self.precision.quad(vectors)

    def sample(self, noise: Tensor) -> Tensor:
        return self.precision.sample(noise)

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


def _given(la: BaseLaplace, name: str, value: Any) -> Precision:
    """The posterior with one of its moments as a user computes it.

    Raises:
        InvalidArgument: It is none, or has another shape than the random parameters ask for.
    """
    from laplace.compat.kronecker import Kron, KronDecomposed  # needed by nobody else who imports the library

    if isinstance(value, Precision):
        return value
    if isinstance(value, KronDecomposed) and (factored := _by_factors(la, name, value)) is not None:
        return factored
    if isinstance(value, Kron | KronDecomposed):
        value = value.to_matrix()
    elif isinstance(value, tuple) and la.snapshot().choices.structure.name == "lowrank":
        (vectors, values), delta = value
        value = (vectors * values) @ vectors.T + torch.diag(delta)
    n = la.snapshot().problem.layout.n_params
    square = name == "posterior_covariance"
    accepted = ((n, n),) if square else ((n,),) if name == "posterior_variance" else ((n, n), (n,))
    if not isinstance(value, Tensor) or tuple(value.shape) not in accepted:
        raise wrong_shape(la, name, value, " or ".join(str(list(shape)) for shape in accepted))
    value = value.to(la.snapshot().hypers.dtype)
    if name == "posterior_scale":
        return GivenPrecision(value)
    if name == "posterior_variance":
        return GivenPrecision(_positive(la, name, value).sqrt())
    if square:
        return GivenPrecision(covariance_root(value.unsqueeze(0))[0])
    if value.ndim == 1:
        return GivenPrecision(_positive(la, name, value).rsqrt())
    factor = algebra.cholesky(0.5 * widened(value + value.T).flip(0, 1))
    if factor is None:
        raise InvalidArgument(f"{name} of class {type(la).__name__} is not positive definite.")
    return GivenPrecision(algebra.covariance_factor(factor).to(value.dtype))


def _by_factors(la: BaseLaplace, name: str, value: KronDecomposed) -> Precision | None:
    """The posterior without a dense matrix, where the fit's curvature has such factors; else None.

    Raises:
        InvalidArgument: It is not positive definite.
    """
    from laplace.structures.kron_given import given_precision, is_blockwise

    own = la.snapshot()
    curvature, layout = own.fit.curvature, own.problem.layout
    if not isinstance(curvature, KronCurvature) or not is_blockwise(value, layout):
        return None
    try:
        return given_precision(value, curvature.parts.blocks, layout, own.hypers.dtype)
    except CurvatureError as error:
        raise InvalidArgument(f"{name} of class {type(la).__name__} is not positive definite.") from error


def _positive(la: object, name: str, value: Tensor) -> Tensor:
    if not bool((value > 0).all()):
        raise InvalidArgument(f"{name} of class {type(la).__name__} holds values that are not positive.")
    return value


def member(la: object, name: str) -> Any:
    """A method or an attribute as the object has it, which may be a user's."""
    return getattr(la, name)


def checked(la: object, name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    """The value that a user's method gave, if it is a tensor of this shape.

    Raises:
        InvalidArgument: It is not.
    """
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        raise wrong_shape(la, name, value, str(list(shape)))
    return value


def wrong_shape(la: object, name: str, value: Any, expected: str) -> InvalidArgument:
    """The error of a user's method that gave something else."""
    given = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    return InvalidArgument(f"{name} of class {type(la).__name__} gave {given}; it must be {expected}.")
