"""Targets that a loss around a likelihood's own stands for, as scripts write it to reshape or to scale targets."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from laplace.core import batch as batches
from laplace.core import checks
from laplace.core.memory import ran_out
from laplace.errors import UnsupportedError
from laplace.likelihoods.base import Likelihood

Loss = Callable[[Tensor, Tensor], Tensor]
"""A loss of outputs `[B, C]` and targets, summed over the data, in the scale of PyTorch's module."""


def recovered_targets(likelihood: Likelihood, loss: Loss, f: Tensor, y: Tensor) -> Tensor:
    """Checked targets t at which the likelihood's own loss is that of a user, ℓ(f, y).

    With E[t | f] the mean of a likelihood whose loss has the gradient E[t | f] − t, targets are E[t | f] − ∂ℓ/∂f.

    Args:
        likelihood: One that has a loss module of PyTorch.
        loss: ℓ.
        f: Outputs `[B, C]`.
        y: Targets as the loader gives them.

    Raises:
        UnsupportedError: The likelihood has no such module, or ℓ is not its loss of any targets.
        InvalidData: The targets that it stands for cannot be used.
    """
    factor = likelihood.torch_loss()[1]
    with torch.inference_mode(False), torch.enable_grad():
        outputs = f.detach().clone().requires_grad_()
        try:
            value = loss(outputs, y)
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            if ran_out(error):
                raise
            raise _no_transform(likelihood) from error
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise _no_transform(likelihood)
        (gradient,) = torch.autograd.grad(factor * value.sum(), outputs)
    targets = likelihood.check_targets(f, _targets(likelihood, likelihood.inverse_link(f) - gradient, y))
    own, given = likelihood.loss(f, targets), factor * value.detach().reshape(())
    allowed = torch.finfo(f.dtype).eps ** 0.5 * (1 + own.abs())
    checks.require((own - given).abs() <= allowed, lambda: _no_transform(likelihood))
    return targets


def _targets(likelihood: Likelihood, values: Tensor, y: Tensor) -> Tensor:
    """Targets from computed values `[B, C]`; ignored labels, whose loss has no gradient, stay ignored."""
    if likelihood.ignore_index is None or y.shape != values.shape[:1] or y.is_floating_point():
        return likelihood.as_targets(values)
    ignored = batches.is_ignored(y, likelihood.ignore_index)
    any_label = functional.one_hot(torch.zeros_like(y), values.shape[1]).to(values)
    targets = likelihood.as_targets(torch.where(ignored.unsqueeze(1), any_label, values))
    return targets.masked_fill(ignored, likelihood.ignore_index) if targets.ndim == 1 else targets


def _no_transform(likelihood: Likelihood) -> UnsupportedError:
    return UnsupportedError(
        f"the lossfunc that was assigned to the backend is not the loss of likelihood={likelihood.name!r}, summed over "
        "the data, at other targets: curvature and evidence would not belong to it. Pass a likelihood object with this "
        "loss (docs/extending.md, A likelihood)."
    )
