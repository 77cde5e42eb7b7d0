"""Predictions, moments and samples are differentiable in prior precision, noise and temperature.

Gradients equal central differences in float64, for every structure and choice of weights of the registry.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from laplace import ParametricLaplace
from tests.conformance.cases import Case, drawn, few, priors
from tests.conformance.test_backprop import weighted
from tests.conformance.test_gradients import finite_differences
from tests.reference.compare import assert_close

Quantity = Callable[[ParametricLaplace], Tensor]


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def latent(form: str) -> Quantity:
    def read(la: ParametricLaplace) -> Tensor:
        x = CURRENT["x"]
        if form == "joint":
            return la(x, joint=True)[1]
        return la(x, diagonal_output=form == "diagonal")[1]

    return read


CURRENT: dict[str, Tensor] = {}

REGRESSION: dict[str, Quantity] = {
    "variance": latent("full"),
    "diagonal": latent("diagonal"),
    "joint": latent("joint"),
    "samples": lambda la: la.sample(3, generator=seeded()),
    "posterior_variance": lambda la: la.posterior_variance,
    "posterior_covariance": lambda la: la.posterior_covariance,
    "posterior_scale": lambda la: la.posterior_scale,
    "nn": lambda la: la(CURRENT["x"], pred_type="nn", n_samples=3, generator=seeded())[1],
    "interval": lambda la: torch.stack(la.predict(CURRENT["x"]).interval()),
    "log_prob": lambda la: la.log_prob(la.mean + 0.1),
}


def check(la: ParametricLaplace, name: str, value: Tensor, quantity: Quantity, label: str, some: int = 4) -> None:
    leaf = value.clone().requires_grad_()
    setattr(la, name, leaf)
    total = weighted(quantity(la))
    (gradient,) = torch.autograd.grad(total, leaf, allow_unused=True, materialize_grads=True)
    chosen = torch.randperm(value.numel(), generator=torch.Generator().manual_seed(0))[:some]

    def at(entries: Tensor) -> Tensor:
        setattr(la, name, value.reshape(-1).index_copy(0, chosen, entries).view_as(value))
        return weighted(quantity(la))

    assert_close(at(value.reshape(-1)[chosen]), total.detach(), "algebra", label=f"{label} value")
    expected = finite_differences(at, value.reshape(-1)[chosen])
    setattr(la, name, value)
    assert_close(gradient.reshape(-1)[chosen], expected, "finite_difference", label=f"{label} {name}")


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", names=["mlp_regression"]))
def test_everything(case: Case) -> None:
    CURRENT["x"] = case.problem.x
    bad = []
    for options in ({}, {"damping": True}) if case.structure == "kron" else ({},):
        one = case.fit(temperature=1.2, **options)
        several = case.fit(sigma_noise=torch.ones(case.n_outputs, dtype=torch.float64), temperature=1.2, **options)
        sigma = drawn(case, "sigma", case.n_outputs).mul(0.3).exp()
        for form, (prior, _) in priors(case).items():
            one.prior_precision = several.prior_precision = prior
            one.sigma_noise=0.8
            several.sigma_noise=sigma
            for label, q in REGRESSION.items():
                for la, n, v in ((one,"prior_precision",prior),(one,"sigma_noise",torch.tensor(.7,dtype=torch.float64)),(one,"temperature",torch.tensor(.9,dtype=torch.float64)),(several,"sigma_noise",sigma),(several,"prior_precision",prior)):
                    try: check(la,n,v,q,f"{form} {label}")
                    except Exception as e: bad.append((form,label,n,la is one,options,str(e)[-150:])); setattr(la,n,v)
    for b in bad: print(b)
    assert not bad
