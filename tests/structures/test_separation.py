"""Curvature that is taken apart by tensors: the parts add up, and put together they are the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.core.hyperparameters import GaussianPrior
from laplace.structures import STRUCTURES
from laplace.structures.base import linked
from laplace.structures.sharded import placed

SEPARABLE = [name for name, structure in STRUCTURES.items() if structure.separation is not None]


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


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.filterwarnings("ignore::laplace.errors.ApproximationWarning")
@pytest.mark.parametrize(
    ("structure", "options"),
    [(name, {}) for name in SEPARABLE] + [("lowrank_kron", {"structure_kwargs": {"corrected": True}})],
)
def test_parts_make_the_whole(structure: str, options: dict[str, Any]) -> None:
    la = fitted(structure, **options)
    curvature, layout = la.fitted().curvature, la.problem.layout
    separation, weights = curvature.separation, torch.ones(1, dtype=torch.float64)
    units = separation.units(curvature, layout)
    assert sorted(i for unit in units for i in unit) == list(range(layout.n_tensors))
    halves = [tuple(sorted(i for unit in units[start::2] for i in unit)) for start in (0, 1)]
    parts = {half: separation.part(curvature, half, layout) for half in halves}
    joined = separation.joined(parts, layout)
    assert same(joined.state(), curvature.state())
    for prior in (torch.ones(1), torch.linspace(1, 3, layout.n_tensors), torch.linspace(1, 3, layout.n_params)):
        whole = GaussianPrior(prior.double(), torch.zeros((), dtype=torch.float64), layout)
        expected = curvature.precision(weights, whole)
        shares = {half: part.precision(weights, whole.part(half)) for half, part in parts.items()}
        total = torch.stack([share.logdet_ratio() for share in shares.values()]).sum()
        torch.testing.assert_close(total, expected.logdet_ratio(), rtol=1e-10, atol=1e-10)
        variances = layout.scattered({half: share.diagonal_of_inverse() for half, share in shares.items()})
        torch.testing.assert_close(variances, expected.diagonal_of_inverse(), rtol=1e-10, atol=0)
        mine = layout.gathered(whole.diagonal(), halves[0])
        assert torch.equal(whole.part(halves[0]).diagonal(), mine)


def test_tensors_are_placed_with_what_they_share() -> None:
    la = fitted("kron")
    curvature, layout = la.fitted().curvature, la.problem.layout
    for unit in curvature.separation.units(curvature, layout):
        assert len({layout.names[i].rpartition(".")[0] for i in unit}) == 1
    owners = placed(curvature, layout, 3)
    assert set(owners) == {0, 1, 2}
    assert owners[0] == owners[1] == 0  # weight and bias of the widest layer, which comes first


def test_links_are_found_by_way_of_others() -> None:
    assert linked([["a", "b"], ["b"], ["c"], ["d", "e"], ["e", "c"]]) == ((0, 1), (2, 3, 4))
