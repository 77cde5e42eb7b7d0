"""Forecast of whether a posterior predicts worse than the network, from features of the head that the fit kept.

A part of the data is held out, the head is trained anew without it, and on it the posterior, with the covariance it
has, is compared with the network. That takes no pass of the network and no fit. Where features have seen the labels,
as in a network that was trained as a whole, they make both look better than they are on new data: small differences say
nothing then, and no warning is no proof.
"""

from __future__ import annotations

import math
from contextlib import suppress

import torch
from torch import Tensor

from laplace.core.overrides import POSTERIOR, PREDICTIONS
from laplace.core.precision_policy import widened
from laplace.engines.engine import SeenBatch
from laplace.enums import LinkApprox
from laplace.errors import CalibrationWarning, CurvatureError, warn
from laplace.jacobian.heads import HeadBlock
from laplace.jacobian.jacobian import Jacobian
from laplace.network.model_guard import autograd_mode
from laplace.posterior.posterior import Posterior
from laplace.posterior.sharding import shards_of
from laplace.tuning.held_out import Head, ranks_of_data

# What a forecast may take: it is fixed by these numbers, and no clock is read.

_ROWS = 128
"""Data that are looked at, at most; every third of them is held out."""

_LEAST = 30
"""Data below which nothing is said."""

_STEPS = 2
"""Newton steps of the refit."""

_RESIDUAL = 0.2
"""Residual of each, relative to the gradient."""

# What is worth a warning.

_STANDARD_ERRORS = 2.0
"""Of the difference between the losses, that it exceeds."""

_NATS = 0.08
"""Nats that it exceeds as well: a probability of what was observed that is 8 % smaller."""


def warn_if_worse(tuned: tuple[Posterior, ...]) -> None:
    """Warns of a tuned posterior over a head that is forecast to predict worse than the network.

    Args:
        tuned: The posteriors that were tuned; of several, a mixture's, nothing is forecast.

    Warns:
        CalibrationWarning: On held-out data its loss is higher by 0.08 nats and two standard errors at least.
    """
    losses = held_out_losses(tuned[0]) if len(tuned) == 1 else None
    if losses is None:
        return
    ours, network = losses
    difference = ours - network
    mean, error = float(difference.mean()), float(difference.std()) / math.sqrt(len(difference))
    if mean > max(_STANDARD_ERRORS * error, _NATS):
        warn(
            "tuning: the posterior that the evidence chose is forecast to predict worse than the network alone: on "
            f"{len(difference)} of the training data, without which the head was trained anew, its negative log "
            f"likelihood is {float(ours.mean()):.2f}, that of the network {float(network.mean()):.2f} (difference "
            f"{mean:.2f}, standard error {error:.2g}). Call la.calibrate(val_loader), or without validation data "
            "la.calibrate(train_loader=train_loader), before you use its probabilities or intervals.",
            CalibrationWarning,
        )


def held_out_losses(posterior: Posterior) -> tuple[Tensor, Tensor] | None:
    """Negative log likelihoods of some held-out data, `[n]`, under the posterior and by the network alone.

    None where the fit did not keep all of its data, or where it alone does not lead to the posterior. No random numbers
    are drawn but from a generator of its own.
    """
    seen = _kept_by_fit(posterior)
    if not seen:
        return None
    with autograd_mode(), torch.no_grad(), suppress(CurvatureError):  # of a posterior that does not exist
        return _losses(posterior, seen)
    return None


def _kept_by_fit(posterior: Posterior) -> list[SeenBatch]:
    """The data of the fit as it kept them; none where they are not all, or do not say how the posterior predicts."""
    data, engine, likelihood = posterior.data, posterior.cache.engine, posterior.likelihood
    if data is None or engine is None or posterior.overrides(*POSTERIOR, *PREDICTIONS):
        return []
    by_hand = data.refinement is not None or data.assigned_mean is not None or data.source is not data.fit
    if by_hand or posterior.root is not None or data.fit.is_weighed or shards_of(posterior) is not None:
        return []
    if not likelihood.has_noise and LinkApprox.PROBIT not in likelihood.links:
        return []
    seen = list(engine.seen.batches())
    n_data = sum(len(batch.f) for batch in seen)
    return seen if n_data >= _LEAST and n_data == data.fit.n_data else []


def _losses(posterior: Posterior, seen: list[SeenBatch]) -> tuple[Tensor, Tensor] | None:
    likelihood, slots = posterior.likelihood, posterior.problem.slots
    f, y = (torch.cat(column) for column in zip(*((batch.f, batch.y) for batch in seen), strict=True))
    (n_data, n_outputs), width, has_bias = f.shape, seen[0].features.shape[1], len(slots) > 1
    if [slot.size for slot in slots] != [n_outputs * width, n_outputs][: len(slots)]:
        return None  # a part of a head
    ranks = ranks_of_data(y if y.ndim == 1 else None, n_data, torch.Generator().manual_seed(0)).to(f.device)
    n_rows = min(n_data, _ROWS)
    rows = ranks.argsort()[torch.arange(n_rows, device=f.device) * n_data // n_rows]  # classes in their shares
    f, y = f[rows], y[rows]
    features = torch.cat([batch.features for batch in seen])[rows].to(f)
    ones = features.new_ones(n_rows, 1)
    is_out = torch.arange(n_rows, device=f.device) % 3 == 0
    out, rest = is_out.nonzero().flatten(), (~is_out).nonzero().flatten()

    weight = widened(posterior.expansion_point).split([n_outputs * width, n_outputs * has_bias])
    weight = torch.cat([part.view(n_outputs, -1) for part in weight], 1)
    phi = widened(torch.cat([features, ones], 1) if has_bias else features)
    offset = (widened(f) - phi @ weight.T).mean(0) * (not has_bias)
    moved = Head(likelihood, phi, offset, y, weight).refit(rest, max_steps=_STEPS, residual=_RESIDUAL)
    f, y = (phi[out] @ moved.T + offset).to(f), y[out]

    blocks = [HeadBlock(features[out], n_outputs), HeadBlock(ones[out], n_outputs, is_bias=True)][: len(slots)]
    variance = posterior.precision().variance(Jacobian(tuple(blocks)), "diagonal").to(f)
    sigma = posterior.hypers.sigma_noise
    ours = likelihood.predict(f, variance, LinkApprox.PROBIT), variance if likelihood.has_noise else None
    network = likelihood.inverse_link(f), None
    ours, network = (widened(likelihood.predictive_nll(*prediction, y, sigma)) for prediction in (ours, network))
    return ours, network
