"""Proofs of layer rules: an engine makes them once, and anew wherever they could be others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace import Laplace
from laplace.engines.native import proof_cache
from laplace.errors import CurvatureError
from tests import grid
from tests.reference import curvature

_NODE = torch.ones(1, requires_grad=True).exp().grad_fn
pytestmark = pytest.mark.skipif(
    getattr(_NODE, "_input_metadata", None) is None,
    reason="this PyTorch does not show the shapes in a graph, by which proofs are kept",
)

X, Y = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)), torch.arange(7) % 3


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of data of the batches that were proven since."""
    seen: list[int] = []
    prove = proof_cache.make_plan

    def counted(problem: Any, capture: Any, x: Any, **options: Any) -> Any:
        seen.append(len(capture.f))
        return prove(problem, capture, x, **options)

    monkeypatch.setattr(proof_cache, "make_plan", counted)
    return seen


def fit(model: nn.Module, x: Tensor = X, weights: str = "all", structure: str = "diag", **options: Any) -> Any:
    la = Laplace(model, "classification", weights, structure, **options)
    la.fit([(x, Y[: len(x)])])
    return la


def test_a_fit_and_its_predictions_take_one_proof(proofs: list[int]) -> None:
    la = Laplace(grid.network(), "classification", "all", "diag")
    la.fit([(X, Y), (-X, Y)])
    la(X)
    la.fit([(2 * X, Y)], override=False)
    assert proofs == [7]


def test_predictions_of_other_numbers_of_data_take_the_proof_of_the_fit(proofs: list[int]) -> None:
    la = fit(grid.network())
    for n_data in (6, 1, 4, 2, 7):
        la(X[:n_data])
    assert proofs == [7]
    la(X[:5])  # as many data as the hidden layer has units: which of the two a dimension is, shapes do not say
    assert proofs == [7, 5]


def test_a_single_datum_is_no_proof_for_several(proofs: list[int]) -> None:
    la = fit(grid.network(), X[:1])
    la(X[:1])
    assert proofs == [2]  # the datum twice
    la(X[:2])
    assert proofs == [2, 2]


def test_predictions_are_those_of_a_proof_of_their_own() -> None:
    la, model = fit(grid.network()), grid.network()
    for n_data in (1, 4):
        own = fit(model)
        own._posterior.engine._plans = proof_cache.Plans()
        assert torch.equal(la(X[:n_data]), own(X[:n_data]))


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.gate.fill_(1)


def _behind_autograd(model: Any) -> None:
    model.gate.data.fill_(1)


def _another(model: Any) -> None:
    model.gate = nn.Parameter(torch.ones(1), requires_grad=False)


def _mixes(model: Any) -> None:
    model.mixing = torch.full((7, 7), 0.1)


class Mixing(nn.Module):
    """A network whose data see each other, behind a gate that is closed, or by a matrix that is the identity."""

    def __init__(self, gate: float) -> None:
        super().__init__()
        self.lin, self.gate = nn.Linear(3, 3), nn.Parameter(torch.full((1,), gate), requires_grad=False)
        self.mixing = torch.eye(7)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        return h + self.gate * torch.tanh(h.mean(0, keepdim=True)) + self.mixing @ torch.tanh(h)


@pytest.mark.parametrize("change", [_in_place, _behind_autograd, _another, _mixes])
def test_what_a_number_of_the_network_hid_is_found(change: Callable[[Any], None]) -> None:
    model = Mixing(gate=0.0)
    fit(model)
    change(model)
    with pytest.raises(CurvatureError, match="cannot be split over the data"):
        fit(model)


def test_another_call_is_another_network() -> None:
    model, mixing = grid.network(), torch.eye(7)

    def call(model: nn.Module, x: Tensor) -> Tensor:
        return mixing @ model(x)

    fit(model, forward_fn=call)
    other = torch.ones(7, 7)
    with pytest.raises(CurvatureError, match="cannot be split over the data"):
        fit(model, forward_fn=lambda model, x: other @ model(x))


GLOBAL = [0.0]


class Gated(nn.Module):
    """A weight that is used twice, once behind a gate that is no tensor of the network."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.lin, self.gate = nn.Linear(3, 3).double(), gate
        self.number, self.table, self.tensors = 0.0, {"gate": [0.0]}, [torch.zeros(1).double()]
        self.config = SimpleNamespace(gate=0.0, inner=SimpleNamespace(gate=0.0))

    def forward(self, x: Tensor) -> Tensor:
        gates: dict[str, Any] = {
            "number": self.number, "table": torch.tensor(self.table["gate"]).double(), "tensors": self.tensors[0],
            "config": torch.tensor([self.config.gate]).double(), "inner": self.config.inner.gate, "global": GLOBAL[0],
            "hook": 0.0,
        }  # fmt: skip
        return self.lin(x) + gates[self.gate] * torch.tanh(F.linear(x**2, self.lin.weight))

    def open(self) -> None:
        self.number = self.config.gate = self.config.inner.gate = self.table["gate"][0] = GLOBAL[0] = 1.0
        self.tensors[0] = torch.ones(1).double()


@pytest.mark.parametrize("gate", ["number", "table", "tensors", "config", "inner", "global", "hook"])
def test_what_a_setting_hid_is_found(gate: str) -> None:
    GLOBAL[0] = 0.0
    model, x, share = Gated(gate), X.double(), torch.zeros(1).double()
    if gate == "hook":

        def again(lin: Any, x: Any, f: Any) -> Tensor:
            return f + share * torch.tanh(F.linear(x[0] ** 2, lin.weight))

        model.lin.register_forward_hook(again)
    for _ in range(2):
        la = fit(model, x, structure="full")
        expected = curvature.ggn(model, x, Y, curvature.trainable_names(model), "classification")
        torch.testing.assert_close(la.H, expected)
        model.open()
        share.fill_(1)


def test_what_an_object_that_calls_the_network_hid_is_found() -> None:
    class Call:
        share = 0.0

        def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
            h = model(x)
            return h + torch.full((1,), self.share) * torch.tanh(h.mean(0))

    call, model = Call(), grid.network()
    fit(model, forward_fn=call)
    call.share = 1.0
    with pytest.raises(CurvatureError, match="cannot be split over the data"):
        fit(model, forward_fn=call)


def test_sparse_tensors_are_no_obstacle() -> None:
    class Graph(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.links = torch.eye(3).to_sparse()

        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return torch.sparse.mm(self.links, super().forward(input).T).T

    model = Graph()
    expected = curvature.ggn(model, X, Y, curvature.trainable_names(model), "classification")
    torch.testing.assert_close(fit(model, structure="full").H, expected)


class Turned(nn.Module):
    """Seven tokens of seven data, with the data first or second."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.lin, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.second = False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.lin(x.transpose(0, 1) if self.second else x.transpose(0, 0)))
        return self.head(h.mean(0 if self.second else 1))


def test_the_place_of_the_data_is_proven_anew_where_shapes_agree(proofs: list[int]) -> None:
    x = torch.randn(7, 7, 3, generator=torch.Generator().manual_seed(1))
    model, alone = Turned(), Turned()
    fit(model, x)
    model.second = alone.second = True
    second = fit(model, x)
    assert proofs == [7, 7]
    assert torch.equal(second.H, fit(alone, x).H)
    assert "batch second" in second.coverage()["lin.weight"]
    model.second = False
    fit(model, x)
    assert proofs == [7, 7, 7, 7]


class Flattened(nn.Module):
    """Tokens with a table of positions, and a weight `[in, out]` that sees them as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.weight = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3, 4))
        self.bias, self.head = nn.Parameter(torch.randn(4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.table[None]
        h = torch.addmm(self.bias, h.view(-1, 3), self.weight).view(*x.shape[:2], 4)
        return self.head(torch.tanh(h).mean(1))


def test_rows_of_a_view_of_the_batch_are_proven_once(proofs: list[int]) -> None:
    x = torch.randn(28, 5, 3, generator=torch.Generator().manual_seed(1))
    batches = [(part, torch.arange(7) % 3) for part in x.split(7)]
    model = Flattened()
    la, single = Laplace(model, "classification", "all", "diag"), Laplace(model, "classification", "all", "diag")
    la.fit(batches)
    first = len(proofs)
    la(x[:7])
    single.fit(batches[:1])
    for batch in batches[1:]:
        single.fit([batch], override=False)
    assert len(proofs) == 2 * first  # of two engines
    assert first <= 2  # the first by modules alone, which do not explain all
    torch.testing.assert_close(la.H, single.H)


class _Tokens(nn.Module):
    """Classifies every token by its own number, or by those of all tokens before the last layers."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(3, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) if attends else nn.Identity()
        self.last = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.layer(self.inp(x))))


class _Pixels(nn.Module):
    """Classifies every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 1),
            nn.Tanh(),
            nn.Conv2d(4, 3, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).movedim(1, -1)


@pytest.mark.parametrize("kind", ["tokens", "attention", "pixels"])
def test_rows_that_stay_by_themselves_are_proven_once(kind: str, proofs: list[int]) -> None:
    model = _Pixels() if kind == "pixels" else _Tokens(attends=kind == "attention")
    x = torch.randn(28, 1, 2, 3) if kind == "pixels" else torch.randn(28, 6, 3)
    y = torch.arange(28 * 6).view(28, *((2, 3) if kind == "pixels" else (6,))) % 3
    la = Laplace(model.eval(), "classification", "all", "diag")
    la.fit([(part, labels) for part, labels in zip(x.split(7), y.split(7), strict=True)])
    la(x[:7])
    assert len(proofs) <= 1 + (kind == "attention")  # by modules alone, which do not explain all


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return 2 * h

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def test_functions_of_the_users_own_are_proven_every_time(proofs: list[int]) -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002
            return _Own.apply(super().forward(input))  # pyright: ignore[reportReturnType]

    la = fit(Doubled(3, 3))
    once = len(proofs)
    la(X[:6])
    assert len(proofs) == once + 1


def test_no_network_is_held() -> None:
    model = grid.network()
    fit(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
