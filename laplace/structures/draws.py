"""Weights drawn from a posterior, some samples at a time: what is computed on the way stays in a processor's caches."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace.core.random_numbers import standard_normal
from laplace.structures.precision import Precision

_CHUNK_BYTES = 2**23
_LEAST_AT_ONCE = 16
"""Samples of which a matrix product is still one, not that of a matrix and a vector."""


def drawn(mean: Tensor, precision: Precision, n_samples: int, generator: torch.Generator | None) -> Tensor:
    """Samples μ + P^(−1/2) ε, `[S, P]`, for μ `[P]`.

    All random numbers are drawn before, so that samples do not depend on how many are computed at a time.
    """
    noise = standard_normal((n_samples, precision.n_noise(len(mean))), mean, generator)
    row = max(1, noise.shape[1] * noise.element_size())
    parts = noise.split(max(_LEAST_AT_ONCE, _CHUNK_BYTES // row))
    first = mean + precision.sample(parts[0])
    if len(parts) == 1:
        return first
    if first.requires_grad or noise.shape[1] != len(mean):
        return torch.cat([first, *(mean + precision.sample(part) for part in parts[1:])])
    parts[0].copy_(first)
    for part in parts[1:]:
        part.copy_(mean + precision.sample(part))
    return noise
