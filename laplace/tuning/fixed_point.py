"""The prior precision of the largest evidence by a fixed point (MacKay, 1992; Antorán et al., 2023, section 3.3).

Where ∂ log p(D) / ∂δ is zero, δ_t ‖θ* − μ₀‖²_t is γ_t, the number of the entries of tensor t that the data determine:

    δ_t ← γ_t / ‖θ* − μ₀‖²_t,    γ_t = n_t − δ_t tr_t P⁻¹ = δ_t (2 ∂ log p(D) / ∂δ_t + ‖θ* − μ₀‖²_t).

A step takes the gradient of the evidence alone and no step size, and tends to be within a few percent after a few of
them: what suits an evidence that costs solutions of linear systems, and is known with a standard error.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from tqdm.auto import tqdm

from laplace.core.argument_checks import check_counts
from laplace.core.precision_policy import wide_dtype, widened
from laplace.errors import UnsupportedError
from laplace.network.model_guard import autograd_mode
from laplace.posterior.posterior import Posterior
from laplace.tuning.choose import TuningResult
from laplace.tuning.group import PosteriorGroup
from laplace.tuning.optimise import BOUND
from laplace.tuning.settings import spread

_TOLERANCE = 1e-3
"""Change of log δ at which it has converged."""

_NEAR_BOUND = BOUND - 1e-3
"""Largest |log δ| that is within the bound of a search, and not at it."""

_SMALLEST_FACTOR = 0.1
"""Factor of δ in one step at least: an estimate of γ may be negative, its expectation is not."""


def prior_by_fixed_point(
    group: PosteriorGroup, init: float | Tensor, structure: str, n_steps: int, *, progress_bar: bool = False
) -> TuningResult:
    """The prior precision at which the gradient of the log evidence vanishes; the posterior is not changed.

    Args:
        group: One posterior.
        init: Where it begins; a vector keeps its structure.
        structure: `"scalar"`, `"layerwise"` or `"diag"`.
        n_steps: Steps at most.
        progress_bar: Show a progress bar.

    Raises:
        UnsupportedError: Several posteriors, whose mixture has no such equation.
        InvalidArgument: Unknown structure, or a start that is no prior precision.
    """
    check_counts(n_steps=n_steps)
    if len(group.posteriors) > 1:
        raise UnsupportedError("method='em' is for one posterior; tune a mixture by method='marglik'.")
    now = group.hypers(("prior_precision",))
    delta = spread(init, structure, group.layout, now.prior_precision)
    values: list[float] = []
    converged = False
    with autograd_mode(), torch.enable_grad(), tqdm(total=n_steps, desc="em", disable=not progress_bar) as bar:
        for _ in range(n_steps):
            bar.update()
            value, factor = _step(group.first, delta)
            values.append(value)
            former = delta
            delta = (widened(delta) * factor).log().clamp(-BOUND, BOUND).exp().to(delta.dtype)
            converged = bool(((widened(delta) / widened(former)).log().abs() <= _TOLERANCE).all())
            if converged:
                break
    notes = () if converged else (f"the prior precision still moved after {n_steps} steps; raise n_steps",)
    if bool((widened(delta).log().abs() >= _NEAR_BOUND).any()):
        notes = (
            *notes,
            "a prior precision is at the bound of the search, 1e-10 or 1e10: it may have no finite optimum",
        )
    seen = torch.tensor(values, dtype=wide_dtype())
    return TuningResult(delta, now.sigma_noise, now.temperature, values[-1], seen, {}, converged, notes)


def _step(posterior: Posterior, delta: Tensor) -> tuple[float, Tensor]:
    """The log evidence at δ, and the factor γ / (δ ‖θ* − μ₀‖²) of the next one, float64."""
    leaf = delta.detach().clone().requires_grad_()
    at = posterior.at(replace(posterior.hypers, prior_precision=leaf))
    value = at.log_evidence()
    (slope,) = torch.autograd.grad(value, leaf)
    (square,) = torch.autograd.grad(at.prior.quad(at.mean), leaf)
    slope, square = widened(slope), widened(square)
    # Of a tensor that is zero and that nothing is known of there is no fixed point: its precision stays.
    known = 2 * widened(leaf.detach()) * slope > torch.finfo(leaf.dtype).eps * len(at.mean)
    factor = torch.where((square > 0) | known, 1 + 2 * slope / square, 1.0)
    return value.item(), factor.clamp(min=_SMALLEST_FACTOR)
