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


BUDGETS: dict[tuple[str, str, str], Budget] = {
    ("MLP", "last_layer", "full"): Budget(58, 37, 86, 37, 23, 20),
    ("MLP", "last_layer", "kron"): Budget(62, 42, 93, 43, 22, 38),
    ("narrow MLP", "all", "full"): Budget(122, 112, 147, 72, 23, 20),
    ("MLP", "all", "kron"): Budget(100, 75, 136, 98, 22, 96),
    ("LeNet", "all", "kron"): Budget(150, 125, 202, 168, 22, 154),
    ("LeNet", "all", "diag"): Budget(135, 106, 183, 121, 22, 12),
    ("encoder", "all", "kron"): Budget(279, 310, 457, 408, 22, 374),
    ("wide ResNet", "last_layer", "kron"): Budget(93, 69, 120, 70, 22, 38),
    ("wide ResNet", "all", "kron"): Budget(344, 344, 487, 484, 22, 364),
}
"""By network, weights and structure."""
