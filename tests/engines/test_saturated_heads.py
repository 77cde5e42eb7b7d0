"""Heads in float32 whose probabilities are saturated: their curvature has the digits of float64, entry by entry."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from tests.reference.curvature import output_hessian

pytestmark = pytest.mark.portable


def found(la: Laplace, structure: str) -> tuple[Tensor, Tensor]:
    """The diagonal of the weight's curvature, `[3, 6]`, and the output side `[3, 3]` where there is one."""
    if structure == "kron":
        output, inputs = la.H_facs.kfacs[0]
        return 30 * torch.outer(output.diagonal(), inputs.diagonal()), output
    values = la.H if structure == "diag" else la.fitted().curvature.diagonal[0]
    return values[:18].view(3, 6), torch.empty(0)


@pytest.mark.parametrize("structure", ["diag", "kron", "lowrank_kron"])
def test_entries_of_the_curvature(structure: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(30, 4), torch.randint(3, (30,))
    with torch.no_grad():
        model[2].bias += torch.tensor([12.0, 0.0, 1.0])
    la = Laplace(model, "classification", "last_layer", structure)
    la.fit([(x, y)])
    wide = copy.deepcopy(model).double()
    with torch.no_grad():
        phi = wide[:2](x.double())
        f = wide[2](phi)
    inner = output_hessian(f, "classification", y)
    assert inner.diagonal(dim1=1, dim2=2).max() < 1e-3
    diagonal, output = found(la, structure)
    expected = inner.diagonal(dim1=1, dim2=2).T @ phi.square()
    if structure == "kron":
        expected = torch.outer(inner.sum(0).diagonal(), phi.square().sum(0))
        torch.testing.assert_close(output.double(), inner.sum(0), rtol=1e-5, atol=0)
    torch.testing.assert_close(diagonal.double(), expected, rtol=1e-5, atol=0)
