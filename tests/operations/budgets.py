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
    first_reads: int  # The same of a first fit of one batch, with its proof


BUDGETS: dict[tuple[str, str, str], Budget] = {
    ("MLP", "last_layer", "full"): Budget(45, 30, 79, 32, 28, 20, 2_765, 21, 10),
    ("MLP", "last_layer", "kron"): Budget(45, 31, 49, 38, 27, 38, 2_525, 19, 10),
    ("narrow MLP", "all", "full"): Budget(111, 105, 140, 69, 28, 20, 2_255, 4, 9),
    ("MLP", "all", "kron"): Budget(87, 64, 129, 95, 27, 96, 2_055, 4, 9),
    ("LeNet", "all", "kron"): Budget(137, 114, 195, 165, 27, 154, 2_055, 4, 10),
    ("LeNet", "all", "diag"): Budget(122, 99, 176, 118, 27, 12, 2_055, 4, 9),
    ("encoder", "all", "kron"): Budget(266, 299, 450, 405, 27, 374, 2_055, 4, 14),
    ("wide ResNet", "last_layer", "kron"): Budget(73, 55, 73, 62, 27, 38, 2_500, 18, 11),
    ("wide ResNet", "all", "kron"): Budget(328, 330, 477, 475, 27, 364, 2_055, 4, 10),
}
"""By network, weights and structure."""
