"""Predictions of posteriors over functions are differentiable in their hyper-parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from laplace import (
    ELLA,
    BaseFunctionalLaplace,
    FunctionalLaplace,
    FunctionalLLLaplace,
    ParametricLaplace,
    VaLLA,
)
from laplace.errors import UnsupportedError
from tests import problems as catalogue
from tests.conformance.test_prediction_gradients import MOMENTS, Quantity, check

OUTPUTS = {name: MOMENTS[name] for name in ("covariance", "variance", "joint covariance", "interval")}
WEIGHTS = {name: MOMENTS[name] for name in ("samples of weights", "posterior_variance", "posterior_covariance")}


def moments(la: ParametricLaplace, x: Tensor) -> Tensor:
    assert isinstance(la, BaseFunctionalLaplace)
    return la.predictive_moments(x, joint=True)[1]


EVERY: dict[str, Quantity] = {**OUTPUTS, **WEIGHTS, "predictive_moments": moments}

KINDS: dict[str, tuple[type[BaseFunctionalLaplace], dict[str, Any]]] = {
    "subset": (FunctionalLaplace, {"n_subset": 5}),
    "independent": (FunctionalLaplace, {"n_subset": 5, "independent_outputs": True}),
    "last_layer": (FunctionalLLLaplace, {"n_subset": 5}),
    "nystrom": (ELLA, {"subsample_size": 6, "n_eigenvalues": 4}),
    "variational": (VaLLA, {"inducing_locations": "random", "num_inducing": 4}),
}
ONE_PRIOR = ("nystrom", "variational")


@pytest.mark.turns
@pytest.mark.parametrize("several", [True, False], ids=["noises", "one noise"])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_weights(kind: str, several: bool) -> None:
    problem = catalogue.get("mlp_regression")
    sigma = torch.tensor([0.6, 1.1] if several else 0.8, dtype=torch.float64)
    make, options = KINDS[kind]
    la = make(problem.make_model(), "regression", sigma_noise=sigma, temperature=1.2, **options)
    la.fit(problem.batches(None))
    quantities = OUTPUTS if kind == "independent" else EVERY
    n_tensors = la.n_layers or 0
    per_tensor = torch.linspace(0.5, 1.5, n_tensors, dtype=torch.float64)
    for prior in [torch.tensor([0.7], dtype=torch.float64)] + ([] if kind in ONE_PRIOR else [per_tensor]):
        la.prior_precision = prior
        check(la, "prior_precision", prior, problem.x[:3], quantities)
        if kind == "variational":  # what was trained does not follow noise and temperature any more
            check(la, "sigma_noise", sigma, problem.x[:3], {"interval": EVERY["interval"]})
            continue
        check(la, "sigma_noise", sigma, problem.x[:3], quantities)
        check(la, "temperature", torch.tensor(0.9, dtype=torch.float64), problem.x[:3], quantities)


def test_what_has_no_weights_says_so() -> None:
    problem = catalogue.get("mlp_regression")
    la = FunctionalLaplace(problem.make_model(), "regression", n_subset=5, independent_outputs=True)
    la.fit(problem.batches(None))
    la.prior_precision = torch.ones(1, dtype=torch.float64, requires_grad=True)
    for quantity in WEIGHTS.values():
        with pytest.raises(UnsupportedError, match="no Gaussian over weights"):
            quantity(la, problem.x)
