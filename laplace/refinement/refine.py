"""Refines a posterior: from the linearised network and data to a mode, or to a variational Gaussian."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from laplace.errors import ApproximationWarning, InvalidArgument, UnsupportedError, warn
from laplace.network.model_guard import autograd_mode, same_random_state
from laplace.posterior.posterior import Posterior, Refinement
from laplace.posterior.sharding import refuse_sharded
from laplace.refinement.process import ProcessRefiner
from laplace.refinement.refiner import RefineOptions, Refiner
from laplace.refinement.variational import variational
from laplace.refinement.weight_space import WeightRefiner


def refine(posterior: Posterior, loader: Iterable[Any], method: str, options: RefineOptions) -> Refinement:
    """The refined posterior of the linearised network, at the posterior's hyper-parameters.

    Raises:
        InvalidArgument: An unknown method, or options that are not accepted.
        UnsupportedError: A backend or a structure that cannot be refined.
        InvalidData: Other data than those of the fit.

    Warns:
        ApproximationWarning: It did not converge.
    """
    if method not in _METHODS:
        raise InvalidArgument(f"method={method!r}; accepted are {list(_METHODS)}.")
    refuse_sharded(posterior, "the mode of the linearised network")
    structure = posterior.choices.structure
    if method == "variational" and not structure.is_variational:
        raise UnsupportedError(
            f"method='variational' with hessian_structure={structure.name!r}, whose precision is no sum of curvature "
            "and prior that natural gradients could move; use hessian_structure='full', 'block', 'kron', 'diag' or "
            "'gp' (with functional_approximation='sod'), or method='map', which every structure takes."
        )
    with autograd_mode(), torch.no_grad(), same_random_state(posterior.model):
        posterior.check_unchanged()
        refiner = ProcessRefiner if structure.refined_by_kernels else WeightRefiner
        refined = _METHODS[method](refiner(posterior, loader, options))
    if not refined.converged:
        warn(
            f"{refined!r}: give more max_steps, a larger tolerance than this precision of numbers allows, or, where "
            "expectations are over random points, more n_samples.",
            ApproximationWarning,
        )
    return refined


def _mode(refiner: Refiner[Any]) -> Refinement:
    """The mode, and the curvature there."""
    end = refiner.minimum(refiner.model, refiner.start, refiner.covariance(), show=refiner.options.progress_bar)
    return refiner.result("map", refiner.expected(refiner.model, end.at), end)


_METHODS: dict[str, Callable[[Refiner[Any]], Refinement]] = {"map": _mode, "variational": variational}
"""What `la.refine` can find."""
