"""Forecast of whether a posterior that was trained online predicts worse than its own network.

No data were held out of its training. To first order the outputs at an input i without it are those that its own loss
leaves when it is taken away (the infinitesimal jackknife: Hampel, 1974; Koh and Liang, 2017),

    f₋ᵢ = f_i + J_i P⁻¹ J_iᵀ w g_i,    g_i = ∂ℓ_i/∂f,

with the posterior precision P of all weights that training moved, and w = 1/(σ²T). A network that fits its labels one
by one is as wrong there as on new data, and needs the width that the posterior gives it; another one is as right as
before. There the posterior, with the covariance that it has, is compared with the network.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from laplace.core import batch as batches
from laplace.core.batch import Inputs
from laplace.core.precision_policy import widened
from laplace.enums import HessianStructure, LinkApprox, SubsetOfWeights
from laplace.errors import LaplaceError, silently
from laplace.grid import from_names
from laplace.likelihoods.targets import mean_of, variance_of
from laplace.network import next_token
from laplace.network.model_guard import autograd_mode, same_random_state
from laplace.parametric import ParametricLaplace
from laplace.posterior.posterior import Posterior
from laplace.predictive.latent import LinearisedOutputs
from laplace.tuning.held_out import warn_of_losses
from laplace.tuning.losses import Targets

_ROWS = 128
"""Data that are looked at, at most: the first of the loader."""

_ENTRIES = 2**28
"""Entries of the Jacobian of one input, above which nothing is said."""


def warn_if_worse(la: ParametricLaplace, precision_rest: Tensor | None, train_loader: Iterable[Any]) -> None:
    """Warns of a posterior that is forecast to predict worse than the network; what cannot be forecast is passed over.

    `precision_rest` is the prior precision of weights that are not random but trained; None without any.
    """
    with autograd_mode(), torch.no_grad(), suppress(LaplaceError):
        losses = losses_without_each(la, precision_rest, train_loader)
        if losses is not None:
            warn_of_losses(
                *losses,
                "online training: the posterior that the evidence chose is forecast to predict worse than the network "
                f"alone: at {len(losses[0])} of the training data, to first order as if each had been left out,",
            )


def losses_without_each(
    la: ParametricLaplace, precision_rest: Tensor | None, train_loader: Iterable[Any], link: str = LinkApprox.PROBIT
) -> tuple[Tensor, Tensor] | None:
    """Negative log likelihoods `[n]` of training data, each left out, under the posterior and by the network alone.

    The posterior predicts by a link, that of `la(x)`.

    None where predictions are not those of one link, of outputs with positions, and where it would not be cheap. The
    global random state is that before.
    """
    posterior, n_moved = la.snapshot(), sum(p.numel() for p in la.model.parameters() if p.requires_grad)
    likelihood, sigma = posterior.likelihood, posterior.hypers.sigma_noise
    if not likelihood.has_noise and link not in likelihood.links:
        return None
    if posterior.fit.n_outputs * n_moved > _ENTRIES:
        return None
    with same_random_state(posterior.model):
        data = _first(la, train_loader)
        moved = posterior if precision_rest is None else _of_all_weights(la, precision_rest, data)
    w = likelihood.curvature_scale("ggn", sigma, posterior.hypers.temperature)
    parts: list[tuple[Tensor, Tensor]] = []
    for x, y in data:
        f, covariance, positions = _outputs(posterior, x)
        if positions:
            return None
        y = Targets.from_outputs(posterior, f, y, positions).y
        influence = covariance if moved is posterior else _outputs(moved, x)[1]
        f = f + (influence @ (w * likelihood.gradient(f, y)).unsqueeze(2)).squeeze(2)
        ours = likelihood.target.summary(likelihood, f, covariance, link, for_scores=True)
        network = likelihood.inverse_link(f)
        values = [
            widened(likelihood.predictive_nll(mean_of(one), variance_of(one), y, sigma)) for one in (ours, network)
        ]
        parts.append((values[0], values[1]))
    ours, network = (torch.cat(column) for column in zip(*parts, strict=True))
    known = ours.isfinite() & network.isfinite()
    return ours[known], network[known]


def _first(la: ParametricLaplace, train_loader: Iterable[Any]) -> list[tuple[Inputs, Tensor]]:
    """The first data of a loader, in its batches; of the last of these evenly spaced ones."""
    data: list[tuple[Inputs, Tensor]] = []
    left, device = _ROWS, la.prior_mean.device
    for _, x, y in next_token.read(train_loader, la.dict_key_y, device, la.engine.target_rules, la.weights.model):
        if len(y) > left:
            rows = torch.arange(left, device=device) * len(y) // left
            x, y = batches.select(x, rows, len(y)), y[rows]
        data.append((x, y))
        left -= len(y)
        if not left:
            break
    return data


def _outputs(posterior: Posterior, x: Inputs) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Outputs `[B, C]` at inputs, their covariances `[B, C, C]`, and positions."""
    latent = LinearisedOutputs(posterior, posterior.predictive_precision(), x, create_graph=False, through_x=False)
    gaussian = latent.gaussian("full")
    return gaussian.mean, gaussian.covariance, gaussian.positions


def _of_all_weights(la: ParametricLaplace, precision_rest: Tensor, data: list[tuple[Inputs, Tensor]]) -> Posterior:
    """The posterior of all weights that training moved, with Kronecker factors of these data, which stand for all."""
    whole: ParametricLaplace = from_names(
        la.weights.model, la.likelihood_object, SubsetOfWeights.ALL, HessianStructure.KRON, sigma_noise=la.sigma_noise,
        temperature=la.temperature, dict_key_x=la.dict_key_x, dict_key_y=la.dict_key_y,
        forward_fn=la.snapshot().choices.forward_fn,
    )  # fmt: skip
    sizes = [slot.size for slot in la.problem.slots]
    random = {id(tensor): part for tensor, part in zip(la.params, la.prior_precision_diag.split(sizes), strict=True)}
    whole.prior_precision = torch.stack([random.get(id(tensor), precision_rest).mean() for tensor in whole.params])
    with silently():  # of the network: the fit of `la` has said it
        whole.fit(data)
    return whole.snapshot()
