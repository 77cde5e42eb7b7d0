"""What `la.plan(loader)` says before a fit, against what the fitted posterior holds, and that it changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace import KronLaplace, Laplace
from laplace.core.nested import named_tensors
from laplace.curvature import GGNInterface, NativeEF, NativeHessian
from laplace.errors import InvalidArgument, InvalidData, UnsupportedError
from laplace.large_fits.planning import FitPlan
from laplace.structures import STRUCTURES, full
from tests.conformance.cases import Case, few


def network(width: int = 12) -> nn.Module:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*convolutions, nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 9))


def data(n_data: int = 24, batch_size: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n_data, 1, 8, 8, generator=generator)
    y = torch.randint(9, (n_data,), generator=generator)
    return list(zip(x.split(batch_size), y.split(batch_size), strict=True))


def held(state: object) -> int:
    """Bytes of all tensors in a state, each storage once."""
    found: dict[int, int] = {}

    def walk(part: object) -> None:
        if isinstance(part, Tensor):
            found[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        elif isinstance(part, dict | list | tuple):
            for inner in part.values() if isinstance(part, dict) else part:
                walk(inner)

    walk(state)
    return sum(found.values())


@pytest.mark.parametrize("weights", ["all", "last_layer"])
@pytest.mark.parametrize(
    ("structure", "options"),
    [(name, {}) for name in STRUCTURES] + [("lowrank_kron", {"structure_kwargs": {"corrected": True}})],
)
def test_kept_bytes_are_those_of_the_fitted_curvature(structure: str, options: dict[str, Any], weights: str) -> None:
    width = 12 if structure == "full" and weights == "all" else 60
    la = Laplace(network(width), "classification", weights, structure, **options)
    plan = la.plan(data())
    la.fit(data())
    actual = held(la.fitted().curvature.state())
    assert actual / 1.2 <= plan.kept_bytes <= 1.2 * actual
    assert plan.peak_bytes >= plan.kept_bytes > 0 and plan.predict_bytes > 0


@pytest.mark.parametrize("case", few("all", "last_layer", "mixed", structures=["diag", "kron", "block"]))
def test_every_problem_can_be_planned(case: Case) -> None:
    la = case.build()
    plan = la.plan(case.problem.batches(None))
    la.fit(case.problem.batches(None))
    assert plan.peak_bytes > 0
    if case.structure == "diag":
        assert plan.kept_bytes == held(la.fitted().curvature.state())


def test_a_vector_noise_keeps_a_term_per_output() -> None:
    x, y = torch.randn(12, 3), torch.randn(12, 4)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
    for structure in ("full", "diag", "block"):
        one, several = (
            Laplace(model, "regression", "all", structure, sigma_noise=noise).plan([(x, y)])
            for noise in (1.0, torch.ones(4))
        )
        assert several.kept_bytes == 4 * one.kept_bytes


def test_a_plan_says_what_a_fit_would_not_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a network whose full curvature no machine holds, in the time of a few passes and without its memory."""
    monkeypatch.setattr(full, "is_less_work", lambda n_params, n_rows: False)  # as if there were millions of data
    model = nn.Sequential(nn.Linear(100, 2000), nn.ReLU(), nn.Linear(2000, 2000), nn.ReLU(), nn.Linear(2000, 2))
    batch = torch.randn(4, 100), torch.randint(2, (4,))
    plan = Laplace(model, "classification", "all", "full").plan([batch])
    n_params = sum(p.numel() for p in model.parameters())
    assert plan.kept_bytes == 8 * n_params**2
    cheaper = [(other.weights, other.structure) for other in plan.cheaper]
    assert ("all", "kron") in cheaper and ("last_layer", "diag") in cheaper
    assert ("all", "block") not in cheaper, "its largest layer exceeds max_block"
    assert [other.peak_bytes for other in plan.cheaper] == sorted((o.peak_bytes for o in plan.cheaper), reverse=True)
    assert all(other.peak_bytes < plan.peak_bytes for other in plan.cheaper)
    for words in ("all / full", "last_layer / diag", "1 batches", "TiB"):
        assert words in str(plan)


def test_nothing_is_fitted_drawn_or_changed() -> None:
    model = network().train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data(24, 24)[0]), 8, shuffle=True)
    generator = torch.Generator().manual_seed(3)
    options = {"stochastic": True, "generator": generator}
    la = KronLaplace(model, "classification", backend_kwargs=options)
    draws, random = generator.get_state(), torch.get_rng_state()
    first, second = la.plan(loader), la.plan(loader)
    assert torch.equal(draws, generator.get_state()) and torch.equal(random, torch.get_rng_state())
    assert not la.is_fitted and model.training and not any(m._forward_hooks for m in model.modules())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert isinstance(first, FitPlan) and first.n_batches == 3
    assert (first.peak_bytes, first.kept_bytes) == (second.peak_bytes, second.kept_bytes)


def test_a_plan_is_made_for_the_first_batch_with_data_that_count() -> None:
    (x, y), *_ = data()
    plan = Laplace(network(), "classification", "all", "diag").plan([(x, torch.full_like(y, -100)), (x, y)])
    assert plan.peak_bytes > 0 and plan.n_batches == 2
    with pytest.raises(InvalidData, match="gave no data"):
        Laplace(network(), "classification", "all", "diag").plan([(x, torch.full_like(y, -100))])


def test_loaders_that_lose_their_first_batch_are_refused() -> None:
    la = Laplace(network(), "classification", "all", "diag")
    with pytest.raises(InvalidArgument, match="only once"):
        la.plan(iter(data()))

    class Unsized:
        def __iter__(self):
            return iter(data())

    plan = la.plan(Unsized())
    assert plan.n_batches is None and "one batch" in str(plan)


def test_other_backends() -> None:
    """Gradients of one column for the empirical Fisher, products alone for the Hessian, and no word on a user's own."""
    ggn, ef, hessian = (
        Laplace(network(), "classification", "all", "full", backend=backend).plan(data())
        for backend in (None, NativeEF, NativeHessian)
    )
    assert ef.peak_bytes <= ggn.peak_bytes and ef.kept_bytes == ggn.kept_bytes
    assert hessian.kept_bytes < ggn.kept_bytes, "sums of outer products are in float64"

    class Own(GGNInterface):
        def diag(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return torch.zeros(()), torch.zeros(1)

    with pytest.raises(UnsupportedError, match="Own"):
        Laplace(network(), "classification", "all", "diag", backend=Own).plan(data())


def test_a_smaller_memory_budget_lowers_the_peak() -> None:
    large, small = (
        Laplace(network(), "classification", "all", "diag", backend_kwargs=options).plan(data())
        for options in ({}, {"memory_budget": 2**14})
    )
    assert small.peak_bytes < large.peak_bytes and small.kept_bytes == large.kept_bytes


class _TiedTokens(nn.Module):
    """Tokens that attend to each other, of which the embedding is the head too: it takes passes for every position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        return torch.tanh(self.mix(h.cumsum(1))) @ self.embedding.weight.T


def test_what_takes_too_many_passes_is_not_recommended() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(9, (4, 5))
    loader = [(tokens, tokens)]
    named = {}
    for most in (1000, 10):
        la = Laplace(_TiedTokens(), "classification", "all", "full", backend_kwargs={"max_passes": most})
        named[most] = {other.structure for other in la.plan(loader).cheaper}
    assert {"kron", "diag"} <= named[1000]
    assert named[10] <= {"lowrank"}
    for structure in named[10]:
        Laplace(_TiedTokens(), "classification", "all", structure, backend_kwargs={"max_passes": 10}).fit(loader)
    with pytest.raises(UnsupportedError, match="max_passes"):
        Laplace(_TiedTokens(), "classification", "all", "diag", backend_kwargs={"max_passes": 10}).fit(loader)


@pytest.mark.parametrize("structure", ["full", "block"])
def test_running_bytes_are_those_of_the_sums_by_pairs_of_layers(structure: str) -> None:
    """Of matrices that are large enough to be summed so; they are completed beside the sums."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 6))
    x, y = torch.randn(640, 30), torch.randint(6, (640,))
    la = Laplace(model, "classification", "all", structure)
    cost = STRUCTURES[structure].cost(la.engine.profile(x, y), la.structure_options)
    la.fit([(x, y)])
    curvature = la.fitted().curvature
    sums = sum(tensor.nbytes for _, tensor in named_tensors(curvature))
    matrices = sum(tensor.nbytes for _, tensor in named_tensors(curvature.state()))
    assert sums < matrices == cost.fitted
    if structure == "full":
        assert cost.running == sums
    else:  # whose head is summed without pairs
        assert cost.running <= sums * 1.1 and sums <= cost.running * 1.1
    assert cost.adding >= sums + matrices
