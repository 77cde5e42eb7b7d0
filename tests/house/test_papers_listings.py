"""The two listings of "Laplace Redux" (Daxberger et al., 2021) run as printed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from laplace import DiagLaplace, KronLLLaplace
from laplace.errors import TuningWarning
from tests import grid

LISTING_1 = """
from laplace import Laplace

# Load pre-trained model
model = load_map_model()

# Define and fit LA variant with custom settings
la = Laplace(model, 'classification',
              subset_of_weights='all',
              hessian_structure='diag')
la.fit(train_loader)
la.optimize_prior_precision(method='CV',
                            val_loader=val_loader)

# Make prediction with custom predictive approx.
pred = la(x, pred_type='glm', link_approx='probit')
"""

LISTING_2 = """
from laplace import Laplace

# Load un- or pre-trained model
model = load_map_model()

# Fit default, recommended LA variant:
# Last-layer KFAC LA
la = Laplace(model, 'regression')
la.fit(train_loader)

# Differentiate marginal likelihood w.r.t.
# prior precision and observation noise
ml = la.marglik(prior_precision=prior_prec,
                  sigma_noise=obs_noise)
ml.backward()
"""


def run(listing: str, likelihood: str, **names: Any) -> dict[str, Any]:
    def load_map_model() -> nn.Module:
        model = grid.network(likelihood)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        loss = nn.functional.cross_entropy if likelihood == "classification" else nn.functional.mse_loss
        for _ in range(30):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
        return model

    x, y = grid.data(likelihood)
    namespace = {
        "load_map_model": load_map_model,
        "train_loader": grid.batches(likelihood),
        "val_loader": grid.batches(likelihood, seed=11),
        "x": x,
        **names,
    }
    exec(compile(listing, "listing", "exec"), namespace)
    return namespace


@pytest.mark.filterwarnings(f"ignore::{TuningWarning.__module__}.{TuningWarning.__name__}")
def test_listing_1() -> None:
    names = run(LISTING_1, "classification")
    la, prediction = names["la"], names["pred"]
    assert type(la) is DiagLaplace
    assert prediction.shape == (12, 3)
    torch.testing.assert_close(prediction.sum(1), torch.ones(12))
    assert la.prior_precision.item() != 1.0
    hits = (prediction.argmax(1) == names["model"].eval()(names["x"]).argmax(1)).float().mean()
    assert hits == 1


def test_listing_2() -> None:
    prior, noise = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    names = run(LISTING_2, "regression", prior_prec=prior, obs_noise=noise)
    la = names["la"]
    assert type(la) is KronLLLaplace
    assert prior.grad is not None
    assert noise.grad is not None
    step = 1e-2
    for tensor, name in ((prior, "prior_precision"), (noise, "sigma_noise")):
        up, down = (la.marglik(**{name: tensor.detach() + s}).item() for s in (step, -step))
        la.marglik(**{name: tensor.detach()})
        assert tensor.grad.item() == pytest.approx((up - down) / (2 * step), rel=1e-2)


def test_the_usual_loop_over_hyper_parameters() -> None:
    """The most common hand-written pattern: Adam on the logarithms, through the evidence."""
    la = grid.fitted("last_layer", "kron", "regression")
    log_prior, log_sigma = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([log_prior, log_sigma], lr=1e-1)
    values = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = -la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    assert values[-1] < values[0]
    assert la.log_marginal_likelihood().item() == pytest.approx(-values[-1], rel=1e-4)


def test_hyper_parameters_by_their_setters_keep_the_graph() -> None:
    la = grid.fitted("all", "full", "regression")
    log_prior, log_sigma = torch.zeros(1, requires_grad=True), torch.zeros((), requires_grad=True)
    la.prior_precision = log_prior.exp()
    la.sigma_noise = log_sigma.exp()
    la.log_marginal_likelihood().backward()
    by_setter = log_prior.grad, log_sigma.grad
    log_prior.grad = log_sigma.grad = None
    la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp()).backward()
    torch.testing.assert_close((log_prior.grad, log_sigma.grad), by_setter)
