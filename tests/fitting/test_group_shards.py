"""Shards of every kind: what samplers repeat, layers that only some data use, and refusals that all processes learn."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, TensorDataset

from laplace import Laplace, OnlineLaplace, ParametricLaplace
from laplace.core.processes import Processes
from laplace.curvature import NativeHessian
from laplace.errors import ApproximationWarning, InvalidData, LaplaceError, ModelChangedError, ProcessError
from tests.fitting import ranks
from tests.fitting.test_group import assert_same, batches, data, found, make, network, of_both, outcomes, refused

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without torch.distributed")


def alone(la: ParametricLaplace, loader: Any) -> ParametricLaplace:
    """Fitted to all data in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ApproximationWarning)  # one of two processes
        la.fit(loader)
    return la


class Batches(Dataset[Any]):
    """Items that are whole batches."""

    def __len__(self) -> int:
        return len(batches())

    def __getitem__(self, i: int) -> Any:
        return batches()[i]


class Shuffled(BatchSampler):
    """Of which nobody knows where an index is."""


def twice(rows: Any) -> Any:
    """A batch with two rows for every datum."""
    x, y = zip(*rows, strict=True)
    return torch.stack(x).repeat(2, 1), torch.stack(y).repeat(2)


def samplers_of_every_kind(rank: int) -> None:
    dataset = TensorDataset(*data())

    def sampler(**options: Any) -> DistributedSampler[Any]:
        return DistributedSampler(dataset, **options)

    items = Batches()
    for number, loader in (
        (23, DataLoader(dataset, batch_sampler=BatchSampler(sampler(), 4, drop_last=False))),
        (23, DataLoader(dataset, 5, sampler=sampler(), num_workers=1)),
        (22, DataLoader(dataset, 5, sampler=sampler(drop_last=True))),
        (20, DataLoader(dataset, 5, sampler=sampler(), drop_last=True)),
        (23, DataLoader(items, batch_size=None, sampler=DistributedSampler(items))),
        (46, DataLoader(dataset, 11, sampler=sampler(), collate_fn=twice)),  # the repeated datum is a batch by itself
    ):
        la = make("all", "diag")
        la.fit(loader, group=distributed.group.WORLD)
        assert la.n_data == number
    kept = sampler(shuffle=False)
    for match, loader in (
        ("4 rows are not its 2 data", DataLoader(dataset, 5, sampler=kept, collate_fn=twice)),
        ("any batch.*drop_last", DataLoader(dataset, batch_sampler=Shuffled(kept, 4, drop_last=False))),
    ):
        refused(match, make("all", "diag"), loader, InvalidData if rank else ProcessError)


class Branches(nn.Module):
    """A network with a layer for batches of even length, and another one for the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.even, self.odd, self.last = (nn.Linear(*n) for n in ((3, 5), (5, 5), (5, 5), (5, 4)))

    def forward(self, x: Tensor) -> Tensor:
        middle = self.odd if len(x) % 2 else self.even
        return self.last(torch.tanh(middle(torch.tanh(self.first(x)))))


def layers_that_one_process_uses(rank: int) -> None:
    x, y = data()
    parts = [(x[:4], y[:4]), (x[4:12], y[4:12])], [(x[12:17], y[12:17])]

    def new(structure: str, **options: Any) -> ParametricLaplace:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = Branches().double()
        return Laplace(model, "classification", "all", structure, **options)

    corrected = {"structure_kwargs": {"corrected": True}}
    for structure, options in (
        ("kron", {}), ("ekfac", {}), ("lowrank_kron", {}), ("lowrank_kron", corrected), ("block", {}),
    ):  # fmt: skip
        la = new(structure, **options)
        la.fit(parts[rank], group=distributed.group.WORLD)
        assert_same(found(alone(new(structure, **options), [*parts[0], *parts[1]])), found(la))


class Positions(nn.Module):
    """Outputs `[B, C, T]`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).mT


def channels_are_told_to_a_process_without_data(rank: int) -> None:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(9, 5, 3, generator=generator).double(), torch.randint(4, (9, 5), generator=generator)
    y[torch.rand(9, 5, generator=generator) < 0.3] = -100
    for weights in ("all", "last_layer"):
        la, other = (Laplace(Positions(), "classification", weights, "kron") for _ in range(2))
        la.fit([] if rank else [(x[:4], y[:4]), (x[4:], y[4:])], group=distributed.group.WORLD)
        alone(other, [(x, y)])
        la.prior_precision = other.prior_precision = 30.0
        torch.testing.assert_close(la(x[:2]), other(x[:2]), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(la.log_marginal_likelihood(), other.log_marginal_likelihood(), rtol=1e-10, atol=0)
        assert la.n_data == other.n_data


def refusals_reach_all_processes(rank: int) -> None:
    """Within the time of the group, which is a minute here: none waits for one that has gone."""
    la = of_both(rank)
    kept = la._posterior
    if rank:
        with torch.no_grad():
            next(la.model.parameters()).add_(1)
    with pytest.raises(ModelChangedError if rank else ProcessError, match="changed after fit"):
        la.forget(batches(*((0, 3), (12, 14))[rank]), group=distributed.group.WORLD)
    assert la._posterior is kept
    mine = batches() if rank == 0 else []
    chosen = Laplace(network(), "classification", "subnetwork", "full", subnetwork_indices=torch.tensor([1, 2 + rank]))
    refused("rank 1.*other parameters random than rank 0", chosen, mine)  # though one of them has no data
    model = network().float()
    narrow = Laplace(model.double() if rank else model, "classification", "all", "diag")
    refused("rank 1.*dtypes", narrow, mine)
    with pytest.raises((AttributeError, TypeError) if rank else ProcessError, match=r"pickle|local object"):
        _everyone().gather_results(lambda: (lambda: 0) if rank else 0)


def _everyone() -> Processes:
    processes = Processes.of(distributed.group.WORLD)
    assert processes is not None
    return processes


def candidates_without_a_posterior_are_passed_over(rank: int) -> None:
    x, y = data()
    model = network()
    with torch.no_grad():
        [*model.parameters()][2].mul_(20)  # an indefinite Hessian
    la = alone(Laplace(model, "classification", "all", "full", backend=NativeHessian), [(x, y)])
    shard = [(x[:9], y[:9])] if rank else [(x[9:], y[9:])]
    for loss in ("nll", "ece"):
        for grid in ([1e4, 1e-6], [1e-6, 1e4]):
            options: dict[str, Any] = {"objective": loss, "grid": {"prior_precision": grid}, "pred_type": "nn"}
            result = la.optimize_hyperparameters(**options, val_loader=shard, group=distributed.group.WORLD)
            assert result.prior_precision.item() == 1e4
            assert result.values.isfinite().tolist() == [delta == 1e4 for delta in grid]


def sampled_targets_of_a_copy_differ(rank: int) -> None:
    """Copies, as states that all processes load, go on with the random numbers of one of them."""
    la = alone(make("all", "diag", backend_kwargs={"stochastic": True}), batches())
    one, both, former = copy.deepcopy(la), copy.deepcopy(la), la.H
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ApproximationWarning)  # both processes have the same data
        one.fit(batches(), override=False)
        both.fit(batches(), override=False, group=distributed.group.WORLD)
    assert both.n_data == 69
    assert not torch.allclose(both.H - former, 2 * (one.H - former))


def one_process_may_ask_for_the_number_of_data(rank: int) -> None:
    dataset = TensorDataset(*data())
    loader = DataLoader(dataset, 4, sampler=DistributedSampler(dataset))
    online = OnlineLaplace(network(), loader, group=distributed.group.WORLD)
    assert rank or online.n_data == 23
    empty = OnlineLaplace(network(), [], group=distributed.group.WORLD)
    with pytest.raises(LaplaceError, match="no data"):
        _ = empty.n_data
    shard = batches() if rank else []
    last = OnlineLaplace(network(), shard, subset_of_weights="last_layer", group=distributed.group.WORLD)
    assert last.la.problem.head is not None and last.n_data == 23
    with pytest.raises(LaplaceError, match="no data"):
        OnlineLaplace(network(), [], subset_of_weights="last_layer", group=distributed.group.WORLD)


CHECKS = [
    samplers_of_every_kind, layers_that_one_process_uses, channels_are_told_to_a_process_without_data,
    refusals_reach_all_processes, candidates_without_a_posterior_are_passed_over,
    sampled_targets_of_a_copy_differ, one_process_may_ask_for_the_number_of_data,
]  # fmt: skip


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return ranks.run(outcomes, CHECKS, size=2, folder=tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_in_two_processes(check: Callable[[int], None], of_ranks: list[dict[str, str]]) -> None:
    for rank, checked in enumerate(of_ranks):
        assert check.__name__ in checked, "one before it failed"
        assert not checked[check.__name__], f"rank {rank}: {checked[check.__name__]}"
