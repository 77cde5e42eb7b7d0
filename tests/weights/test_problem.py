"""Tensors without entries: no random parameters, and no harm to any structure."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import InvalidArgument
from laplace.structures import STRUCTURES


class Padded(nn.Module):
    """A network with a weight, a layer and a table without entries, which its outputs reach, beside a plain one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        self.unused = nn.Parameter(torch.zeros(0).double())
        self.weight = nn.Parameter(torch.zeros(0, 3).double())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch: there is nothing to initialise
            self.layer = nn.Linear(4, 0).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x) + x[:, :0] @ self.weight + self.layer(x).sum(1, keepdim=True)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(20, 4, generator=generator).double(), torch.randint(3, (20,), generator=generator)
    return list(zip(x.split(8), y.split(8), strict=True))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_they_change_nothing(structure: str) -> None:
    model = Padded()
    padded, plain = (Laplace(net, "classification", "all", structure) for net in (model, model.plain))
    x = batches()[0][0]
    for la in (padded, plain):
        la.fit(batches())
    assert padded.n_params == plain.n_params
    torch.testing.assert_close(padded.log_marginal_likelihood(), plain.log_marginal_likelihood())
    torch.testing.assert_close(padded(x), plain(x))
    for la in (padded, plain):
        la.optimize_prior_precision(prior_structure="layerwise", n_steps=3)
    torch.testing.assert_close(padded.prior_precision, plain.prior_precision)
    again = Laplace(model, "classification", "all", structure)
    again.load_state_dict(padded.state_dict())
    torch.testing.assert_close(again(x), padded(x), rtol=0, atol=0)


def test_nothing_else_is_an_error() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(0, 3))
    with pytest.raises(InvalidArgument, match="has no entries"):
        Laplace(model, "classification", "all", "diag")
