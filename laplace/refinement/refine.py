"""Refines a posterior: from the linearised network and data to a mode, or to a variational Gaussian.

The variational Gaussian is found by natural gradients (Khan and Lin, 2017; Immer et al., 2021, appendix B.3).
For a model that is linear in θ and q = N(m, S) the natural gradient step of size ρ is, by the theorems of Bonnet and
Price,

    S⁻¹ ← (1 − ρ) S⁻¹ + ρ (P₀ + Σ_n J_nᵀ E_q[Λ(f_n)] J_n / (σ²T)),    f_n ~ N(f_lin(x_n, m), J_n S J_nᵀ),

or, within a family of structured precisions, the part of it that the structure keeps: the diagonal, the blocks of
layers, both of which are the natural gradients of these families, or Kronecker factors, which approximate it (noisy
K-FAC; Zhang et al., 2018). S⁻¹ stays a curvature plus the prior, so that it is kept as one. The step in the mean,
along S ∇_m, is repeated to the minimum, which for log-concave likelihoods is unique: with S fixed the bound is concave
in m. A step is taken only if the bound grows, and is shortened until it does; the search ends where such a step,
however short, changes the bound no more. That is a maximum where the step is along a gradient. Sampled expectations,
Kronecker factors, and likelihoods whose `hessian` is a Fisher information, know it up to an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Generic

import torch
from torch import Tensor
from tqdm.auto import tqdm

from laplace.core.precision_policy import widened
from laplace.errors import ApproximationWarning, InvalidArgument, UnsupportedError, warn
from laplace.gp.subset import SubsetCurvature
from laplace.network.model_guard import autograd_mode, same_random_state
from laplace.posterior.posterior import Posterior
from laplace.refinement.linear_model import BOUND_TOLERANCE, LinearModel, Minimum, RefineOptions, Refiner, S, Smoothing
from laplace.refinement.process import ProcessRefiner
from laplace.refinement.result import Refinement
from laplace.refinement.weight_space import WeightRefiner
from laplace.structures.block import BlockCurvature
from laplace.structures.diag import DiagCurvature
from laplace.structures.full import FullCurvature
from laplace.structures.kron import KronCurvature

_VARIATIONAL = (FullCurvature, BlockCurvature, KronCurvature, DiagCurvature, SubsetCurvature)
"""Structures whose precision is a sum of curvature and prior that natural gradients move."""


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
    structure = posterior.choices.structure
    if method == "variational" and not issubclass(structure, _VARIATIONAL):
        raise UnsupportedError(
            f"method='variational' with hessian_structure={structure.name!r}, whose precision is no sum of curvature "
            "and prior that natural gradients could move; use hessian_structure='full', 'block', 'kron', 'diag' or "
            "'gp' (with functional_approximation='sod'), or method='map', which every structure takes."
        )
    with autograd_mode(), torch.no_grad(), same_random_state(posterior.model):
        posterior.check_unchanged()
        refiner = ProcessRefiner if issubclass(structure, SubsetCurvature) else WeightRefiner
        refined = _METHODS[method](refiner(posterior, loader, options))
    if not refined.converged:
        warn(
            f"{refined!r}: give more max_steps, a larger tolerance than this precision of numbers allows, or, where "
            "expectations are over random points, more n_samples. For method='map' the distance is in posterior "
            "standard deviations; of a loss that is not convex in the outputs, as of likelihood='mean_log_variance', "
            "every step makes it smaller by a factor only, so that hundreds may be needed.",
            ApproximationWarning,
        )
    return refined


def _mode(refiner: Refiner[Any]) -> Refinement:
    """The mode, and the curvature there."""
    end = refiner.minimum(refiner.model, refiner.start, refiner.covariance(), show=refiner.options.progress_bar)
    return refiner.result("map", refiner.expected(refiner.model, end.at), end)


_SHORTER = 0.25
"""Factor of a step that would lower the bound."""


@dataclass(frozen=True, eq=False)
class _BoundedGaussian(Generic[S]):
    """A Gaussian q, and its bound E_q[log p(D | f_lin)] − KL(q ‖ p), in nats."""

    covariance: S
    model: LinearModel  # the expected model under the covariance of the outputs
    at: Tensor  # m, as parameters of the model
    bounds: Tensor  # by every point of the expectation, `[S]`
    elbo: float  # their mean


def _variational(refiner: Refiner[S]) -> Refinement:
    """The variational Gaussian; the search begins at the posterior."""
    covariance = refiner.covariance()
    state, minimum = _ascend(refiner, _at(refiner, _points(refiner, covariance), covariance, refiner.start))
    error = state.model.smoothing.standard_error(state.bounds)
    return refiner.result("variational", state.covariance, minimum, error)


def _ascend(refiner: Refiner[S], state: _BoundedGaussian[S]) -> tuple[_BoundedGaussian[S], Minimum]:
    """Natural gradient steps, none of which lowers the bound, until it does not change; its values on the way."""
    options = refiner.options
    tolerance = options.tolerance or BOUND_TOLERANCE[refiner.dtype]
    values, rate, change, target = [state.elbo], 1.0, float("inf"), None
    with tqdm(total=options.max_steps, desc="refine", disable=not options.progress_bar) as bar:
        for _ in range(options.max_steps):
            bar.update()
            if target is None:
                target = refiner.expected(state.model, state.at)
            covariance = target if rate == 1 else refiner.between(state.covariance, target, rate)
            new = _at(refiner, state.model.smoothing, covariance, state.at)
            gain, size = new.elbo - state.elbo, max(1.0, abs(new.elbo))
            if abs(gain) <= tolerance * size:
                return state, Minimum(state.at, tuple(values), abs(gain) / size, True)
            if gain > 0:
                state, target, change = new, None, gain / size
                values.append(state.elbo)
                rate = min(1.0, rate / _SHORTER)
            else:
                rate *= _SHORTER  # too long a step, or no ascent at all, of which short ones change nothing
    return state, Minimum(state.at, tuple(values), change, False)


def _points(refiner: Refiner[S], covariance: S) -> Smoothing:
    """Points of all expectations: the same from the first step to the last, so that bounds can be compared."""
    options, model = refiner.options, refiner.model
    likelihood, widest = model.likelihood, 1.0
    if likelihood.independent_outputs:  # with room for a standard deviation that grows
        widest = 1.5 * max(float(part.max()) for part in covariance.of_outputs(diagonal=True)) ** 0.5
    like = model.data.batches[0].f
    return Smoothing.for_likelihood(likelihood, model.n_outputs, options.n_samples, options.generator, like, widest)


def _at(refiner: Refiner[S], smoothing: Smoothing, covariance: S, start: Tensor) -> _BoundedGaussian[S]:
    """The best mean under a covariance, and the bound there."""
    model, variances = refiner.model, covariance.of_outputs(diagonal=smoothing.independent)
    model = replace(model, smoothing=smoothing, roots=[smoothing.root(part) for part in variances])
    at = refiner.minimum(model, start, covariance, show=False).at
    bounds = _bounds(refiner, model, covariance, at)
    return _BoundedGaussian(covariance, model, at, bounds, float(smoothing.mean(bounds)))


def _bounds(refiner: Refiner[S], model: LinearModel, covariance: S, at: Tensor) -> Tensor:
    """Log p(D | f_lin) − KL(q ‖ p) at every point of the expectation, `[S]`, in nats.

    2 KL = tr(P₀ S) + (m − μ₀)ᵀ P₀ (m − μ₀) − n + log det S⁻¹ − log det P₀.
    """
    evidence, theta = refiner.evidence, model.offset + at
    sigma, temperature = (widened(value.detach()) for value in (evidence.sigma_noise, evidence.temperature))
    n_data, n_outputs = model.data.n_observed, model.n_outputs
    expected = [
        model.likelihood.log_likelihood(terms, n_data, n_outputs, sigma, temperature) for terms in model.losses(at)
    ]
    distance = (model.prior_precision * theta) @ theta
    return torch.stack(expected) - 0.5 * (covariance.divergence() + distance)


_METHODS: dict[str, Callable[[Refiner[Any]], Refinement]] = {"map": _mode, "variational": _variational}
"""What `la.refine` can find."""
