"""Factorisations belong to the fit: every value of a hyper-parameter shares them."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from laplace import ParametricLaplace
from laplace.core.cached import Recent
from laplace.structures import STRUCTURES, LowRankCurvature
from tests import problems as catalogue
from tests.conformance.cases import Case

NOISES = {"one noise": 1.0, "one per output": torch.tensor([0.7, 1.3], dtype=torch.float64)}
each = pytest.mark.parametrize("noise", NOISES)


@pytest.fixture
def decomposed(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Widths of the matrices that were decomposed, with how often."""
    widths: Counter[int] = Counter()
    for name in ("eigh", "eigvalsh"):
        real = getattr(torch.linalg, name)

        def counted(matrix: Tensor, *args: Any, real: Any = real, **options: Any) -> Any:
            widths[matrix.shape[-1]] += matrix.shape[:-2].numel()
            return real(matrix, *args, **options)

        monkeypatch.setattr(torch.linalg, name, counted)
    return widths


def fitted(structure: str, noise: str) -> ParametricLaplace:
    return Case(catalogue.get("mlp_regression"), structure, "all").fit(sigma_noise=NOISES[noise])


@each
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_hundred_priors_take_one_decomposition_of_every_factor(
    structure: str, noise: str, decomposed: Counter[int]
) -> None:
    la = fitted(structure, noise)
    decomposed.clear()
    for delta in torch.logspace(-2, 2, 100):
        la.log_marginal_likelihood(delta)
    layers = [m for m in la.model.modules() if isinstance(m, torch.nn.Linear)]
    factors = {
        "kron": Counter([side for layer in layers for side in (layer.in_features, layer.out_features)]),
        "block": Counter(layer.out_features * (layer.in_features + 1) for layer in layers),
        "full": Counter({la.n_params: 1} if noise == "one noise" else {}),  # of several terms Cholesky's is cheaper
    }
    factors["matrix_free"] = factors["full"]  # a matrix so small is formed
    if isinstance(curvature := la.fitted().curvature, LowRankCurvature) and noise != "one noise":
        factors["lowrank"] = Counter({curvature.rank: 1})
    assert decomposed == factors.get(structure, Counter()), "of others all is known when the fit ends"


@each
@pytest.mark.parametrize("structure", ["kron", "block", "ekfac", "lowrank_kron"])
def test_predictions_at_other_hyper_parameters_decompose_nothing(
    structure: str, noise: str, decomposed: Counter[int]
) -> None:
    la = fitted(structure, noise)
    x = catalogue.get("mlp_regression").x
    la(x)
    decomposed.clear()
    for delta in (0.1, 1.0, 10.0):
        la.prior_precision = delta
        la(x)
        la.posterior_variance.sum()
    assert not decomposed


@pytest.mark.parametrize("structure", STRUCTURES)
def test_what_is_kept_is_copied_with_the_posterior(structure: str) -> None:
    la = fitted(structure, "one per output")
    value = la.log_marginal_likelihood()
    for other in (copy.deepcopy(la), pickle.loads(pickle.dumps(la))):
        assert torch.equal(other.log_marginal_likelihood(), value)


def test_recent() -> None:
    """One value, for equal keys; nothing of a graph that belongs to a caller."""
    recent: Recent[Tensor] = Recent()
    calls: list[int] = []

    def compute() -> Tensor:
        calls.append(1)
        return torch.ones(1)

    key = torch.tensor([1.0, 2.0])
    first = recent(key, compute)
    assert recent(key.clone(), compute) is first and len(calls) == 1
    key += 1  # what is kept does not follow
    assert recent(torch.tensor([1.0, 2.0]), compute) is first
    assert recent(key, compute) is not first and len(calls) == 2
    assert recent(key.double(), compute) is not None and len(calls) == 3
    with torch.enable_grad():
        leaf = key.clone().requires_grad_()
        recent(leaf, compute)
        recent(leaf, compute)
    assert len(calls) == 5
    recent(key.double(), compute)
    assert len(calls) == 5, "the value of a graph displaced what was kept"
    recent("clamp", compute)
    with torch.inference_mode():
        assert not recent(None, lambda: torch.ones(2) * 2).is_inference()
