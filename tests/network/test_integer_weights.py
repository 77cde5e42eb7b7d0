"""Base models of four or eight bits, frozen and of integers, with adapters in float32 beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import ModelChangedError
from tests.reference.compare import assert_close


class Quantised(nn.Module):
    """A layer that stores its weight as integers, and multiplies by what they stand for."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        weight = torch.randn(outputs, width)
        self.scale = float(weight.abs().max() / 7)
        self.weight = nn.Parameter((weight / self.scale + 8).round().to(torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, (self.weight.to(x.dtype) - 8) * self.scale)


class Adapted(nn.Module):
    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.base = Quantised(width, outputs)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(Adapted(5, 4), nn.Tanh(), Adapted(4, 3)), torch.randn(9, 5), torch.arange(9) % 3


def dense_ggn(model: nn.Module, x: Tensor) -> Tensor:
    adapters, f = [p for p in model.parameters() if p.requires_grad], model(x)
    rows = [torch.autograd.grad(value, adapters, retain_graph=True) for value in f.flatten()]
    J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).view(*f.shape, -1)
    p = torch.softmax(f, -1).detach()
    return torch.einsum("bcp,bcd,bdq->pq", J, torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1), J)


def test_the_curvature_is_that_of_the_adapters() -> None:
    model, x, y = problem()
    la = Laplace(model, "classification", "all", "full")
    la.fit([(x, y)])
    assert la.n_params == 2 * (5 + 4 + 4 + 3)
    assert_close(la.H, dense_ggn(model, x), "float32")


@pytest.mark.parametrize("structure", ["diag", "kron", "lowrank", "matrix_free"])
def test_everything_runs(structure: Any) -> None:
    model, x, y = problem()
    before = [p.clone() for p in model.parameters()]
    la = Laplace(model, "classification", "all", structure)
    la.fit([(x, y)])
    la.optimize_prior_precision(n_steps=2)
    for options in ({}, {"link_approx": "mc"}, {"pred_type": "nn", "link_approx": "mc", "n_samples": 3}):
        assert la(x, **options).isfinite().all()
    assert all(map(torch.equal, before, model.parameters()))


def test_a_changed_base_is_noticed() -> None:
    model, x, y = problem()
    la = Laplace(model, "classification", "all", "diag")
    la.fit([(x, y)])
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1
    with pytest.raises(ModelChangedError):
        la(x)
