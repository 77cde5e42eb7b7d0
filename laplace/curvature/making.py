"""From the class that a user names as `backend=` to an object of it."""

from __future__ import annotations

from typing import Any

from laplace.curvature.adapted import is_ours
from laplace.curvature.interface import CurvatureInterface
from laplace.errors import InvalidArgument
from laplace.likelihoods import get_likelihood
from laplace.likelihoods.base import Likelihood
from laplace.weights.base import Weights
from laplace.weights.problem import Problem


def make_backend(
    backend: type[CurvatureInterface],
    weights: Weights,
    problem: Problem,
    likelihood: Likelihood | str,
    dict_key_x: str,
    dict_key_y: str,
    backend_kwargs: dict[str, Any],
    call_kwargs: dict[str, Any],
) -> CurvatureInterface:
    """An interface for a choice of weights.

    Args:
        backend: The class.
        weights: The choice of weights.
        problem: What it came to.
        likelihood: As the user gave it. A class of the user's sees the names "regression" and "classification" only.
        dict_key_x: Key of the inputs in mappings.
        dict_key_y: Key of the targets in mappings.
        backend_kwargs: Options of the constructor.
        call_kwargs: Options that a class of the user's is called with; the library's take them in the constructor.

    Raises:
        InvalidArgument: The constructor does not know an option.
    """
    model, choice = weights.for_backend(problem)
    ours = is_ours(backend)
    options = {**choice, **backend_kwargs, **(call_kwargs if ours else {})}
    name = likelihood if ours else get_likelihood(likelihood).peer_name
    try:
        return backend(model, name, dict_key_x=dict_key_x, dict_key_y=dict_key_y, **options)
    except TypeError as error:
        raise InvalidArgument(
            f"backend={backend.__name__} could not be made with backend_kwargs={sorted(backend_kwargs)}: {error}"
        ) from error
