"""Predictive densities of classes and binary targets against torch.distributions."""

from __future__ import annotations

import math

import torch
from torch import distributions

from laplace.likelihoods import Bernoulli, Categorical
from tests.likelihoods.test_gaussian import ONE
from tests.reference.compare import assert_close


def test_discrete_predictive_densities() -> None:
    p = torch.randn(5, 3, dtype=torch.float64).softmax(1)
    y = torch.randint(3, (5,))
    exact = -distributions.Categorical(p).log_prob(y)
    assert_close(Categorical().predictive_nll(p, None, y, ONE), exact, "algebra")
    labels = torch.randint(2, (5, 3)).double()
    exact = -distributions.Bernoulli(p).log_prob(labels).sum(1)
    assert_close(Bernoulli().predictive_nll(p, None, labels, ONE), exact, "algebra")


def test_a_probability_of_zero_is_a_large_finite_loss() -> None:
    sure = torch.tensor([[1.0, 0.0]])
    wrong = Categorical().predictive_nll(sure, None, torch.tensor([1]), torch.ones(()))
    assert math.isclose(wrong.item(), -math.log(torch.finfo(torch.float32).tiny), rel_tol=1e-6)
    right = Bernoulli().predictive_nll(sure, None, sure, torch.ones(()))
    assert right.item() == 0
    wrong = Bernoulli().predictive_nll(sure, None, 1 - sure, torch.ones(()))
    assert torch.isfinite(wrong).all()
    assert wrong.item() > 20
