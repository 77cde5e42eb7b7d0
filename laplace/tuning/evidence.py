"""Empirical Bayes: the prior precision that maximises the log evidence (MacKay, 1992)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from tqdm.auto import trange

from laplace.errors import InvalidArgument, TuningWarning


def maximise_evidence(
    log_evidence: Callable[[Tensor], Tensor], start: Tensor, n_steps: int, lr: float, *, progress_bar: bool = False
) -> Tensor:
    """Adam on log δ; returns the best δ seen, which is the start if every step made it worse.

    Args:
        log_evidence: Log evidence, 0-dim, at a prior precision of the form of `start`, differentiable.
        start: δ, `[1]`, `[n_tensors]` or `[P]`.
        n_steps: Steps.
        lr: Step size on log δ.
        progress_bar: Show one.

    Raises:
        InvalidArgument: No step, a step size that is not positive, or no finite evidence.
    """
    if n_steps < 1:
        raise InvalidArgument(f"n_steps={n_steps}; it must be at least 1.")
    if not 0 < lr < math.inf:
        raise InvalidArgument(f"lr={lr}; it must be positive and finite.")
    with torch.inference_mode(False), torch.enable_grad():
        log_precision = start.log().requires_grad_()
        optimizer = torch.optim.Adam([log_precision], lr=lr)
        best, best_value, bad = start, -torch.inf, 0
        for _ in trange(n_steps + 1, desc="evidence", disable=not progress_bar):
            precision = log_precision.exp()
            value = log_evidence(precision)
            number = value.item()
            if number > best_value:
                best, best_value = precision.detach().clone(), number
            elif number != number:
                bad += 1
            optimizer.zero_grad()
            (-value).backward()
            optimizer.step()
    if best_value == -torch.inf:
        raise InvalidArgument("the log evidence is not finite at any prior precision; check the data and the fit.")
    if bad:
        warnings.warn(f"the log evidence was NaN in {bad} of {n_steps + 1} steps.", TuningWarning, stacklevel=4)
    return best
