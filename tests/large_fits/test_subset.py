"""The subsampled GGN: unbiased, with loss and number of all data."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from laplace import Laplace, ParametricLaplace
from laplace.errors import InvalidArgument, InvalidType
from tests import grid
from tests.conformance.cases import Case, few, own_dense
from tests.reference.compare import assert_close


@pytest.mark.parametrize("case", few("all", "last_layer", structures=["full", "diag"], names=["mlp_classification"]))
def test_the_mean_over_all_subsets_is_the_whole(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, n = case.fit(), len(case.problem.y)
    pairs = list(combinations(range(n), 2))
    total = torch.zeros_like(own_dense(whole))
    for pair in pairs:
        rest = [i for i in range(n) if i not in pair]
        monkeypatch.setattr(torch, "randperm", lambda *_, order=(*pair, *rest), **__: torch.tensor(order))
        la = case.build()
        la.fit(case.problem.batches(4), subset=2)
        total += own_dense(la)
        assert la.n_data == n
        assert_close(la.loss, whole.loss, "backend", label="loss")
    assert_close(total / len(pairs), own_dense(whole), "backend")


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "ekfac", "lowrank", "block", "lowrank_kron"])
def test_all_of_the_data_is_the_usual_fit_and_seeds_count(structure: str) -> None:
    def fitted(seed: int, subset: int | None) -> ParametricLaplace:
        la = Laplace(grid.network(), "classification", "all", structure)
        la.fit(grid.batches(), subset=subset, generator=torch.Generator().manual_seed(seed))
        return la

    x = grid.data()[0]
    assert_close(fitted(0, 12)(x), fitted(0, None)(x), "float32_solve")
    first, again, other = fitted(1, 5)(x), fitted(1, 5)(x), fitted(2, 5)(x)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_ignored_labels_and_refusals() -> None:
    data = grid.batches()
    data[0] = (data[0][0], data[0][1].clone())
    data[0][1][:3] = -100
    la = Laplace(grid.network(), "classification", "all", "diag")
    la.fit(data, subset=9, generator=torch.Generator().manual_seed(0))
    assert la.n_data == 9
    expected = Laplace(grid.network(), "classification", "all", "diag")
    expected.fit(data)
    assert_close(la.H, expected.H, "float32")
    assert_close(la.log_marginal_likelihood(), expected.log_marginal_likelihood(), "float32")
    for subset in (0, 10, 2.5, True):
        with pytest.raises(InvalidArgument, match="from 1 to 9"):
            la.fit(data, subset=subset)
    with pytest.raises(InvalidArgument, match="once"):
        la.fit(iter(data), subset=3)
    assert_close(la.H, expected.H, "float32")


@pytest.mark.parametrize("structure", grid.REREAD)
def test_every_reading_of_a_shuffled_loader_is_of_the_same_subset(structure: str) -> None:
    x, y = (tensor.double() if tensor.is_floating_point() else tensor for tensor in grid.data())
    orders: list[torch.Tensor] = []

    class Shuffled:
        """Another order in every reading."""

        def __iter__(self):
            orders.append(torch.randperm(len(x), generator=torch.Generator().manual_seed(len(orders))))
            return ((x[places], y[places]) for places in orders[-1].split(5))

    la = Laplace(grid.network().double(), "classification", "all", structure)
    la.fit(Shuffled(), subset=7, generator=torch.Generator().manual_seed(4))
    places = torch.randperm(len(x), generator=torch.Generator().manual_seed(4))[:7].sort().values
    chosen = orders[-1][places]
    expected = Laplace(grid.network().double(), "classification", "all", structure)
    expected.fit([(x[chosen], y[chosen])])
    eye = torch.eye(la.posterior_covariance.shape[0], dtype=torch.float64)
    curvature = (expected.posterior_covariance.inverse() - eye) * len(x) / 7
    assert_close(la.posterior_covariance.inverse() - eye, curvature, "algebra")


def test_a_seed_is_no_generator() -> None:
    la = Laplace(grid.network(), "classification", "all", "diag")
    with pytest.raises(InvalidType, match="generator must be"):
        la.fit(grid.batches(), subset=3, generator=3)  # type: ignore[arg-type]
    la.fit(grid.batches())
    with pytest.raises(InvalidType, match="generator must be"):
        la.refine(grid.batches(), method="variational", generator=3)  # type: ignore[arg-type]


def test_without_a_generator_the_global_seed_leads_to_another_subset_each_time() -> None:
    def fitted() -> torch.Tensor:
        la.fit(grid.batches(), subset=3)
        return la.posterior_variance

    la = Laplace(grid.network(), "classification", "all", "diag")
    torch.manual_seed(0)
    first, second = fitted(), fitted()
    torch.manual_seed(0)
    assert torch.equal(first, fitted())
    assert not torch.equal(first, second)
