"""Heads: which layers the outputs come from, and that a last layer is one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from laplace.errors import ApproximationWarning
from laplace.weights.discovery import find_heads
from laplace.weights.masks import ModuleNameSubnetMask
from tests import grid
from tests.reference.compare import assert_close

X, Y = grid.data("regression", n_outputs=2)


class Two(nn.Module):
    """A trunk and two heads, whose outputs are put together by a function."""

    def __init__(self, join: Callable[[Tensor, Tensor], Any], widths: tuple[int, int] = (1, 1)) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.trunk = nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.LayerNorm(5))
            self.mean, self.spread = nn.Linear(5, widths[0]), nn.Linear(5, widths[1])
        self.join = join

    def forward(self, x: Tensor) -> Any:
        h = self.trunk(x)
        return self.join(self.mean(h), self.spread(h))


JOINED: dict[str, tuple[Callable[[Tensor, Tensor], Any], tuple[int, int]]] = {
    "concatenated": (lambda a, b: torch.cat([a, b], -1), (1, 1)),
    "in place": (lambda a, b: torch.cat([a, b.exp_()], -1), (1, 1)),
    "stacked": (lambda a, b: torch.stack([a, b], -1).flatten(1), (1, 1)),
    "added": (lambda a, b: a + b, (2, 2)),
    "gated": (lambda a, b: a * b.sigmoid(), (2, 2)),
}


@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize("structure", ["full", "kron"])
def test_a_second_head_is_named(name: str, structure: str) -> None:
    """Once, when the last layer is found; and which of them is random."""
    la = Laplace(Two(*JOINED[name]), "regression", "last_layer", structure)
    with pytest.warns(
        ApproximationWarning, match=r"\['mean', 'spread'\].*here 'spread'.*'mean'.*no variance"
    ) as caught:
        la.fit([(X, Y)])
    assert [w.filename for w in caught] == [__file__]
    assert la.last_layer_name == "spread"
    la.fit([(X, Y)])
    la(X)
    Laplace(Two(*JOINED[name]), "regression", "last_layer", structure, last_layer_name="mean").fit([(X, Y)])


def test_the_remedies_give_both_heads_a_variance() -> None:
    """And the warning is true: one head alone leaves the other's outputs without."""
    join, widths = JOINED["concatenated"]
    model = Two(join, widths)
    la = Laplace(model, "regression", "last_layer", "full")
    with pytest.warns(ApproximationWarning):
        la.fit([(X, Y)])
    assert (la(X)[1].diagonal(dim1=1, dim2=2)[:, 0] == 0).all()
    indices = ModuleNameSubnetMask(model, ["mean", "spread"]).select()
    for weights, options in (("all", {}), ("subnetwork", {"subnetwork_indices": indices})):
        both = Laplace(model, "regression", weights, "full", **options)
        both.fit([(X, Y)])
        assert (both(X)[1].diagonal(dim1=1, dim2=2) > 1e-3).all()


class Auxiliary(nn.Module):
    """Its auxiliary head runs last, and is no part of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.out, self.aux = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.trunk(x).tanh()
        return {"logits": self.out(h), "aux": self.aux(h)}


def test_an_auxiliary_head_that_runs_last_is_no_last_layer() -> None:
    model = Auxiliary()
    la = Laplace(model, "regression", "last_layer", "full")
    la.fit([(X, Y)])
    assert la.last_layer_name == "out"
    named = Laplace(model, "regression", "last_layer", "full", last_layer_name="out")
    named.fit([(X, Y)])
    assert torch.equal(la.H, named.H)
    phi = torch.cat([model.trunk(X).tanh(), torch.ones(len(X), 1)], 1).detach().double()
    variance = torch.einsum("bi,ij,bj->b", phi, torch.linalg.inv(phi.T @ phi + torch.eye(6)), phi)
    assert_close(la(X)[1][:, 0, 0], variance, "float32_solve")


class Wrapped(nn.Module):
    """A parameter of its own around a network: no layer, though its outputs come last."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.temperature = net, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) / self.temperature


class Residual(nn.Module):
    """Blocks that add to their inputs, an attention layer, a shared head on two views."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(3, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.block, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)[:, None].relu_()
        h = h + self.attention(h, h, h)[0]
        h = self.norm(h + self.block(h))[:, 0]
        return self.head(h) + self.head(-h)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 3, batch_first=True), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(self.head(self.lstm(x.unsqueeze(-1))[0][:, -1]), -1)


class Detached(nn.Module):
    """Its trunk runs without gradients, in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(3, 4).bfloat16(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.trunk(x.bfloat16())
        return self.head(h.float())


ONE_HEAD: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "plain": (grid.network, "3"),
    "wrapped": (lambda: Wrapped(grid.network()), "net.3"),
    "residual": (Residual, "head"),
    "recurrent": (Recurrent, "head"),
    "detached": (Detached, "head"),
    "linear": (lambda: nn.Linear(3, 3), ""),
    "compiled": (lambda: torch.compile(grid.network(), backend="eager"), "3"),
}


@pytest.mark.parametrize("name", ONE_HEAD)
def test_networks_with_one_head_are_not_warned_of(name: str) -> None:
    make, head = ONE_HEAD[name]
    model = make()
    assert find_heads(model, X)[1] == [head]
    la = Laplace(model, "classification")
    la.fit(grid.batches())
    assert la.last_layer_name == head


class Opaque(nn.Module):
    """A layer that returns what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.own = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"h": nn.functional.linear(x, self.linear.weight) + self.own}


class BehindOpaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = Opaque(), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x)["h"])


class WithoutGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = grid.network()

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("make", [BehindOpaque, WithoutGradient])
def test_where_autograd_does_not_follow_the_last_layer_to_run_is_taken(make: Callable[[], nn.Module]) -> None:
    la = Laplace(make(), "classification", "last_layer", "diag")
    assert la.weights.discover(X).head in ("head", "net.3")
