"""Networks that send rows to experts: form and numbers of the curvature are the same however data are split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import Laplace
from tests.conformance.cases import own_dense
from tests.reference import curvature as reference
from tests.reference.compare import assert_close

N, TOKENS = 8, 4
STRUCTURES = ("full", "block", "diag", "kron", "ekfac", "lowrank_kron")
SPLITS = {"single": [1] * N, "pairs": [2] * 4, "uneven": [5, 1, 2]}


class Signs(nn.Module):
    """Two experts for data; the sign of the first entry chooses."""

    shape: tuple[int, ...] = (N, 3)

    def __init__(self, width: int = 4, *, skips: bool = True) -> None:
        super().__init__()
        self.skips = skips
        self.first, self.second, self.head = nn.Linear(3, width), nn.Linear(3, width), nn.Linear(width, 3)

    def hidden(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), self.first.out_features)
        for chosen, expert in ((x[:, 0] > 0, self.first), (x[:, 0] <= 0, self.second)):
            if not self.skips or bool(chosen.any()):
                h = h.index_put((chosen,), expert(x[chosen]))
        return torch.tanh(h)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))


class Tokens(Signs):
    """The same for tokens, whose number differs between data."""

    shape = (N, TOKENS, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)
        return self.head((self.hidden(x.flatten(0, 1)).view(*x.shape[:2], -1) * weights[:, None]).mean(1))


class Labelled(Signs):
    """A label for every token."""

    shape = (N, TOKENS, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x.flatten(0, 1))).view(*x.shape[:2], -1)


class TopTwo(nn.Module):
    """Two of three experts of several layers for every token, as language models have them."""

    shape = (N, TOKENS, 3)

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 3)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2, -1)
        mixed = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            at, slot = torch.where(chosen == number)
            mixed = mixed.index_add(0, at, expert(rows[at]) * weights[at, slot, None])
        return self.head(mixed.view(x.shape).mean(1))


class Slots(TopTwo):
    """The same by slots: an expert is called as often as there are slots that chose it."""

    shape = (N, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            for slot in range(2):
                at = torch.where(chosen[:, slot] == number)[0]
                if len(at):
                    mixed = mixed.index_add(0, at, expert(x[at]) * weights[at, slot, None])
        return self.head(mixed)


class Images(nn.Module):
    """Convolutions as experts, and a scale of their own that is no layer."""

    shape = (N, 2, 4, 4)

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Conv2d(2, 3, 3) for _ in range(2))
        self.scales, self.head = nn.ParameterList(torch.ones(3, 1, 1) for _ in range(2)), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, first = x.new_zeros(len(x), 3, 2, 2), x[:, 0, 0, 0] > 0
        for chosen, expert, scale in zip((first, ~first), self.experts, self.scales, strict=True):
            if bool(chosen.any()):
                h = h.index_put((chosen,), expert(x[chosen]) * scale)
        return self.head(torch.tanh(h).flatten(1))


class RowByRow(nn.Module):
    """Layers that are called once for every datum, the head among them, without a dimension for the data."""

    shape = (N, 4)

    def __init__(self, *, one_by_one: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, 3))
        self.table, self.one_by_one = nn.Embedding(2, 4), one_by_one

    def row(self, x: Tensor) -> Tensor:
        return self.layers(x + self.table((x[..., 0] > 0).long()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.row(row) for row in x]) if self.one_by_one else self.row(x)


class OneByOne(nn.Module):
    """Layers on single images, numbers and scales, whose calls no rule knows."""

    shape = (N, 2, 3)

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.slope, self.factor = nn.Conv1d(2, 3, 2), nn.PReLU(), nn.Parameter(torch.tensor(0.8))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        images = torch.stack([self.conv(image).flatten() for image in x])
        return self.head(torch.stack([torch.stack([self.factor * self.slope(v) for v in row]) for row in images]))


NETWORKS: dict[str, Any] = {
    "data": Signs,
    "empty calls": lambda: Signs(skips=False),
    "tokens": Tokens,
    "wide": lambda: Tokens(200),
    "labelled": Labelled,
    "top two": TopTwo,
    "slots": Slots,
    "images": Images,
    "row by row": RowByRow,
    "one by one": OneByOne,
}


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A network with data `[N, …]` and labels, of which two tokens are ignored."""
    torch.manual_seed(3)
    model = NETWORKS[name]().double()
    x = torch.randn(model.shape, dtype=torch.float64)
    y = torch.randint(3, model.shape[:2] if name == "labelled" else (N,))
    if name == "labelled":
        y[1, 2] = y[4, 0] = -100
    return model, x, y


def fitted(model: nn.Module, structure: Any, batches: Sequence[Any], **options: Any) -> Any:
    la = Laplace(model, "classification", "all", structure, prior_precision=0.7, **options)
    la.fit(batches)
    return la


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.turns
def test_splits_agree(name: str, structure: Any, split: str) -> None:
    if name == "wide" and structure == "full":
        pytest.skip("large")
    model, x, y = problem(name)
    numbers: list[Tensor] = []
    for sizes in ([N], SPLITS[split]):
        la = fitted(model, structure, list(zip(x.split(sizes), y.split(sizes), strict=True)))
        variance = la._glm_predictive_distribution(x)[1]
        numbers.append(torch.cat([variance.flatten(), la.log_marginal_likelihood().reshape(1)]))
    assert_close(numbers[1], numbers[0], "algebra")


@pytest.mark.parametrize("structure", ["full", "diag", "block"])
@pytest.mark.parametrize("name", ["data", "tokens", "top two", "slots", "images", "row by row", "one by one"])
def test_the_exact_structures_are_exact(name: str, structure: Any) -> None:
    model, x, y = problem(name)
    la = fitted(model, structure, [(x[:3], y[:3]), (x[3:], y[3:])])
    exact = reference.ggn(model, x, y, reference.trainable_names(model), "classification")
    own = own_dense(la)
    kept = own != 0 if structure == "block" else torch.ones_like(own, dtype=torch.bool)
    kept = torch.eye(len(own), dtype=torch.bool) if structure == "diag" else kept
    assert_close(own[kept], exact[kept], "algebra")


@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["kron", "ekfac", "lowrank_kron"])
def test_layers_that_are_called_row_by_row_are_those_of_a_batch(structure: Any, weights: Any) -> None:
    model, x, y = problem("row by row")
    batch = RowByRow(one_by_one=False).double()
    batch.load_state_dict(model.state_dict())
    variances: list[Tensor] = []
    for network in (model, batch):
        la = Laplace(network, "classification", weights, structure)
        la.fit([(x[:1], y[:1]), (x[1:4], y[1:4]), (x[4:], y[4:])])
        variances.append(la.predict(x).latent_covariance)
    assert_close(variances[0], variances[1], "algebra")


def test_the_factors_are_sums_over_an_experts_rows() -> None:
    """A = Σ a aᵀ over the tokens that the expert saw, B = Σ g gᵀ, and their product over the number of tokens."""
    model, x, y = problem("tokens")
    la = fitted(model, "kron", [(x[:3], y[:3]), (x[3:], y[3:])])
    rows = x[x[..., 0] > 0]
    expected, share = rows.T @ rows / len(rows), la.H.kfacs[0][1]
    assert_close(share / share[0, 0] * expected[0, 0], expected, "algebra")
    assert "linear (routed rows)" in la.coverage()["first.weight"]


@pytest.mark.parametrize("structure", ["kron", "ekfac", "full"])
@pytest.mark.parametrize("name", ["data", "tokens", "slots", "images"])
def test_a_weight_of_two_is_a_datum_given_twice(name: str, structure: Any) -> None:
    model, x, y = problem(name)
    weights = torch.tensor([2.0, 1, 1, 2, 1, 1, 1, 2])
    twice = torch.arange(N).repeat_interleave(weights.long())
    weighed = Laplace(model, "classification", "all", structure)
    weighed.fit([(x, y)], weight_fn=lambda x, y: weights)
    repeated = Laplace(model, "classification", "all", structure)
    repeated.fit([(x[twice], y[twice])])
    assert_close(weighed.log_marginal_likelihood(), repeated.log_marginal_likelihood(), "algebra")


@pytest.mark.parametrize("name", ["tokens", "labelled", "top two"])
def test_reduced_factors_agree_over_splits(name: str) -> None:
    model, x, y = problem(name)
    options = {"backend_kwargs": {"kfac_approx": "reduce"}}
    whole = fitted(model, "kron", [(x, y)], **options)
    split = fitted(model, "kron", list(zip(x.split(2), y.split(2), strict=True)), **options)
    assert_close(split.log_marginal_likelihood(), whole.log_marginal_likelihood(), "algebra")


def test_halves_add_up_whichever_experts_they_need() -> None:
    model, x, y = problem("data")
    first = x[:, 0] > 0
    la = fitted(model, "kron", [(x[first], y[first])])
    la.fit([(x[~first], y[~first])], override=False)
    whole = fitted(model, "kron", [(x, y)])
    assert_close(la.log_marginal_likelihood(), whole.log_marginal_likelihood(), "algebra")
