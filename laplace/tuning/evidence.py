"""Empirical Bayes: the log evidence as a function of the logarithms of the hyper-parameters (MacKay, 1992)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laplace.network.model_guard import own_mode
from laplace.tuning.optimise import Evaluate
from laplace.tuning.settings import Coordinates
from laplace.tuning.subject import PosteriorGroup

if TYPE_CHECKING:
    from laplace.posterior.parametric import ParametricLaplace


def negative_evidence(la: ParametricLaplace | PosteriorGroup, coordinates: Coordinates) -> Evaluate:
    """−log p(D) and its gradient.

    Args:
        la: A fitted posterior, or several; not changed.
        coordinates: What is tuned.
    """
    subject = PosteriorGroup.of(la)

    def evaluate(logs: Tensor) -> tuple[float, Tensor]:
        with own_mode(), torch.enable_grad():
            leaf = logs.clone().requires_grad_()
            value = -subject.log_evidence(coordinates.setting(leaf))
            (gradient,) = torch.autograd.grad(value, leaf)
            return value.item(), gradient

    return evaluate
