"""Graphs for any size of a batch, and networks that have none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import laplace
from laplace import Laplace
from laplace.errors import UnsupportedError


class Odd(nn.Module):
    """A network that no graph stands for."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "branch" and x.sum() > 0:
            return self.layer(x).relu()
        if self.kind == "size":
            return self.layer(x * (1 + len(x) % 2))
        if self.kind == "rows":
            return self.layer(x * (x > 0).nonzero().shape[0])
        return self.layer(x)


@pytest.mark.filterwarnings("ignore:the network's outputs at a datum depend on the data beside it")
@pytest.mark.parametrize(("kind", "words"), [("branch", "no fixed graph"), ("rows", "nonzero")])
def test_networks_that_depend_on_the_numbers(kind: str, words: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 3)
    la = Laplace(Odd(kind), "regression", "last_layer", "diag", last_layer_name="layer")
    la.fit([(x, torch.randn(6, 2))])
    with pytest.raises(UnsupportedError, match=words):
        laplace.export(la, x)


@pytest.mark.parametrize("size", [1, 3, 6])
def test_networks_that_depend_on_the_size_of_the_batch(size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 3)
    la = Laplace(Odd("size"), "regression", "last_layer", "diag", last_layer_name="layer")
    la.fit([(x, torch.randn(6, 2))])
    with pytest.raises(UnsupportedError, match="size of the batch"):
        laplace.export(la, x[:size])
