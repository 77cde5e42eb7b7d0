"""A posterior without some of its data; how far two posteriors are apart, and what single weights are worth.

Deleting is one Newton step. With P = s·H + P₀ and the mean m the log posterior is −½ (θ − m)ᵀ P (θ − m). Data S
contribute −s (g_Sᵀ (θ − θ*) + ½ (θ − θ*)ᵀ H_S (θ − θ*)) to it, g_S the gradient of their loss at θ*. Without them

    (P − s H_S) (m' − m) = s (g_S + H_S (m − θ*)),

which for a linear Gaussian model is the fit to the rest, and for a network an approximation of one that was trained
without S (Golatkar et al., 2020).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from laplace.core.batch import DataWeights
from laplace.core.positions import target_rows
from laplace.core.precision_policy import widened
from laplace.engines.native.autograd import without_cudnn
from laplace.errors import InvalidArgument, UnsupportedError
from laplace.likelihoods.base import Observed
from laplace.network import next_token
from laplace.network.model_guard import autograd_mode, reading, same_random_state
from laplace.posterior.posterior import Posterior, Refinement
from laplace.structures.fit import Fit
from laplace.weights.problem import Problem

_CHUNK = 2**24
"""Entries of vectors that are multiplied at once."""

_LARGEST_ROOT = 12_000
"""Weights that depend on each other, of which `wasserstein` takes a singular value decomposition."""


# Deleting data.


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
            "forget(move_mean=True) of a refined posterior, whose loss is known around the network's weights alone: "
            "fit and forget without refine, or refine afterwards with the data that are left."
        )
    if before.choices.loss is not None:
        raise UnsupportedError(
            "forget(move_mean=True) with a loss that was assigned to the backend: its gradient is not known."
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
        counted = next_token.weighed(batch, key, problem.device, engine.target_rules, problem.module)
        if counted is None:
            continue
        x, y, counts = counted
        with problem.apart() as own, without_cudnn(own.module), torch.enable_grad():
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


# How far two posteriors are apart, and what single weights are worth.


def other_weights(one: Problem, other: Problem) -> str | None:
    """Names a tensor whose entries with a distribution are others in two problems; None if all are the same."""
    shapes, theirs = (
        {slot.name: (slot.shape, None if slot.entries is None else slot.entries.tolist()) for slot in problem.slots}
        for problem in (one, other)
    )
    names = [name for name in {**shapes, **theirs} if shapes.get(name) != theirs.get(name)]
    return f"they differ in the weights with a distribution, of which {names[0]!r} is one" if names else None


def _require_same_weights(call: str, one: Posterior, other: Posterior) -> None:
    for posterior in (one, other):
        posterior.require_fitted()
    difference = other_weights(one.problem, other.problem)
    if difference:
        raise InvalidArgument(f"{call} takes a posterior over the same weights: {difference}.")


def kl(one: Posterior, other: Posterior) -> Tensor:
    """KL(one ‖ other) = ½ (tr(P₂ Σ₁) − P + (m₂ − m₁)ᵀ P₂ (m₂ − m₁) + log det P₁ − log det P₂), in nats, 0-dim, float64.

    The trace is a sum of quadratic forms of the root that samples are drawn with, exact in P calls at most.
    """
    _require_same_weights("kl", one, other)
    with autograd_mode(), torch.no_grad():
        precision, reference = one.precision(), other.precision()
        shift = (other.mean - one.mean).unsqueeze(0)
        total = widened(reference.quad(shift))[0] - len(one.mean)
        total = total + widened(precision.logdet()) - widened(reference.logdet())
        units = _units((one, other), precision.n_noise(len(one.mean)))
        for noise in _probes(units, one.mean):
            total = total + widened(reference.quad(precision.sample(noise))).sum()
        return 0.5 * total


def wasserstein(one: Posterior, other: Posterior) -> Tensor:
    """W₂(one, other), 0-dim, float64: W₂² = ‖m₁ − m₂‖² + min_Q ‖L₁ − L₂ Q‖² over orthogonal Q, with Σ = L Lᵀ.

    The minimum, at Q = V Uᵀ for L₁ᵀ L₂ = U S Vᵀ, is tr(Σ₁ + Σ₂ − 2 (Σ₁^½ Σ₂ Σ₁^½)^½) (Dowson and Landau, 1982)
    [Redux, appendix eq. 6]. Unlike this difference it cancels nothing where two posteriors are close.
    """
    _require_same_weights("wasserstein", one, other)
    with autograd_mode(), torch.no_grad():
        n_params = len(one.mean)
        precisions = one.precision(), other.precision()
        numbers = [precision.n_noise(n_params) for precision in precisions]
        parts = _units((one, other), n_params) if numbers == [n_params] * 2 else None
        largest = max(numbers) if parts is None else max(map(len, parts))
        if largest > _LARGEST_ROOT:
            raise UnsupportedError(
                f"wasserstein takes the roots of covariances of {largest:,} weights, more than {_LARGEST_ROOT:,}. Use "
                "la.kl, or posteriors that hold smaller blocks."
            )
        # Columns of L as rows; where units are independent those of all of them at once.
        roots = [
            widened(torch.cat([precision.sample(rows) for rows in _probes(parts or [torch.arange(n)], one.mean)]))
            for precision, n in zip(precisions, numbers, strict=True)
        ]
        total = (widened(one.mean) - widened(other.mean)).square().sum()
        if largest == 1:
            return (total + (roots[0].abs() - roots[1].abs()).square().sum()).sqrt()
        for unit in parts or [torch.arange(n_params)]:
            count = len(unit) if parts else largest
            first, second = (functional.pad(r[:count, unit], (0, 0, 0, max(0, count - len(r)))) for r in roots)
            left, _, right = torch.linalg.svd(first @ second.T)
            total = total + (first - left @ right @ second).square().sum()
        return total.sqrt()


def saliency(posterior: Posterior) -> Tensor:
    """m_p² P_pp, `[P]`: twice what setting a weight to zero takes from the log density (LeCun et al., 1990)."""
    posterior.require_fitted()
    posterior = posterior.unscaled()
    with autograd_mode(), torch.no_grad():
        precision, mean = posterior.precision(), posterior.mean
        diagonal = sum(
            (rows * precision.product(rows)).sum(0) for rows in _probes(_units((posterior,), len(mean)), mean)
        )
        return mean.square() * diagonal


def _probes(units: Sequence[Tensor], like: Tensor) -> Iterator[Tensor]:
    """Rows of the identity, `[R, n]`: together one row for every entry of the largest unit.

    Each row has a one in every unit, where units are independent; their quadratic forms add up.
    """
    n, largest = sum(map(len, units)), max(map(len, units))
    padded = torch.full((len(units), largest), n, device=like.device)
    for row, unit in zip(padded, units, strict=True):
        row[: len(unit)] = unit
    step = max(1, _CHUNK // n)
    for start in range(0, largest, step):
        places = padded[:, start : start + step].T
        yield torch.zeros(len(places), n + 1, dtype=like.dtype, device=like.device).scatter(1, places, 1.0)[:, :n]


def _units(posteriors: Sequence[Posterior], n: int) -> list[Tensor]:
    """Indices of weights in blocks between which no precision has entries: single ones under diagonals."""
    everything, layout = torch.arange(n), posteriors[0].problem.layout
    dense = [posterior for posterior in posteriors if not posterior.choices.structure.is_diagonal]
    if n != layout.n_params:
        return [everything]
    if not dense:
        return list(everything.split(1))
    units = [posterior.fit.curvature.units(layout) for posterior in dense]
    if any(other != units[0] for other in units):
        return [everything]
    parts = layout.split(everything)
    return [torch.cat([parts[tensor] for tensor in unit]) for unit in units[0]]
