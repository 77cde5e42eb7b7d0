"""The posterior as users' classes make it: one place where their methods meet those of the library.

What a user overrides changes all that follows from it, as in the chain

    prior_precision_diag → posterior_precision → posterior_scale → posterior_covariance → functional_variance, sample, …

A method of the library reads the chain up to its own link, so that `super().functional_variance(Js)` is what would
be computed without the override.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace.core.gaussian import covariance_root
from laplace.core.overrides import COVARIANCES, MOMENTS, is_overridden
from laplace.core.prior import GaussianPrior
from laplace.errors import InvalidArgument, UnsupportedError
from laplace.fitting import Fit
from laplace.jacobian.jacobian import Jacobian
from laplace.structures import algebra
from laplace.structures.base import Precision
from laplace.structures.given import GivenPrecision

if TYPE_CHECKING:
    from laplace.posterior.weight_posterior import WeightPosterior


def posterior_before(la: WeightPosterior, name: str) -> Precision:
    """The posterior with what users override of the moments that come before `name`.

    Args:
        la: A fitted posterior.
        name: One of `MOMENTS`, or what follows from all of them.
    """
    links = MOMENTS[: MOMENTS.index(name)] if name in MOMENTS else MOMENTS
    for link in reversed(links[1:]):  # the first is that of `la.posterior()`
        # Variances say everything of a diagonal posterior only.
        if is_overridden(la, link) and (link != "posterior_variance" or la.structure.name == "diag"):
            return _given(la, link, getattr(la, link))
    return la.posterior()


def own_precision(la: WeightPosterior) -> Precision:
    """The posterior by a user's `posterior_precision`.

    Raises:
        InvalidArgument: It is none.
    """
    return _given(la, "posterior_precision", la.posterior_precision)


def own_diagonal(la: WeightPosterior, prior: GaussianPrior) -> Tensor:
    """A user's `prior_precision_diag`, `[P]`.

    Raises:
        InvalidArgument: It has another shape, or is not positive.
    """
    found, n = la.prior_precision_diag, prior.layout.n_params
    return _positive(la, "prior_precision_diag", checked(la, "prior_precision_diag", found, (n,)).to(prior.precision))


def own_fit(la: WeightPosterior, fit: Fit) -> Fit:
    """A fit with what a user's class overrides of it.

    Raises:
        UnsupportedError: A loss where every output has its own noise, or a curvature of a structure that is no tensor.
    """
    if not is_overridden(la, "loss", "n_data", "n_outputs", "H"):
        return fit
    if is_overridden(la, "loss"):
        terms = fit.loss_terms
        if la.sigma_noise.numel() > 1:
            raise UnsupportedError(
                f"class {type(la).__name__} overrides loss, of which one noise per output takes one per output; use "
                "one noise, or override log_likelihood."
            )
        fit = replace(fit, loss_terms=(torch.as_tensor(la.loss).to(terms) / terms.numel()).expand(terms.shape))
    if is_overridden(la, "n_data"):
        fit = replace(fit, n_data=la.n_data)
    if is_overridden(la, "n_outputs"):
        fit = replace(fit, n_outputs=la.n_outputs)
    if is_overridden(la, "H"):
        if la.structure.name not in ("full", "diag"):
            raise UnsupportedError(
                f"class {type(la).__name__} overrides H, which is no tensor for hessian_structure="
                f"{la.structure.name!r}; override posterior_precision, or write a structure."
            )
        n = la.problem.layout.n_params
        shape = (n, n) if la.structure.name == "full" else (n,)
        values = checked(la, "H", la.H, shape).to(la.prior_precision.detach())
        fit = replace(fit, curvature=la.structure.from_state({"values": values.unsqueeze(0)}))
    return fit


def predictive_posterior(la: WeightPosterior) -> Precision:
    """The posterior as predictions see it, with all that users override."""
    posterior = posterior_before(la, "functional_variance")
    return UsersPosterior(la, posterior, la.at_present()) if is_overridden(la, *COVARIANCES) else posterior


@dataclass(frozen=True)
class UsersPosterior(Precision):
    """A posterior whose covariances of outputs are users' own; they are given dense Jacobians, a few data at a time.

    Attributes:
        la: Whose methods are called.
        posterior: The rest.
        held: Blocks with the hyper-parameters of this posterior.
    """

    la: WeightPosterior
    posterior: Precision
    held: Callable[[], AbstractContextManager[None]]

    def functional_variance(self, jacobian: Jacobian) -> Tensor:
        if not is_overridden(self.la, "functional_variance"):
            return self.posterior.functional_variance(jacobian)
        method, shape = method_of(self.la, "functional_variance"), (jacobian.n_cotangents, jacobian.n_cotangents)
        found: list[Tensor] = []
        with self.held():
            for piece in jacobian.pieces():
                values = checked(self.la, "functional_variance", method(piece), (len(piece), *shape))
                found.append(values.to(piece.dtype))
        return torch.cat(found)

    def functional_diagonal(self, jacobian: Jacobian) -> Tensor:
        if not is_overridden(self.la, "functional_variance"):
            return self.posterior.functional_diagonal(jacobian)
        return self.functional_variance(jacobian).diagonal(dim1=1, dim2=2)

    def functional_covariance(self, jacobian: Jacobian) -> Tensor:
        if not is_overridden(self.la, "functional_covariance"):
            return self.posterior.functional_covariance(jacobian)
        n, dense = jacobian.n_data * jacobian.n_cotangents, jacobian.dense()
        with self.held():
            found = method_of(self.la, "functional_covariance")(dense)
        return checked(self.la, "functional_covariance", found, (n, n)).to(dense.dtype)

    def logdet(self) -> Tensor:
        return self.posterior.logdet()

    def logdet_ratio(self) -> Tensor:
        return self.posterior.logdet_ratio()

    def quad(self, vectors: Tensor) -> Tensor:
        return self.posterior.quad(vectors)

    def sample(self, noise: Tensor) -> Tensor:
        return self.posterior.sample(noise)

    def diagonal_of_inverse(self) -> Tensor:
        return self.posterior.diagonal_of_inverse()

    def to_dense(self) -> Tensor:
        return self.posterior.to_dense()

    @property
    def public(self) -> Any:
        return self.posterior.public

    @property
    def covariance(self) -> Tensor:
        return self.posterior.covariance

    @property
    def scale(self) -> Tensor:
        return self.posterior.scale


def _given(la: WeightPosterior, name: str, value: Any) -> Precision:
    """The posterior with one of its moments as a user computes it.

    Raises:
        InvalidArgument: It is none, or has another shape than the treated parameters ask for.
    """
    from laplace.compat.kronecker import Kron, KronDecomposed  # needed by nobody else who imports the library

    if isinstance(value, Precision):
        return value
    if isinstance(value, Kron | KronDecomposed):
        value = value.to_matrix()
    elif isinstance(value, tuple) and la.structure.name == "lowrank":
        (vectors, values), delta = value
        value = (vectors * values) @ vectors.T + torch.diag(delta)
    n = la.problem.layout.n_params
    square = name == "posterior_covariance"
    accepted = ((n, n),) if square else ((n,),) if name == "posterior_variance" else ((n, n), (n,))
    if not isinstance(value, Tensor) or tuple(value.shape) not in accepted:
        raise wrong_shape(la, name, value, " or ".join(str(list(shape)) for shape in accepted))
    value = value.to(la.prior_precision.dtype)
    if name == "posterior_scale":
        return GivenPrecision(value)
    if name == "posterior_variance":
        return GivenPrecision(_positive(la, name, value).sqrt())
    if square:
        return GivenPrecision(covariance_root(value.unsqueeze(0))[0])
    if value.ndim == 1:
        return GivenPrecision(_positive(la, name, value).rsqrt())
    root = algebra.covariance_factor(0.5 * (value + value.T).double())
    if root is None:
        raise InvalidArgument(f"{name} of class {type(la).__name__} is not positive definite.")
    return GivenPrecision(root.to(value.dtype))


def _positive(la: object, name: str, value: Tensor) -> Tensor:
    if not bool((value > 0).all()):
        raise InvalidArgument(f"{name} of class {type(la).__name__} holds values that are not positive.")
    return value


def method_of(la: object, name: str) -> Callable[..., Any]:
    """A method as the object has it, which may be a user's."""
    return getattr(la, name)


def checked(la: object, name: str, found: Any, shape: tuple[int, ...]) -> Tensor:
    """What a user's method gave, if it is a tensor of this shape.

    Raises:
        InvalidArgument: It is not.
    """
    if not isinstance(found, Tensor) or tuple(found.shape) != shape:
        raise wrong_shape(la, name, found, str(list(shape)))
    return found


def wrong_shape(la: object, name: str, found: Any, expected: str) -> InvalidArgument:
    """The error of a user's method that gave something else."""
    given = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
    return InvalidArgument(f"{name} of class {type(la).__name__} gave {given}; it must be {expected}.")
