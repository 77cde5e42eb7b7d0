"""Networks whose outputs at a datum depend on the data beside it are noticed at the first prediction."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.curvature import NativeHessian
from laplace.errors import ApproximationWarning

N = 12


class ByBatch(nn.Module):
    """Inputs are standardised by the mean and variance of their batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(3, 5), nn.Linear(5, 3)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        h = torch.tanh(self.body(x))
        return self.head((h - h.mean(0)) / (h.var(0, correction=0) + 1e-5).sqrt())


class Alone(ByBatch):
    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.head(torch.tanh(self.body(x)))


def fitted(model: nn.Module, size: int = 6, **options: Any) -> tuple[Any, Tensor]:
    torch.manual_seed(2)
    x, y = torch.randn(N, 3), torch.randint(3, (N,))
    la = Laplace(model, "classification", **options)
    la.fit(list(zip(x.split(size), y.split(size), strict=True)))
    return la, x


@pytest.mark.parametrize("pred_type", ["glm", "nn"])
@pytest.mark.parametrize("size", [2, 6])
def test_the_first_prediction_warns_once(size: int, pred_type: Any) -> None:
    la, x = fitted(ByBatch(), size, subset_of_weights="last_layer", hessian_structure="kron")
    with pytest.warns(ApproximationWarning, match=r"depend on the data beside it.*la\(x\)\[:2\] is not la\(x\[:2\]\)"):
        la(x, pred_type=pred_type)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la(x, pred_type=pred_type)


def test_the_exact_hessian_too() -> None:
    options: dict[str, Any] = {"subset_of_weights": "all", "hessian_structure": "full", "backend": NativeHessian}
    la, x = fitted(ByBatch(), prior_precision=100.0, **options)
    with pytest.warns(ApproximationWarning, match="depend on the data beside it"):
        la.predict(x)


@pytest.mark.parametrize("size", [2, 6])
@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_others_are_silent(weights: Any, size: int) -> None:
    model = Alone()
    la, x = fitted(model, size, subset_of_weights=weights, hessian_structure="kron")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la(x)
        la(x[:1])
    assert la.snapshot().data.watch.fingerprint.reference.is_alone == (size > 2)


class FastProducts(Alone):
    """Products of three data or more take another kernel, and lose digits, as by several layers in TF32."""

    coupled = 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if len(x) > 2:
            mantissa, exponent = torch.frexp(h.detach())
            h = h + (torch.ldexp((mantissa * 2**8).round() / 2**8, exponent) - h.detach())
        h = torch.tanh(h)
        return self.head(h + self.coupled * h.mean())


@pytest.mark.parametrize("size", [2, 6])
@pytest.mark.parametrize("weights", ["last_layer", "all"])
def test_other_kernels_for_more_data_are_no_coupling(weights: Any, size: int) -> None:
    model = FastProducts()
    la, x = fitted(model, size, subset_of_weights=weights, hessian_structure="kron")
    f = model(x)
    assert 2e-4 < (model(x[:2]) - f[:2]).abs().max() / f.abs().max() < 1e-2  # more than rounding of float32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la(x)


@pytest.mark.parametrize("coupled", [0.01, 1.0])
def test_a_coupling_is_found_behind_other_kernels(coupled: float) -> None:
    model = FastProducts()
    model.coupled = coupled
    la, x = fitted(model, 2, subset_of_weights="last_layer", hessian_structure="kron")
    with pytest.warns(ApproximationWarning, match="depend on the data beside it"):
        la(x)
