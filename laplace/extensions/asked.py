"""What a question is asked about: the object that users hold, or its posterior as a value."""

from __future__ import annotations

from typing import Any

from laplace.errors import InvalidType
from laplace.mixture.mixture import MixtureLaplace
from laplace.parametric import ParametricLaplace
from laplace.posterior.posterior import Posterior
from laplace.tuning.group import PosteriorGroup

Asked = ParametricLaplace | Posterior
"""A posterior over weights, as users hold it or as `la.snapshot()`."""

Several = Asked | MixtureLaplace | PosteriorGroup
"""A posterior or a mixture, as users hold it or as its `snapshot()`."""


def posterior_of(la: Any, name: str = "la") -> Posterior:
    """The fitted posterior as a value.

    Raises:
        InvalidType: Another object.
        NotFittedError: Before `fit`.
    """
    if not isinstance(la, ParametricLaplace | Posterior):
        raise InvalidType(f"{name} is a {type(la).__name__}; a fitted posterior over weights is accepted.")
    posterior = la if isinstance(la, Posterior) else la.snapshot()
    posterior.require_fitted()
    return posterior


def group_of(la: Any) -> PosteriorGroup:
    """The posteriors of a mixture as values, with their weights; of a fitted posterior a group of one.

    Raises:
        InvalidType: Another object.
        NotFittedError: Before `fit`.
    """
    if not isinstance(la, MixtureLaplace | PosteriorGroup):
        return PosteriorGroup((posterior_of(la),))
    group = la.snapshot() if isinstance(la, MixtureLaplace) else la
    for posterior in group.posteriors:
        posterior.require_fitted()
    return group
