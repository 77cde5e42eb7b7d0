"""Stacking: weights of candidates by what they say of held-out data, in place of the choice of one.

With few data one candidate is chosen by luck. A mixture of all of them, weighted by its log predictive density, is
nearly as good as the best of them where data are many, and hedges where they are few.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laplace.core.precision_policy import widened

N_STEPS = 300
"""Steps of EM, always as many: no last digit decides when it ends."""


def stacking_weights(
    log_densities: Tensor, counts: Tensor | None = None, *, pseudo_counts: float = 2.0, n_steps: int = N_STEPS
) -> Tensor:
    """Weights `[K]` of K candidates, float64, that maximise Σ_n m_n log Σ_k w_k p_k(y_n) + (a/K) Σ_k log w_k.

    That is stacking of predictive distributions [Yao et al., 2018, eq. 4], with a Dirichlet prior of a pseudo-counts
    that are spread evenly over the candidates: where the data do not tell candidates apart, the weights are equal. The
    function is concave in w; EM goes from equal weights.

    Args:
        log_densities: log p_k(y_n) of candidate k for held-out datum n, `[N, K]`; −∞ where a candidate excludes it.
        counts: Number of times m_n that a datum counts, `[N]`; None for once.
        pseudo_counts: a.
        n_steps: Steps of EM; fewer leave the weights nearer to equal ones.
    """
    values = widened(log_densities)
    n_data, n_candidates = values.shape
    counts = values.new_ones(n_data) if counts is None else widened(counts)
    likely = (values - values.amax(1, keepdim=True).clamp(min=torch.finfo(values.dtype).min)).exp()
    weights = values.new_full((n_candidates,), 1 / n_candidates)
    total = counts.sum() + pseudo_counts
    for _ in range(n_steps):
        shares = counts / (likely @ weights).clamp(min=torch.finfo(values.dtype).tiny)
        weights = (weights * (shares @ likely) + pseudo_counts / n_candidates) / total
    return weights / weights.sum()
