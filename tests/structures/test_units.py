"""Groups of tensors between which a precision has no entries: what lies outside of them is zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.core.layout import linked
from laplace.structures import STRUCTURES


class Several(nn.Module):
    """A wide layer that few data reach, one that is used twice, a table, norms, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.twice, self.unused = nn.Linear(30, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.table, self.norm, self.last = nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.wide(x[:, :30]))
        hidden = self.twice(torch.tanh(self.twice(hidden))) + self.table(x[:, 30].long())
        return self.last(self.norm(hidden))


def fitted(structure: str, **options: Any) -> Any:
    torch.manual_seed(0)
    la = Laplace(Several().double(), "classification", "all", structure, **options)
    x = torch.cat([torch.randn(6, 30), torch.randint(5, (6, 1))], 1).double()
    la.fit([(x, torch.randint(3, (6,)))])
    return la


@pytest.mark.filterwarnings("ignore::laplace.errors.ApproximationWarning")
@pytest.mark.parametrize("structure", [name for name in STRUCTURES if name != "matrix_free"])
def test_a_precision_has_no_entries_between_units(structure: str) -> None:
    la = fitted(structure)
    layout = la.problem.layout
    units = la.fitted().curvature.units(layout)
    assert sorted(i for unit in units for i in unit) == list(range(layout.n_tensors))
    dense = la.snapshot().precision().to_dense()
    for unit in units:
        inside = torch.cat([torch.full((size,), i in unit) for i, size in enumerate(layout.sizes)])
        assert dense[inside][:, ~inside].abs().amax() == 0 if not inside.all() else len(units) == 1


def test_links_are_found_by_way_of_others() -> None:
    assert linked([["a", "b"], ["b"], ["c"], ["d", "e"], ["e", "c"]]) == ((0, 1), (2, 3, 4))
