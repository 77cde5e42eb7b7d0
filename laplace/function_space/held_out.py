"""How well a posterior predicts data that it has not seen, while it is being fitted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from laplace.curvature.engine import CurvatureEngine
from laplace.enums import LinkApprox
from laplace.parametric import ParametricLaplace
from laplace.predictive import latent
from laplace.structures.base import Precision
from laplace.tuning.validation import Validation


def held_out_nll(
    la: ParametricLaplace, engine: CurvatureEngine, precision: Precision, sigma_noise: Tensor, loader: Iterable[Any]
) -> float:
    """Mean negative log predictive density, of a regression with its noise, else by the probit approximation.

    Args:
        la: Knows keys, device and likelihood; its own posterior is not read.
        engine: Gives Jacobians.
        precision: The posterior.
        sigma_noise: σ, 0-dim or `[C]`.
        loader: The data.
    """
    likelihood, total, count = la.likelihood_object, 0.0, 0
    for x, y in Validation(loader).batches(la):
        found = latent.linearised(engine, precision, x, "diagonal")
        targets = likelihood.check_targets(found.mean, y)
        variance = found.covariance if likelihood.has_noise else None
        prediction = likelihood.predict(found.mean, found.covariance, LinkApprox.PROBIT)
        total += likelihood.predictive_nll(prediction, variance, targets, sigma_noise).sum().item()
        count += len(targets)
    return total / count
