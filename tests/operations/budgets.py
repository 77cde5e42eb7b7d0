"""Operations that launch a kernel, at most: of one more batch of a fit, and of what is asked of it afterwards.

They are counted with the sizes of an accelerator. A change that needs more says why; one that needs fewer lowers them.
R is one forward pass and a backward pass for every output, one after the other.
"""

from __future__ import annotations

from typing import NamedTuple


class Budget(NamedTuple):
    """Of one network with one kind of posterior."""

    batch: int  # One more batch of a fit
    probit: int  # `la(x)`
    mc: int  # `la(x, link_approx="mc")`
    nn: int  # `la(x, pred_type="nn", n_samples=10)`
    evidence: int  # A log marginal likelihood at another prior
    draws: int  # `la.sample(10)`
    tuning: int  # `la.optimize_prior_precision(n_steps=100)`, with the forecast that follows it for a last layer
    tuning_reads: int  # Numbers of it that the host waits for


BUDGETS: dict[tuple[str, str, str], Budget] = {
    ("MLP", "last_layer", "full"): Budget(57, 36, 85, 34, 21, 20, 2_766, 27),
    ("MLP", "last_layer", "kron"): Budget(61, 37, 92, 40, 20, 38, 2_528, 25),
    ("narrow MLP", "all", "full"): Budget(121, 111, 146, 73, 21, 20, 2_253, 4),
    ("MLP", "all", "kron"): Budget(99, 70, 135, 99, 20, 96, 2_051, 4),
    ("LeNet", "all", "kron"): Budget(149, 120, 201, 169, 20, 154, 2_051, 4),
    ("LeNet", "all", "diag"): Budget(134, 105, 182, 122, 20, 12, 2_051, 4),
    ("encoder", "all", "kron"): Budget(278, 305, 456, 409, 20, 374, 2_051, 4),
    ("wide ResNet", "last_layer", "kron"): Budget(89, 61, 116, 64, 20, 38, 2_500, 24),
    ("wide ResNet", "all", "kron"): Budget(340, 336, 483, 477, 20, 364, 2_051, 4),
}
"""By network, weights and structure."""
