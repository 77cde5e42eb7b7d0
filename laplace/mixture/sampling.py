"""Samples of a mixture: a component by its weight, then a sample of that component."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from laplace.core.random_numbers import uniform


def choose(weights: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
    """The component of every sample, `[S]`, drawn with probabilities π `[K]`."""
    steps = weights.cumsum(0)
    steps = steps / steps[-1]  # rounding must leave no gap below 1
    return torch.searchsorted(steps, uniform((n_samples,), weights, generator), right=True).cpu()


def in_order(draws: Sequence[Callable[[int], Tensor]], chosen: Tensor) -> Tensor:
    """Samples `[S, …]`, each of the component `[S]` that was chosen for it.

    Args:
        draws: Samples `[n, …]` of each component; called where n is positive.
        chosen: The component of every sample, `[S]`.
    """
    counts = torch.bincount(chosen, minlength=len(draws)).tolist()
    parts = [draw(count) for draw, count in zip(draws, counts, strict=True) if count]
    stacked = torch.cat([part.to(parts[0].device) for part in parts])
    place = chosen.argsort(stable=True).to(stacked.device)
    return stacked[place.argsort()]
