"""How far two posteriors are apart, and what single weights are worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from laplace.core.arguments import checked
from laplace.core.precision_policy import widened
from laplace.errors import InvalidArgument, UnsupportedError
from laplace.extensions.asked import Asked, posterior_of
from laplace.network.model_guard import autograd_mode
from laplace.posterior.posterior import Posterior
from laplace.structures.diag import DiagCurvature
from laplace.weights.problem import Problem

_CHUNK = 2**24
"""Entries of vectors that are multiplied at once."""

_LARGEST_ROOT = 12_000
"""Weights that depend on each other, of which `wasserstein` takes a singular value decomposition."""


def other_weights(one: Problem, other: Problem) -> str | None:
    """Names a tensor whose entries with a distribution are others in two problems; None if all are the same."""
    shapes, theirs = (
        {slot.name: (slot.shape, None if slot.entries is None else slot.entries.tolist()) for slot in problem.slots}
        for problem in (one, other)
    )
    names = [name for name in {**shapes, **theirs} if shapes.get(name) != theirs.get(name)]
    return f"they differ in the weights with a distribution, of which {names[0]!r} is one" if names else None


def _require_same_weights(call: str, one: Posterior, other: Posterior) -> None:
    difference = other_weights(one.problem, other.problem)
    if difference:
        raise InvalidArgument(f"{call} takes a posterior over the same weights: {difference}.")


@checked
def kl(la: Asked, other: Asked) -> Tensor:
    """KL(la ‖ other), the divergence of two posteriors over the same weights, in nats, 0-dim, float64.

    ½ (tr(P₂ P₁⁻¹) − P + (m₂ − m₁)ᵀ P₂ (m₂ − m₁) + log det P₁ − log det P₂). Structures, priors and the networks'
    weights may differ. The trace is exact, by as many products as the largest block has weights.

    Args:
        la: A fitted posterior.
        other: A fitted posterior over the same weights.

    Raises:
        NotFittedError: One is not fitted.
        InvalidType: No posterior over weights.
        InvalidArgument: Other weights have a distribution.
    """
    one, other = posterior_of(la), posterior_of(other, "other")
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


@checked
def wasserstein(la: Asked, other: Asked) -> Tensor:
    """W₂ distance of two posteriors over the same weights, in units of the weights, 0-dim, float64.

    W₂² = ‖m₁ − m₂‖² + tr(Σ₁ + Σ₂ − 2 (Σ₁^½ Σ₂ Σ₁^½)^½) (Dowson and Landau, 1982) [Redux, appendix eq. 6].
    Unlike `kl` it is symmetric, and compares posteriors of very different widths. Structures, priors and the networks'
    weights may differ. It takes a singular value decomposition of the largest block.

    Args:
        la: A fitted posterior.
        other: A fitted posterior over the same weights.

    Raises:
        NotFittedError: One is not fitted.
        InvalidType: No posterior over weights.
        InvalidArgument: Other weights have a distribution.
        UnsupportedError: More than 12,000 weights that depend on each other.
    """
    one, other = posterior_of(la), posterior_of(other, "other")
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
                "laplace.kl, or posteriors that hold smaller blocks."
            )
        # The trace is the least ‖L₁ − L₂ Q‖² over orthogonal Q, at Q = V Uᵀ for L₁ᵀ L₂ = U S Vᵀ, with Σ = L Lᵀ: it
        # cancels nothing where two posteriors are close. Columns of L are rows; where units are independent, of all.
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


@checked
def saliency(la: Asked) -> Tensor:
    """m_p² P_pp of every weight with a distribution, `[P]`: twice the log density that setting it to zero costs.

    Weights with a small saliency can be pruned first (LeCun et al., 1990). Computed by as many products as the
    largest block has weights.

    Args:
        la: A fitted posterior.

    Raises:
        NotFittedError: Before `fit`.
    """
    posterior = posterior_of(la)
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
    dense = [posterior for posterior in posteriors if not issubclass(posterior.choices.structure, DiagCurvature)]
    if n != layout.n_params:
        return [everything]
    if not dense:
        return list(everything.split(1))
    units = [posterior.fit.curvature.units(layout) for posterior in dense]
    if any(other != units[0] for other in units):
        return [everything]
    parts = layout.split(everything)
    return [torch.cat([parts[tensor] for tensor in unit]) for unit in units[0]]
