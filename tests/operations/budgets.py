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
    ("MLP", "last_layer", "full"): Budget(59, 38, 87, 38, 23, 20),
    ("MLP", "last_layer", "kron"): Budget(63, 43, 94, 44, 22, 38),
    ("narrow MLP", "all", "full"): Budget(123, 113, 148, 76, 23, 20),
    ("MLP", "all", "kron"): Budget(101, 76, 137, 102, 22, 96),
    ("LeNet", "all", "kron"): Budget(151, 126, 203, 172, 22, 154),
    ("LeNet", "all", "diag"): Budget(136, 107, 184, 125, 22, 12),
    ("encoder", "all", "kron"): Budget(280, 311, 458, 412, 22, 374),
    ("wide ResNet", "last_layer", "kron"): Budget(111, 87, 138, 88, 22, 38),
    ("wide ResNet", "all", "kron"): Budget(362, 362, 505, 520, 22, 364),
}
"""By network, weights and structure."""
