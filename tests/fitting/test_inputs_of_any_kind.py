"""Inputs that are no tensor: sparse ones, objects that a `forward_fn` takes, texts, arrays, graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import InvalidData
from tests.reference.compare import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")  # which PyTorch says of its own once

N, D, C = 6, 4, 3
STRUCTURES = ("full", "block", "diag", "kron", "ekfac", "lowrank", "lowrank_kron", "matrix_free")
PARTS = torch.arange(N).split(4)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, dtype=torch.float64, generator=generator).relu()
    return x, torch.randint(C, (N,), generator=generator)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, C)).double()


class Graph(nn.Module):
    """Nodes are positions of one datum."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        return (adjacency @ self.inner(nodes[0])).unsqueeze(0)


class OfMapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.inner(batch["x"])


class Products(nn.Module):
    """A sparse product that is called by its own name, and a second input that is dense."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight, self.head = nn.Parameter(torch.randn(D, 5)), nn.Linear(5, C)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        product = x @ self.weight if x.layout is torch.strided else torch.sparse.mm(x, self.weight)
        return self.head(torch.tanh(product + z[:, :1]))


def adjacency() -> Tensor:
    return (torch.rand(N, N, generator=torch.Generator().manual_seed(3)) < 0.4).double()


Case = tuple[nn.Module, list[Any], Any]


def rows(as_sparse: Callable[[Tensor], Tensor]) -> Case:
    x, y = data()
    return network(), [(as_sparse(x[i]), y[i]) for i in PARTS], as_sparse(x)


def mapping(as_sparse: Callable[[Tensor], Tensor]) -> Case:
    x, y = data()
    return OfMapping().double(), [{"x": as_sparse(x[i]), "labels": y[i]} for i in PARTS], {"x": as_sparse(x)}


def pair(as_sparse: Callable[[Tensor], Tensor]) -> Case:
    x, y = data()
    return Products().double(), [(as_sparse(x[i]), x[i], y[i]) for i in PARTS], (as_sparse(x), x)


def graph(as_sparse: Callable[[Tensor], Tensor]) -> Case:
    (x, y), edges = data(), as_sparse(adjacency())
    return Graph(), [((x.unsqueeze(0), edges), y.unsqueeze(0))], (x.unsqueeze(0), edges)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "csc": lambda t: t.to_sparse_csc(),
}


def fitted(model: nn.Module, batches: list[Any], structure: Any, weights: Any = "all", **options: Any) -> Any:
    la = Laplace(model, "classification", weights, structure, prior_precision=0.7, **options)
    torch.manual_seed(0)
    la.fit(batches)
    return la


@pytest.mark.parametrize("weights", ["last_layer", "all"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", [rows, mapping, pair, graph])
@pytest.mark.turns
def test_sparse_inputs_are_dense_ones(case: Any, layout: str, structure: Any, weights: Any) -> None:
    model, batches, x = case(LAYOUTS[layout])
    _, dense_batches, dense_x = case(lambda t: t)
    sparse, dense = fitted(model, batches, structure, weights), fitted(model, dense_batches, structure, weights)
    assert_close(sparse.predict(x).latent_covariance, dense.predict(dense_x).latent_covariance, "algebra")
    assert_close(sparse.log_marginal_likelihood(), dense.log_marginal_likelihood(), "algebra")
    assert sparse(x, pred_type="nn", n_samples=2).shape == dense(dense_x).shape
    sparse.plan(batches)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_inputs_of_functions(layout: str) -> None:
    model, batches, x = rows(LAYOUTS[layout])
    _, dense_batches, dense_x = rows(lambda t: t)
    sparse, dense = (fitted(model, some, "gp", n_subset=5) for some in (batches, dense_batches))
    assert_close(sparse(x), dense(dense_x), "algebra")


@dataclass(frozen=True)
class Frozen:
    features: Tensor
    names: list[str]


class Own:
    """A user's object, which moves itself and is not iterable."""

    def __init__(self, features: Tensor) -> None:
        self.features = features

    def __len__(self) -> int:
        return len(self.features)

    def to(self, device: torch.device) -> None:
        self.features = self.features.to(device)


class Bare:
    def __init__(self, features: Tensor) -> None:
        self.features = features


TEXTS = [f"text {i}" for i in range(N)]


def of_texts(model: nn.Module, texts: Any) -> Any:
    return model(torch.stack([data()[0][TEXTS.index(text)] for text in texts]))


def texts(index: Tensor) -> list[str]:
    return [TEXTS[i] for i in index.tolist()]


OBJECTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[nn.Module, Any], Any]]] = {
    "dataclass": (lambda i: Frozen(data()[0][i], texts(i)), lambda model, x: model(x.features)),
    "own class": (lambda i: Own(data()[0][i]), lambda model, x: model(x.features)),
    "plain object": (lambda i: Bare(data()[0][i]), lambda model, x: model(x.features)),
    "texts": (texts, of_texts),
    "tuple of texts": (lambda i: tuple(texts(i)), of_texts),
    "texts in a mapping": (lambda i: {"text": texts(i)}, lambda model, x: of_texts(model, x["text"])),
    "texts and a tensor": (
        lambda i: (texts(i), data()[0][i]),
        lambda model, x: of_texts(model, x[0]) + 0 * x[1].sum(1, keepdim=True),
    ),
    "array": (lambda i: data()[0][i].numpy(), lambda model, x: model(torch.from_numpy(x))),
    "two arrays": (lambda i: (data()[0][i].numpy(),) * 2, lambda model, x: model(torch.from_numpy(x[0] + 0 * x[1]))),
}


@pytest.mark.parametrize("weights", ["last_layer", "all"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.turns
def test_any_object_is_an_input_of_a_forward_fn(kind: str, structure: Any, weights: Any) -> None:
    make, forward = OBJECTS[kind]
    x, y = data()
    everything = torch.arange(N)
    la = fitted(network(), [(make(i), y[i]) for i in PARTS], structure, weights, forward_fn=forward)
    plain = fitted(network(), [(x[i], y[i]) for i in PARTS], structure, weights)
    assert la.fitted().n_data == N
    assert_close(la.predict(make(everything)).latent_covariance, plain.predict(x).latent_covariance, "algebra")
    assert la(make(everything), pred_type="nn", n_samples=2).shape == (N, C)
    by_loader = torch.cat([p.mean for p in la.predict([(make(i), y[i]) for i in PARTS])])
    assert_close(by_loader, plain(x), "algebra")


@pytest.mark.parametrize("kind", ["dataclass", "texts", "texts and a tensor", "array", "two arrays"])
def test_data_of_objects_with_rows_are_chosen(kind: str) -> None:
    make, forward = OBJECTS[kind]
    x, y = data()
    la = fitted(network(), [(make(i), y[i]) for i in PARTS], "gp", n_subset=4, forward_fn=forward)
    plain = fitted(network(), [(x[i], y[i]) for i in PARTS], "gp", n_subset=4)
    assert_close(la(make(torch.arange(N))), plain(x), "algebra")


def test_data_of_other_objects_cannot_be_chosen() -> None:
    make, forward = OBJECTS["own class"]
    with pytest.raises(InvalidData, match=r"are of type Own, of which single data cannot be taken; give a tensor"):
        fitted(network(), [(make(i), data()[1][i]) for i in PARTS], "gp", n_subset=4, forward_fn=forward)


def test_texts_without_a_forward_fn_say_what_to_give() -> None:
    with pytest.raises(InvalidData, match=r"are of type list; give a tensor .* or say by forward_fn="):
        fitted(network(), [(TEXTS, data()[1])], "kron")


def test_a_buffer_that_is_filled_anew_changes_no_posterior() -> None:
    make, forward = OBJECTS["array"]
    x, buffer, y = data()[0], make(torch.arange(N)).copy(), data()[1]
    la = fitted(network(), [(buffer, y)], "matrix_free", forward_fn=forward)
    before = la.predict(x.numpy()).latent_covariance
    buffer[:] = 0
    la.prior_precision = 0.7
    assert_close(la.predict(x.numpy()).latent_covariance, before, "algebra")


def one_graph(kind: str) -> tuple[Any, Callable[[nn.Module, Any], Tensor]]:
    """A graph of PyTorch Geometric, whose nodes are positions."""
    pytest.importorskip("torch_geometric")
    from torch_geometric.data import Data, HeteroData

    (x, y), edges = data(), adjacency().nonzero().T
    if kind == "Data":
        return Data(x=x, edge_index=edges, y=y), lambda model, g: model(mixed(g.x, g.edge_index)).unsqueeze(0)
    graph = HeteroData()
    graph["atom"].x, graph["atom", "bond", "atom"].edge_index = x, edges

    def forward(model: nn.Module, g: Any) -> Tensor:
        return model(mixed(g["atom"].x, g["atom", "bond", "atom"].edge_index)).unsqueeze(0)

    return graph, forward


def mixed(x: Tensor, edges: Tensor) -> Tensor:
    return x.index_add(0, edges[1], x[edges[0]])


@pytest.mark.parametrize("weights", ["last_layer", "all"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag", "matrix_free"])
@pytest.mark.parametrize("kind", ["Data", "HeteroData"])
def test_one_graph_is_one_datum(kind: str, structure: Any, weights: Any) -> None:
    graph, forward = one_graph(kind)
    x, y = data()
    edges = adjacency().nonzero().T
    la = fitted(network(), [(graph, y.unsqueeze(0))], structure, weights, forward_fn=forward)
    dense = mixed(x, edges).unsqueeze(0)
    plain = fitted(network(), [(dense, y.unsqueeze(0))], structure, weights)
    assert_close(la.predict(graph).latent_covariance, plain.predict(dense).latent_covariance, "algebra")
    assert_close(la.log_marginal_likelihood(), plain.log_marginal_likelihood(), "algebra")


def test_a_graph_with_targets_of_its_own_is_a_batch() -> None:
    graph, _ = one_graph("Data")

    def forward(model: nn.Module, g: Any) -> Tensor:
        return model(g.x.mean(0, keepdim=True))

    la = fitted(network(), [_labelled(graph, i) for i in range(3)], "kron", forward_fn=forward)
    assert la.fitted().n_data == 3
    assert la(graph).shape == (1, C)


def _labelled(graph: Any, label: int) -> Any:
    graph = graph.clone()
    graph.y = torch.tensor([label])
    return graph
