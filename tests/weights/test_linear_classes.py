"""Last layers that are `F.linear` under another class than PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from laplace import Laplace
from laplace.errors import ApproximationWarning, InvalidArgument
from tests.conformance.cases import own_dense
from tests.reference.compare import assert_close

N, C = 6, 3
STRUCTURES = ("full", "block", "diag", "kron", "lowrank_kron")


class Dense(nn.Module):
    """A user's own linear layer."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(n_out, n_in)), nn.Parameter(torch.randn(n_out))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Cosine(Dense):
    """The same tensors in another function."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1)) + self.bias


class Nodes(nn.Module):
    """Two layers on the nodes of a graph, whose outputs are positions of one datum."""

    def __init__(self, layer: Callable[[int, int], nn.Module], *, takes_edges: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.takes_edges = layer(3, 4), layer(4, C), takes_edges

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        more = (edges,) if self.takes_edges else ()
        return self.b(self.a(x[0], *more).tanh(), *more).unsqueeze(0)


HEADS = {
    "own": "b",
    "Linear": "b",
    "GCNConv": "b.lin",
    "GATConv": "b.lin",
    "SAGEConv": "b.lin_r",
    "GraphConv": "b.lin_root",
}
"""Names of the last layers: of a user's own class, and of PyTorch Geometric's."""


def network(name: str) -> nn.Module:
    if name == "own":
        return Nodes(Dense, takes_edges=False).double()
    layers = pytest.importorskip("torch_geometric").nn
    return Nodes(getattr(layers, name), takes_edges=name != "Linear").double()


def data() -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, N, 3, dtype=torch.float64, generator=generator)
    edges = torch.randint(N, (2, 14), generator=generator)
    return (x, edges), torch.randint(C, (1, N), generator=generator)


def jacobian(model: nn.Module, x: Any, names: list[str]) -> tuple[Tensor, Tensor]:
    """Rows of the Jacobian, `[N, C, P]`, and outputs, by autograd one output at a time."""
    tensors = [dict(model.named_parameters())[name] for name in names]
    f = model(*x)[0]
    rows = [torch.autograd.grad(one, tensors, retain_graph=True) for one in f.flatten()]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]).view(N, C, -1), f.detach()


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("weights", ["last_layer", "all"])
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.turns
def test_the_head_is_found_and_its_curvature_exact(name: str, weights: Any, structure: Any) -> None:
    (x, y), model = data(), network(name)
    la = Laplace(model, "classification", weights, structure, prior_precision=0.7)
    if name in ("SAGEConv", "GraphConv") and weights == "last_layer":
        with pytest.warns(ApproximationWarning, match="put together from those of several layers"):
            la.fit([(x, y)])
    else:
        la.fit([(x, y)])
    if weights == "last_layer":
        assert la.problem.head == HEADS[name]
    j, f = jacobian(model, x, [slot.name for slot in la.problem.slots])
    p = f.softmax(1)
    exact = torch.einsum("ncp,ncd,ndq->pq", j, torch.diag_embed(p) - p[:, :, None] * p[:, None, :], j)
    own = own_dense(la)
    if structure in ("full", "diag"):
        assert_close(own, exact if structure == "full" else exact.diagonal().diag(), "algebra")
    precision = own + 0.7 * torch.eye(len(own), dtype=own.dtype)
    variance = j @ torch.linalg.solve(precision, j.mT)
    assert_close(la.predict(x).latent_covariance.view_as(variance), variance, "algebra")
    assert la(x, pred_type="nn", n_samples=2).shape == (1, N, C)


def test_names_are_accepted_as_they_are_found() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Dense(4, C))
    x, y = torch.randn(N, 3), torch.randint(C, (N,))
    options: tuple[dict[str, Any], ...] = ({}, {"last_layer_name": "2"})
    found, named = (Laplace(model, "classification", "last_layer", "kron", **o) for o in options)
    found.fit([(x, y)])
    named.fit([(x, y)])
    assert_close(found(x), named(x), "float32")
    assert found.model.forward_with_features(x)[1].shape == (N, 4)


def test_a_last_layer_that_is_no_product_advises_no_inner_layer() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Cosine(4, C))
    x, y = torch.randn(N, 3), torch.randint(C, (N,))
    with pytest.raises(InvalidArgument, match=r"'2' is of type Cosine; .* None that last_layer_name= could name gives"):
        Laplace(model, "classification", "last_layer", "kron").fit([(x, y)])


def test_a_head_that_runs_before_the_last_layer_is_advised() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.head, self.other = nn.Linear(3, 4), nn.Linear(4, C), Cosine(4, C)

        def forward(self, x: Tensor) -> Tensor:
            h = self.trunk(x).tanh()
            return self.head(h) + self.other(h)

    with pytest.raises(InvalidArgument, match=r"'other' is of type Cosine; .* it has \['head'\]"):
        Laplace(TwoHeads(), "classification", "last_layer", "kron").fit([(torch.randn(N, 3), torch.randint(C, (N,)))])
