"""Where operations are dear, fits and predictions take few of them, and give the numbers of a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from laplace.core import pieces
from laplace.engines.engine import EngineOptions
from laplace.errors import InvalidData
from laplace.structures import STRUCTURES
from tests import grid
from tests.operations.budgets import BUDGETS, Budget
from tests.operations.networks import NETWORKS, counted, of_one_pass


@pytest.fixture
def dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU taken for an accelerator."""
    monkeypatch.setattr(pieces, "_CHEAP", frozenset({"meta"}))


@pytest.mark.usefixtures("dear")
@pytest.mark.parametrize("name", BUDGETS, ids=", ".join)
def test_no_more_operations_than_the_budget(name: tuple[str, str, str]) -> None:
    network, weights, structure = name
    found = counted(NETWORKS[network], weights, structure)
    above = {what: count for what, count in found._asdict().items() if count > getattr(BUDGETS[name], what)}
    assert not above, f"{found} of {BUDGETS[name]}"


@pytest.mark.parametrize("name", BUDGETS, ids=", ".join)
def test_budgets_are_a_few_passes_of_the_network(name: tuple[str, str, str]) -> None:
    network, weights, structure = name
    model, batches = NETWORKS[network]()
    forward, r = of_one_pass(model, batches[0][0])
    budget: Budget = BUDGETS[name]
    assert budget.tuning_reads <= (4 if weights == "all" else 21)
    if weights == "last_layer":
        # Sides of few rows, as those of such small data, are rotated by two products more than matrices.
        assert budget.batch <= forward + 45 and budget.probit <= forward + 27
    elif structure == "full":
        assert budget.batch <= 121 and budget.probit <= 120
    else:
        assert budget.batch <= 1.2 * r + 40 and budget.probit <= r


@pytest.mark.usefixtures("dear")
def test_a_batch_that_is_looked_at_late_is_named_and_leaves_all_as_it_was() -> None:
    """Conditions of several batches are read together; labels of lists are asked for together, too."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
    batches = [(torch.randn(4, 3), torch.randint(3, (4,))) for _ in range(14)]
    la = grid.make("all", "diag", "classification", model)
    la.fit(batches)
    before = la.H
    x, y = batches[9]
    wrong_label, wrong_input = y.clone(), x.clone()
    wrong_label[2], wrong_input[1] = 7, torch.nan
    for bad in ((x, wrong_label), (wrong_input, y)):
        for loader in ([*batches[:9], bad, *batches[10:]], iter([*batches[:9], bad, *batches[10:]])):
            with pytest.raises(InvalidData, match=r"^batch 9: "):
                la.fit(loader)
            assert la.H is before or torch.equal(la.H, before)
    ignored = y.clone()
    ignored[0] = -100
    la.fit([*batches[:9], (x, ignored), *batches[10:]])
    few = la.H
    la.fit([*batches[:9], (x[1:], y[1:]), *batches[10:]])
    assert la.n_data == 14 * 4 - 1 and torch.equal(la.H, few)


def test_a_card_holds_a_share_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "total_memory", lambda device: 60 * 2**30 if device.type == "cuda" else 0)
    card, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert (EngineOptions().budget(card), EngineOptions().budget(cpu)) == (10 * 2**30, 2**30)
    assert EngineOptions(memory_budget=5).budget(card) == 5
    assert pieces.bytes_at_once(1, card) > pieces.bytes_at_once(1, torch.device("mps")) > pieces.bytes_at_once(1, cpu)


class Images(nn.Module):
    """Strided, grouped, dilated and transposed convolutions, norms and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.BatchNorm2d(4), nn.Tanh(),
            nn.Conv2d(4, 4, 3, stride=2, padding=2, dilation=2, bias=False), nn.GroupNorm(2, 4), nn.Tanh(),
            nn.ConvTranspose2d(4, 3, 3, stride=2), nn.MaxPool2d(2), nn.Tanh(),
        )  # fmt: skip
        self.head = nn.Linear(3 * 4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


def numbers(model: nn.Module, batches: list[tuple[Tensor, Tensor]], weights: str, structure: str) -> list[Tensor]:
    """Of a fit: probabilities, variances of the outputs and the evidence."""
    la = grid.make(weights, structure, "classification", model, prior_precision=0.7)
    la.fit(batches)
    x = batches[0][0]
    mean, variance = la(x, pred_type="glm", link_approx="probit"), la.predict(x).latent_variance
    return [mean, variance, la.log_marginal_likelihood()]


@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_numbers_are_those_of_a_cpu(structure: str, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = Images().eval()
        batches = [(torch.randn(5, 2, 8, 8), torch.randint(3, (5,))) for _ in range(3)]
        expected = numbers(model, batches, weights, structure)
        monkeypatch.setattr(pieces, "_CHEAP", frozenset({"meta"}))
        found = numbers(model, batches, weights, structure)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-10 * other.abs().max()
