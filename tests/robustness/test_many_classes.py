"""Heads of many classes: nothing is as large as classes × classes where the structure does not need it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.curvature import NativeEF
from laplace.likelihoods.output_hessian import OutputHessian
from tests.reference.compare import assert_close
from tests.weights.test_base import Largest

HIDDEN = 3


def problem(n_classes: int, n_data: int = 4) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, n_classes)).double()
    return model, torch.randn(n_data, 2, dtype=torch.float64), torch.randint(n_classes, (n_data,))


@pytest.mark.parametrize("backend", [{}, {"backend": NativeEF}, {"backend_kwargs": {"stochastic": True}}])
def test_a_vocabulary_of_the_usual_size(backend: dict[str, Any]) -> None:
    """50,257 classes: fit, probit and evidence hold rows × classes, where the identity alone would take 20 GB."""
    model, x, y = problem(50257, 6)
    la = Laplace(model, "classification", "last_layer", "diag", **backend)
    with Largest() as largest:
        la.fit([(x, y)])
        found = la(x)
        la.log_marginal_likelihood()
    assert largest.entries <= len(x) * 50257
    assert found.shape == (6, 50257)


STRUCTURES = ("diag", "lowrank", "lowrank_kron")


@pytest.mark.parametrize("weights", ["last_layer", "all"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_no_structure_of_vectors_builds_classes_times_classes(structure: str, weights: str) -> None:
    n_classes = 1200
    model, x, y = problem(n_classes)
    budget = {"memory_budget": 2**20} if weights == "all" else {}
    options = {} if structure == "diag" else {"structure_kwargs": {"rank": 4, "oversampling": 2}}
    la = Laplace(model, "classification", weights, structure, backend_kwargs=budget, **options)
    with Largest() as largest:
        la.fit([(x, y)])
        la(x)
        la.log_marginal_likelihood()
    assert largest.entries < n_classes**2 / 2


def test_the_diagonal_of_a_softmax_head() -> None:
    """H_cd = Σ_b p_bc (1 − p_bc) φ_bd², and the variance of f_c is Σ_d φ_d² / (H_cd + δ), with φ = [features, 1]."""
    model, x, y = problem(50)
    la = Laplace(model, "classification", "last_layer", "diag", prior_precision=0.7)
    la.fit([(x, y)])
    with torch.no_grad():
        phi = torch.cat([torch.tanh(model[0](x)), torch.ones(4, 1, dtype=torch.float64)], 1)
        f = model(x)
    p = f.softmax(1)
    H = torch.einsum("bc,bd->cd", p * (1 - p), phi.square())
    assert_close(la.H, torch.cat([H[:, :-1].flatten(), H[:, -1]]), "algebra")
    variance = torch.einsum("bd,cd->bc", phi.square(), 1 / (H + 0.7))
    assert_close(la(x), (f / (1 + math.pi / 8 * variance).sqrt()).softmax(1), "algebra")


@pytest.mark.parametrize("budget", [1, 2**12, 2**30])
def test_cotangents_that_are_made_as_they_are_asked_for(budget: int) -> None:
    """Few at a time under a small budget, with the same numbers."""
    model, x, y = problem(6)
    fits = [
        Laplace(model, "classification", "all", "diag", backend_kwargs=kw) for kw in ({}, {"memory_budget": budget})
    ]
    for la in fits:
        la.fit([(x, y)])
    assert_close(fits[1].H, fits[0].H, "algebra")
    assert_close(fits[1](x), fits[0](x), "algebra")


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_the_jacobian_of_one_datum_is_larger_than_the_budget(structure: str) -> None:
    """Variances of a few outputs at a time: nothing of outputs × weights is held, with the same numbers."""
    torch.manual_seed(0)
    n_classes = 300
    layers = (nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 16, 3, stride=2), nn.Tanh(), nn.Flatten())
    model = nn.Sequential(*layers, nn.Linear(64, n_classes)).double()
    x, y = torch.randn(3, 2, 6, 6, dtype=torch.float64), torch.tensor([0, 7, 299])
    plain, few = (
        Laplace(model, "classification", "all", structure, backend_kwargs={"stochastic": True, **budget})
        for budget in ({}, {"memory_budget": 2**17})
    )
    plain.fit([(x, y)])
    few.fit([(x, y)])
    expected = plain(x), plain.predict(x, diagonal_output=True).latent_variance
    with Largest() as largest:
        found = few(x), few.predict(x, diagonal_output=True).latent_variance
    entries = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    assert largest.entries < n_classes * entries / 3
    assert_close(found[0], expected[0], "algebra")
    assert_close(found[1], expected[1], "algebra")
    assert_close(few(x[:1]), expected[0][:1], "algebra")


@pytest.mark.parametrize("vec", [False, True])
def test_columns_of_a_root(vec: bool) -> None:
    p = torch.softmax(torch.randn(3, 5, dtype=torch.float64), 1)
    hessian = OutputHessian(p, p if vec else None)
    whole = hessian.root()
    assert_close(torch.einsum("kbc,kbd->bcd", whole, whole), hessian.matrix(), "algebra")
    assert_close(torch.cat([hessian.root(slice(0, 2)), hessian.root(slice(2, 5))]), whole, "algebra")
