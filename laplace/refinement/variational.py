"""Gaussian variational inference in the linearised model, by natural gradients (Khan and Lin, 2017; Immer et al., B.3).

For a model that is linear in θ and q = N(m, S) the natural gradient step of size ρ is, by the theorems of Bonnet and
Price,

    S⁻¹ ← (1 − ρ) S⁻¹ + ρ (δ + Σ_n J_nᵀ E_q[Λ(f_n)] J_n / (σ²T)),    f_n ~ N(f_lin(x_n, m), J_n S J_nᵀ),

or its diagonal. S⁻¹ stays a curvature plus the prior, so that it is kept as one. The step in the mean, along
S ∇_m, is repeated to the minimum, which for log-concave likelihoods is unique: with S fixed the bound is concave in m.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from tqdm.auto import tqdm

from laplace.core.precision_policy import widened
from laplace.fitting import Fit
from laplace.posterior.refined import Refinement
from laplace.refinement.glm import LinearModel
from laplace.refinement.newton import Minimum
from laplace.refinement.refiner import BOUND_TOLERANCE, Refiner
from laplace.refinement.smoothing import Smoothing
from laplace.structures.base import Curvature, Precision

_SMALLEST_RATE = 1e-3
"""Below it a natural gradient step gains nothing but rounding."""


@dataclass(frozen=True, eq=False)
class _State:
    """A Gaussian q, and its bound.

    Attributes:
        curvature: H of S⁻¹ = s H + δ.
        precision: S⁻¹.
        model: The expected model under the covariance of the outputs.
        step: m − θ*.
        elbo: The bound.
    """

    curvature: Curvature
    precision: Precision
    model: LinearModel
    step: Tensor
    elbo: float


def variational(refiner: Refiner) -> Refinement:
    """The variational Gaussian; the search begins at the posterior."""
    precision = refiner.posterior.precision()
    options, like = refiner.options, refiner.data.batches[0].f
    likelihood = refiner.posterior.likelihood
    widest = _widest(refiner, precision) if likelihood.independent_outputs else 1.0
    smoothing = Smoothing.of(likelihood, like.shape[1], options.n_samples, options.generator, like, widest)
    tolerance = options.tolerance or BOUND_TOLERANCE[refiner.dtype]
    # Steps are natural gradients of the bound itself; among random points their end is not the sampled bound's maximum.
    slack = tolerance if smoothing.independent else max(tolerance, 1 / len(smoothing.points))
    fit = refiner.posterior.fit
    state = _at(refiner, smoothing, fit, precision, refiner.start)
    values, rate, change = [state.elbo], 1.0, float("inf")
    with tqdm(total=options.max_steps, desc="refine", disable=not options.progress_bar) as bar:
        for _ in range(options.max_steps):
            bar.update()
            target = refiner.fit_at(state.step, smoothing, state.model.roots)
            new = _towards(refiner, smoothing, fit, state, target, rate)
            if new.elbo < state.elbo - slack * max(1.0, abs(state.elbo)):
                rate /= 2  # too long a step
                if rate < _SMALLEST_RATE:
                    break
                continue
            change = abs(new.elbo - state.elbo) / max(1.0, abs(new.elbo))
            state = new
            values.append(state.elbo)
            if change <= tolerance:
                break
    final = replace(refiner.fit_at(state.step), curvature=state.curvature)
    end = Minimum(state.step, tuple(values), change, change <= tolerance)
    return refiner.result("variational", state.step, final, end)


def _widest(refiner: Refiner, precision: Precision) -> float:
    """The largest standard deviation of an output, with room for one that grows."""
    largest = 0.0
    for batch in refiner.data.batches:
        with torch.no_grad():
            parts = [precision.functional_diagonal(jacobian) for jacobian, _ in refiner.engine.jacobian(batch.x)]
        largest = max(largest, *(float(part.max()) for part in parts))
    return 1.5 * largest**0.5


def _towards(refiner: Refiner, smoothing: Smoothing, fit: Fit, state: _State, target: Fit, rate: float) -> _State:
    """The state after a natural gradient step of the covariance, with its best mean."""
    curvature = target.curvature
    if rate < 1:
        curvature = state.curvature.scaled(1 - rate) + target.curvature.scaled(rate)
    moved = replace(fit, curvature=curvature)
    return _at(refiner, smoothing, moved, refiner.precision(moved), state.step)


def _at(refiner: Refiner, smoothing: Smoothing, fit: Fit, precision: Precision, start: Tensor) -> _State:
    """The best mean under a covariance, and the bound there."""
    roots: list[Tensor] = []
    contract = precision.functional_diagonal if smoothing.independent else precision.functional_variance
    for batch in refiner.data.batches:
        with torch.no_grad():
            parts = [contract(replace(jacobian, wide=True)) for jacobian, _ in refiner.engine.jacobian(batch.x)]
        roots.append(smoothing.root(torch.cat(parts)))
    model = replace(refiner.model, smoothing=smoothing, roots=roots)
    minimum = refiner.minimum(model, start, precision, show=False)
    return _State(fit.curvature, precision, model, minimum.at, _bound(refiner, model, precision, minimum.at))


def _bound(refiner: Refiner, model: LinearModel, precision: Precision, step: Tensor) -> float:
    """E_q[log p(D | f_lin)] − KL(q ‖ p), in nats.

    2 KL = tr(diag(δ) S) + (m − μ₀)ᵀ diag(δ) (m − μ₀) − P + log det S⁻¹ − log det diag(δ).
    """
    evidence, delta = refiner.evidence, model.prior_precision
    terms = model.loss_terms(step)
    n_outputs = refiner.data.batches[0].f.shape[1]
    expected = model.likelihood.log_likelihood(
        terms,
        refiner.data.n_data,
        n_outputs,
        widened(evidence.sigma_noise.detach()),
        widened(evidence.temperature.detach()),
    )
    theta = model.offset + step
    trace = delta @ widened(precision.diagonal_of_inverse())
    twice = trace + (delta * theta) @ theta - len(delta) + widened(precision.logdet_ratio().detach())
    return float(expected - 0.5 * twice)
