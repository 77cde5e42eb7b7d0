"""Batches of many graphs, as PyTorch Geometric's loader gives them: the data are the graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import CurvatureError
from tests.conformance.cases import own_dense
from tests.reference.compare import assert_close

pytest.importorskip("torch_geometric")
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_mean_pool

N = 8


def graphs() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        Data(
            x=torch.randn(n, 3, dtype=torch.float64, generator=generator),
            edge_index=torch.randint(n, (2, 2 * n), generator=generator),
            y=torch.randint(3, (1,), generator=generator),
        )
        for n in torch.randint(2, 7, (N,), generator=generator).tolist()
    ]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.head = GCNConv(3, 4), GCNConv(4, 4), nn.Linear(4, 3)

    def nodes(self, batch: Any) -> Tensor:
        return self.second(self.first(batch.x, batch.edge_index).tanh(), batch.edge_index).tanh()

    def forward(self, batch: Any) -> Tensor:
        return self.head(global_mean_pool(self.nodes(batch), batch.batch, batch.num_graphs))


class PerNode(Network):
    def forward(self, batch: Any) -> Tensor:
        return self.head(self.nodes(batch))


def fitted(structure: Any, size: int, weights: Any = "all") -> Any:
    la = Laplace(Network().double(), "classification", weights, structure)
    la.fit(DataLoader(graphs(), batch_size=size))
    return la


def exact() -> Tensor:
    """Σ Jᵀ Λ J, graph by graph."""
    model, total = Network().double(), torch.zeros((), dtype=torch.float64)
    parameters = list(model.parameters())
    for graph in DataLoader(graphs(), batch_size=1):
        f = model(graph)[0]
        rows = [torch.cat([g.flatten() for g in torch.autograd.grad(one, parameters, retain_graph=True)]) for one in f]
        p = f.softmax(0).detach()
        jacobian = torch.stack(rows)
        total = total + jacobian.T @ (p.diag() - torch.outer(p, p)) @ jacobian
    return total


@pytest.mark.parametrize("size", [1, 3, N])
def test_the_curvature_is_exact(size: int) -> None:
    assert_close(own_dense(fitted("full", size)), exact(), "algebra")


@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["kron", "diag", "ekfac"])
def test_splits_agree(structure: Any, weights: Any) -> None:
    evidence = [fitted(structure, size, weights).log_marginal_likelihood() for size in (1, 3, N)]
    assert_close(evidence[1], evidence[0], "algebra")
    assert_close(evidence[2], evidence[0], "algebra")


def test_predictions_are_of_graphs() -> None:
    la, loader = fitted("kron", 3), DataLoader(graphs(), batch_size=3)
    one_by_one = torch.cat([la(graph) for graph in DataLoader(graphs(), batch_size=1)])
    assert_close(torch.cat([prediction.mean for prediction in la.predict(loader)]), one_by_one, "algebra")
    batch = next(iter(loader))
    assert_close(la.predict(batch).mean, one_by_one[:3], "algebra")
    before = batch.x.clone()
    samples = la(batch, pred_type="nn", n_samples=5)
    assert samples.shape == (3, 3)
    assert torch.equal(batch.x, before)


def test_outputs_per_node_say_how_they_go_in() -> None:
    la = Laplace(PerNode().double(), "classification", "all", "diag")
    data = graphs()
    for graph in data:
        graph.y = torch.zeros(len(graph.x), dtype=torch.long)
    with pytest.raises(CurvatureError, match=r"nodes of a graph do, go in as positions of one datum"):
        la.fit(DataLoader(data, batch_size=3))
    la = Laplace(
        PerNode().double(), "classification", "all", "diag", forward_fn=lambda model, graph: model(graph).unsqueeze(0)
    )
    la.fit([(graph, graph.y.unsqueeze(0)) for graph in DataLoader(data, batch_size=1)])
    assert la.fitted().n_data == sum(len(graph.x) for graph in data)
