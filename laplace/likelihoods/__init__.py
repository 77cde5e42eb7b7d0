"""Likelihoods: objects behind the names, open to users' own."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from laplace.core.lazy import attach
from laplace.core.registry import Registry
from laplace.errors import InvalidArgument

if TYPE_CHECKING:
    from laplace.likelihoods.base import Likelihood

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "laplace.likelihoods.autodiff": "LikelihoodFromLoss",
        "laplace.likelihoods.base": "Likelihood NoiseFreeLikelihood OutputHessian",
        "laplace.likelihoods.bernoulli": "Bernoulli",
        "laplace.likelihoods.categorical": "Categorical Preference",
        "laplace.likelihoods.gaussian": "Gaussian",
        "laplace.likelihoods.heteroscedastic": "Heteroscedastic",
        "laplace.likelihoods.mean_log_variance": "MeanLogVariance",
        "laplace.likelihoods.poisson": "Poisson",
    },
    own="LIKELIHOODS get_likelihood",
)

LIKELIHOODS: Registry[Callable[[], Likelihood]] = Registry("likelihood")
LIKELIHOODS.refer("regression", "laplace.likelihoods.gaussian:Gaussian")
LIKELIHOODS.refer("classification", "laplace.likelihoods.categorical:Categorical")
LIKELIHOODS.refer("reward_modeling", "laplace.likelihoods.categorical:Preference")
LIKELIHOODS.refer("bernoulli", "laplace.likelihoods.bernoulli:Bernoulli")
LIKELIHOODS.refer("poisson", "laplace.likelihoods.poisson:Poisson")
LIKELIHOODS.refer("heteroscedastic", "laplace.likelihoods.heteroscedastic:Heteroscedastic")
LIKELIHOODS.refer("mean_log_variance", "laplace.likelihoods.mean_log_variance:MeanLogVariance")


def get_likelihood(spec: str | Enum | Likelihood) -> Likelihood:
    """The likelihood behind a name, an enum member or an object.

    Args:
        spec: A name in `LIKELIHOODS`, an enum member with such a value, or a `Likelihood` object (returned as is).

    Raises:
        InvalidArgument: Anything else.
    """
    from laplace.likelihoods.base import Likelihood

    if isinstance(spec, Likelihood):
        return spec
    name = spec.value if isinstance(spec, Enum) else spec
    if isinstance(name, str):
        return LIKELIHOODS[name]()
    known = ", ".join(map(repr, LIKELIHOODS))
    hint = " (an object, not its class: add parentheses)" if isinstance(name, type) else ""
    raise InvalidArgument(
        f"likelihood={reprlib.repr(spec):.60} of type {type(spec).__name__} is not accepted; give one of {known} or a "
        f"laplace.likelihoods.Likelihood object{hint}."
    )
