"""The posterior as a value: it does not change, what is derived from a fit is shared, and nothing is held twice."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from laplace import FullLaplace, KronLaplace, Laplace, MixtureLaplace
from laplace.core import linalg
from laplace.errors import InvalidArgument, InvalidData
from tests import problems as catalogue

PROBLEM = catalogue.get("mlp_regression")


def fitted(cls: Any = KronLaplace, **options: Any) -> Any:
    la = cls(PROBLEM.make_model(), PROBLEM.likelihood, **options)
    la.fit(PROBLEM.batches(4))
    return la


@pytest.fixture
def decompositions(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of the matrices that are decomposed from now on."""
    shapes: list[torch.Size] = []
    original = linalg.eigh

    def counted(matrix: Tensor) -> Any:
        shapes.append(matrix.shape)
        return original(matrix)

    monkeypatch.setattr(linalg, "eigh", counted)
    return shapes


def test_a_hundred_steps_make_one_decomposition_of_every_factor(decompositions: list[torch.Size]) -> None:
    la = fitted()
    la.log_marginal_likelihood()
    first = len(decompositions)
    assert first > 0
    la.optimize_prior_precision(n_steps=100)
    la.optimize_hyperparameters(("prior_precision", "sigma_noise"))
    la(PROBLEM.x)
    la.snapshot().at_hyperparameters(la.snapshot().hypers).log_evidence()
    assert len(decompositions) == first


def test_there_is_one_precision_at_a_time() -> None:
    """The former one is gone before the next is made, whoever asked for it."""
    la = fitted(FullLaplace)
    former = weakref.ref(la.posterior())
    assert la.posterior() is former()
    la.prior_precision = 3.0
    made: list[bool] = []
    original = la._posterior.fit.curvature.precision

    def watched(*args: Any, **options: Any) -> Any:
        gc.collect()
        made.append(former() is None)
        return original(*args, **options)

    curvature = copy.copy(la._posterior.fit.curvature)
    object.__setattr__(curvature, "precision", watched)
    la.set_posterior(la.snapshot().with_fit(replace(la.fitted(), curvature=curvature)))
    la(PROBLEM.x)
    assert made == [True]


@pytest.mark.filterwarnings("ignore::laplace.errors.DataWarning")  # data that count twice
def test_a_posterior_does_not_change() -> None:
    la = fitted()
    then = la.snapshot()
    value = then.log_evidence()
    with pytest.raises(FrozenInstanceError):
        then.hypers = then.hypers
    la.prior_precision, la.sigma_noise = 5.0, 0.3
    la.fit(PROBLEM.batches(2), override=False)
    assert torch.equal(then.log_evidence(), value)
    assert then.fit.n_data < la.n_data
    la.set_posterior(then)
    assert torch.equal(la.log_marginal_likelihood(), value)


def test_what_fails_leaves_the_very_same_posterior() -> None:
    la = fitted()
    before, nan = la._posterior, torch.full_like(PROBLEM.x, torch.nan)
    for failing, error in (
        (lambda: la.fit([(nan, PROBLEM.y)]), InvalidData),
        (lambda: la.forget(PROBLEM.batches(4) * 2), InvalidData),
        (lambda: la.log_marginal_likelihood(-1.0), InvalidArgument),
        (lambda: la.refine(PROBLEM.batches(4), "none"), InvalidArgument),
        (lambda: la.optimize_prior_precision(method="none"), InvalidArgument),
    ):
        with pytest.raises(error):
            failing()
        assert la._posterior is before


def test_a_last_layer_is_known_once_the_fit_has_succeeded() -> None:
    la = Laplace(PROBLEM.make_model(), PROBLEM.likelihood, "last_layer", "diag")
    with pytest.raises(InvalidData):
        la.fit([(torch.full_like(PROBLEM.x, torch.nan), PROBLEM.y)])
    assert la.last_layer_name is None
    la.fit(PROBLEM.batches(4))
    assert la.last_layer_name is not None


def test_setters_keep_the_graph_and_arguments_are_stored_without_it() -> None:
    la, leaf = fitted(), torch.tensor([0.7], dtype=torch.float64, requires_grad=True)
    la.prior_precision = leaf.square()
    (slope,) = torch.autograd.grad(la.log_marginal_likelihood(), leaf)
    (same,) = torch.autograd.grad(la.log_marginal_likelihood(leaf.square()), leaf)
    assert torch.equal(slope, same)
    assert not la.prior_precision.requires_grad


def test_components_of_a_mixture_keep_theirs() -> None:
    """A value that one of them refuses reaches none of them."""
    last, all_weights = fitted(), Laplace(PROBLEM.make_model(), PROBLEM.likelihood, "last_layer", "kron")
    all_weights.fit(PROBLEM.batches(4))
    mixture = MixtureLaplace([last, all_weights])
    before = [la._posterior for la in mixture.components]
    with pytest.raises(InvalidArgument):
        mixture.prior_precision = torch.ones(last.n_params)
    assert all(la._posterior is one for la, one in zip(mixture.components, before, strict=True))
