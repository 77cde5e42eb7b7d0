"""A root of the covariance that is assigned."""

from __future__ import annotations

import copy

import pytest
import torch

from laplace.errors import (
    NotFittedError,
)
from tests.contract.test_by_hand import PROBLEM, X, fitted, make
from tests.reference.compare import assert_close


def test_an_assigned_root_is_that_of_predictions_until_something_else_is_given() -> None:
    la, plain = fitted(), fitted()
    root = torch.linspace(0.1, 0.3, la.n_params, dtype=torch.float64)
    changes = (
        lambda: setattr(la, "prior_precision", 1.0),
        lambda: la.fit(PROBLEM.batches(4)),
        lambda: setattr(la, "H", plain.H),
        lambda: setattr(la, "mean", plain.mean),
    )
    for change in changes:
        la.posterior_scale = root
        assert_close(la.posterior_variance, root.square(), "algebra")
        assert_close(la.log_marginal_likelihood(), plain.log_marginal_likelihood(), "exact")
        draws = la.sample(2, torch.Generator().manual_seed(0))
        assert_close(draws, la.mean + (draws - la.mean) / root * root, "algebra")
        loaded = make()
        loaded.load_state_dict(la.state_dict())
        assert_close(loaded(X)[1], la(X)[1], "exact")
        assert_close(copy.deepcopy(la)(X)[1], la(X)[1], "exact")
        change()
        assert_close(la(X)[1], plain(X)[1], "backend")
    with pytest.raises(NotFittedError):
        make().posterior_scale = root
