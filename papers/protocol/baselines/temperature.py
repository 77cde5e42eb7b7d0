"""Temperature scaling (Guo et al., 2017)."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace.metrics import nll
from protocol.measures import SMALLEST


def best_temperature(logits: Tensor, y: Tensor) -> float:
    """The temperature of a grid on [0.1, 10] with the smallest NLL of validation logits `[B, C]`."""
    candidates = torch.logspace(-1, 1, 201).tolist()
    return min(candidates, key=lambda t: float(nll((logits / t).softmax(1).clamp(SMALLEST, 1), y)))
