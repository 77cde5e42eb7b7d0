"""A posterior without some of its data.

Deleting is one Newton step. With P = s·H + P₀ and the mean m the log posterior is −½ (θ − m)ᵀ P (θ − m). Data S
contribute −s (g_Sᵀ (θ − θ*) + ½ (θ − θ*)ᵀ H_S (θ − θ*)) to it, g_S the gradient of their loss at θ*. Without them

    (P − s H_S) (m' − m) = s (g_S + H_S (m − θ*)),

which for a linear Gaussian model is the fit to the rest, and for a network an approximation of one that was trained
without S (Golatkar et al., 2020).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from laplace.core.arguments import checked
from laplace.core.batch import DataWeights, WeightFn, require_loader
from laplace.core.positions import target_rows
from laplace.core.precision_policy import widened
from laplace.engines.native.autograd import without_cudnn
from laplace.errors import InvalidType, UnsupportedError
from laplace.fitting.fit import FitOptions, forget
from laplace.likelihoods.base import Observed
from laplace.network import next_token
from laplace.network.model_guard import autograd_mode, reading, same_random_state
from laplace.parametric import ParametricLaplace
from laplace.posterior.posterior import Posterior
from laplace.refinement.result import Refinement
from laplace.structures.fit import Fit


@checked
def forget_with_mean(
    la: ParametricLaplace,
    loader: Iterable[Any],
    progress_bar: bool = False,
    *,
    weight: float = 1.0,
    weight_fn: WeightFn | None = None,
    dict_key_weight: str | None = None,
) -> None:
    """Removes data from the fit, in place, and moves the mean to what training without them would give, by one step.

    As `la.forget`, whose mean stays; this takes one Newton step, m + (P − s H_S)⁻¹ s (g_S + H_S (m − θ*)), g_S the
    gradient of the loss of the data. `la.mean` then holds the new weights, and linearised predictions follow; the
    network is not changed. For a linear Gaussian model that is the fit to the rest; for networks it is an
    approximation, and no certificate that the data left no trace.

    Args:
        la: The posterior, which loses the data.
        loader: Batches of data that were fitted before, at the network's present weights.
        progress_bar: Show a progress bar.
        weight: Weight of these data in the fit: 1, or `decay**k` if k later fits had that `decay`.
        weight_fn: The weights with which the data were fitted, as in `fit`.
        dict_key_weight: The key of these weights, as in `fit`.

    Raises:
        InvalidType: Another object.
        NotFittedError: Before `fit`.
        ModelChangedError: The network's weights are no longer those of the fit.
        InvalidData: More data than were fitted, or data that cannot be used.
        CurvatureError: The curvature would be indefinite: these data were not fitted.
        UnsupportedError: The structure is no sum over data, or its curvature is a random estimate; a network that is
            spread over processes; or a refined classifier. After every error the former posterior is kept.
    """
    if not isinstance(la, ParametricLaplace):
        raise InvalidType(f"la is a {type(la).__name__}; a posterior over weights is accepted, as Laplace makes it.")
    la.fitted()
    require_loader(loader, "loader")
    options = FitOptions.of_removal(
        weight, progress_bar=progress_bar, weight_fn=weight_fn, dict_key_weight=dict_key_weight
    )
    before, batches = la.snapshot(), list(loader)
    if before.weights.fsdp_processes is not None:
        raise UnsupportedError(
            "forget_with_mean of a network that is spread over several processes: the mean would move by the data of "
            "each; fit in one process, or take la.forget, which leaves the mean."
        )
    after = forget(before, batches, options)
    la.set_posterior(moved_by_removal(before, after, batches, options.weights, weight))


def moved_by_removal(
    before: Posterior, after: Posterior, loader: Iterable[Any], weights: DataWeights | None, weight: float
) -> Posterior:
    """The posterior `after`, which lost the curvature of some data, with the mean that it has without them.

    Args:
        before: The posterior with these data.
        after: The same without their curvature and loss, around the same weights.
        loader: The data that were removed.
        weights: How often every input counted; None for once.
        weight: Factor on all of them.
    """
    refinement = before.refinement
    if refinement is not None and refinement.method != "forget" and not before.likelihood.has_noise:
        raise UnsupportedError(
            "forget_with_mean of a refined posterior, whose loss is known around the network's weights alone: "
            "fit and forget without refine, or refine afterwards with the data that are left."
        )
    if before.choices.loss is not None:
        raise UnsupportedError(
            "forget_with_mean with a loss that was assigned to the backend: its gradient is not known."
        )
    with autograd_mode(), torch.no_grad(), same_random_state(before.model):
        centre, delta = before.expansion_point, widened(before.prior.diagonal().detach())
        gradient = weight * _scaled_gradient(before, loader, weights)
        shift = widened(before.mean) - widened(centre)  # of a mean that has moved before
        is_moved = bool(shift.any())
        pulled = _times(before.with_fit(before.map_fit), shift) if is_moved else shift  # by H at θ*, as `after` has it
        right = gradient + (pulled - _times(after, shift) if is_moved else shift)
        step = widened(after.precision().solve(right.to(centre).unsqueeze(0))[0])
        distance = float((step @ _times(after, step)).clamp(min=0).sqrt())
        # The former mean was the mode of all data: of their loss that tells the gradient at θ*.
        offset = widened(before.mean) - widened(before.prior.mean.detach())
        at_centre = -delta * offset - (pulled - delta * shift) - gradient
        fit = _with_loss_at(after, after.map_fit, at_centre, shift + step)
    mean = centre + (shift + step).to(centre)
    return after.with_refinement(Refinement("forget", mean, fit, 1, True, distance, ()))


def _scaled_gradient(posterior: Posterior, loader: Iterable[Any], weights: DataWeights | None) -> Tensor:
    """Gradient of the loss of data, over σ²T, in the weights with a distribution at θ*, `[P]`."""
    problem, engine, key = posterior.problem, posterior.engine, posterior.choices.dict_key_y
    scale = _scale(posterior)
    total = widened(torch.zeros_like(posterior.expansion_point))
    loader = loader if weights is None else weights.loader(loader, key)
    for batch in reading(loader):
        counted = next_token.weighted(batch, key, problem.device, engine.target_rules, problem.module)
        if counted is None:
            continue
        x, y, counts = counted
        with problem.on_private_copy() as own, without_cudnn(own.module), torch.enable_grad():
            tensors = own.stand_ins()
            f = own.run(tensors, x)
            positions, rows = tuple(f.shape[1:-1]), f.flatten(0, -2)
            checked = engine.checked(rows.detach(), target_rows(y, rows, positions, problem.channel_dim))
            if counts is not None:
                counts = counts.to(f.device).repeat_interleave(len(rows) // len(counts))
            loss = (scale * Observed(posterior.likelihood, checked, counts).loss_terms(widened(rows))).sum()
            inputs = [tensors[slot.name] for slot in problem.slots]
            parts = torch.autograd.grad(loss, inputs, allow_unused=True)
        gradients = [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, parts, strict=True)]
        total += torch.cat([slot.take(g) for slot, g in zip(problem.slots, gradients, strict=True)])
    return total


def _scale(posterior: Posterior) -> Tensor:
    """1/(σ²T), by which the loss enters the log posterior, 0-dim or `[C]`."""
    hypers = posterior.hypers
    return widened(posterior.likelihood.curvature_scale("ggn", hypers.sigma_noise, hypers.temperature).detach())


def _times(posterior: Posterior, vector: Tensor) -> Tensor:
    """P v of a vector `[P]`, float64."""
    precision = posterior.precision()
    return widened(precision.product(vector.to(posterior.expansion_point).unsqueeze(0))[0])


def _with_loss_at(posterior: Posterior, fit: Fit, gradient: Tensor, step: Tensor) -> Fit:
    """A fit with its loss elsewhere, by the second order: L + gᵀ d + ½ dᵀ H d, each over σ²T.

    Args:
        posterior: With that fit.
        fit: Curvature and loss.
        gradient: s g, `[P]`.
        step: d, `[P]`.
    """
    curved = _times(posterior, step) - widened(posterior.prior.diagonal()) * step
    change = gradient @ step + 0.5 * step @ curved
    scale = _scale(posterior).expand(fit.loss_terms.shape)
    return replace(fit, loss_terms=fit.loss_terms + (change / (len(fit.loss_terms) * scale)).to(fit.loss_terms))


def loss_of_part(part: Posterior, mean: Tensor) -> Tensor:
    """Loss of one part's data at the merged mean, of which the part's own mean was the mode: `[1]` or `[C]`."""
    prior = part.prior
    gradient = -widened(prior.diagonal().detach()) * widened(part.mean - prior.mean.detach())
    return _with_loss_at(part, part.fit, gradient, widened(mean) - widened(part.mean)).loss_terms
