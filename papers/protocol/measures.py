"""The measures of the papers' tables, of class probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from laplace.metrics import accuracy, auroc, brier, expected_calibration_error, mean_confidence, nll

SMALLEST = 1e-7
"""Probabilities below it are lifted to it: a sampled mean may be exactly zero, the NLL infinite."""


def class_probabilities(p: Tensor) -> Tensor:
    """Probabilities of the classes `[B, C]`, also where only that of class 1 is given, `[B, 1]`."""
    return torch.cat([1 - p, p], 1) if p.shape[1] == 1 else p


def classification(p: Tensor, y: Tensor, n_bins: int = 15) -> dict[str, float]:
    """Accuracy, NLL (nats per datum), Brier score, calibration error and confidence of `[B, C]` for labels `[B]`."""
    p = class_probabilities(p)
    return {
        "accuracy": float(accuracy(p, y)),
        "NLL": float(nll(p.clamp(SMALLEST, 1), y)),
        "Brier": float(brier(p, y)),
        "ECE": float(expected_calibration_error(p, y, n_bins)),
        "confidence": float(mean_confidence(p)),
    }


def detection(p_in: Tensor, p_out: Tensor) -> dict[str, float]:
    """Confidence on inputs of other classes, and how well confidence tells them from data, `[B, C]` each."""
    p_in, p_out = class_probabilities(p_in), class_probabilities(p_out)
    return {
        "confidence": float(mean_confidence(p_out)),
        "AUROC": float(auroc(p_in.amax(1), p_out.amax(1))),
    }


def entropy(p: Tensor) -> Tensor:
    """−Σ_c p_c log p_c in nats, `[B]`."""
    p = class_probabilities(p)
    return -torch.special.xlogy(p, p).sum(1)
