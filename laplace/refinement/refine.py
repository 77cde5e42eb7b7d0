"""Refines a posterior: from the linearised network and data to a mode, or to a variational Gaussian."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from laplace.errors import InvalidArgument, UnsupportedError
from laplace.refinement.refiner import RefineOptions, Refiner
from laplace.refinement.result import Refinement
from laplace.refinement.variational import variational

if TYPE_CHECKING:
    from laplace.posterior.weight_posterior import WeightPosterior

METHODS = ("map", "variational")
"""What `la.refine` can find."""


def refine(la: WeightPosterior, loader: Iterable[Any], method: str, options: RefineOptions) -> Refinement:
    """The refined posterior of the linearised network; `la` is not changed.

    Raises:
        InvalidArgument: An unknown method, or options that are not accepted.
        UnsupportedError: A backend or a structure that cannot be refined.
        InvalidData: Other data than those of the fit.
    """
    if method not in METHODS:
        raise InvalidArgument(f"method={method!r}; accepted are {list(METHODS)}.")
    if method == "variational" and not la.structure.is_variational:
        raise UnsupportedError(
            f"method='variational' has a full or a diagonal covariance, hessian_structure={la.structure.name!r} is "
            "neither; use hessian_structure='full' or 'diag', or method='map', which every structure takes."
        )
    la.check_unchanged()
    refiner = Refiner(la, loader, options)
    start = torch.zeros_like(refiner.model.offset) if la.refined_step is None else la.refined_step.double()
    precision = la.posterior()
    if method == "map":
        end = refiner.minimum(refiner.model, start, precision, show=options.progress_bar)
        return refiner.result("map", end.at, refiner.fit_at(end.at), end)
    return variational(refiner, start, precision)
